"""Plan: the candidate that won, with the evidence, ready to run."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any  # the user's own pytrees have no narrower type

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from autoshard.compat.jaxpr.contexts import without_mesh
from autoshard.compat.jaxpr.jaxprs import as_function
from autoshard.compat.xla.stderr_capture import quiet
from autoshard.compat.xla.versions import versions
from autoshard.errors import PlanError
from autoshard.lowering.lower import compilable_step, lower_step, shardings
from autoshard.plan.donation import refuse_deleted
from autoshard.plan.evaluation import Evaluation
from autoshard.plan.file import PlanRecord, describe_program, describe_target, write_plan
from autoshard.plan.verify import compared
from autoshard.program.analysis import Analysis
from autoshard.program.axes import Axes
from autoshard.program.program import Leaf, Program, held_dtype
from autoshard.records.evidence import Evidence, PlanSummary
from autoshard.records.layout import Candidate, Layout, Spec
from autoshard.records.module import Module
from autoshard.records.numerics import NumericsReport
from autoshard.records.trial import Trial
from autoshard.report import describe
from autoshard.rungs.propagate.constraints import minimal_constraints
from autoshard.space.space import Space
from autoshard.space.specs import Specs
from autoshard.target.target import Target

_LOOKED_AT = 2
"""Steps whose arrays are looked at one by one: those that follow come from the same places."""


class Plan:
    """A sharding plan for one workload on one target. Made by `search` and `load_plan`.

    Attributes:
      mesh: the `jax.sharding.Mesh`, its axes Auto; an AbstractMesh for named hardware.
      layout: mesh shape, activation rules, state rules.
      knobs: the knob values the plan was made with.
      state_shardings, batch_shardings: pytrees of NamedSharding.
      evidence: what the search learnt.
    """

    def __init__(
        self,
        analysis: Analysis,
        space: Space,
        target: Target,
        layout: Layout,
        evidence: Evidence,
        compiled: jax.stages.Compiled | None = None,
    ):
        self._analysis = analysis
        self._space = space
        self._target = target
        self._specs: Specs = space.specs(layout)
        self.layout = layout
        self.knobs: dict[str, str | int | float | bool | None] = dict(space.knobs)
        self.evidence = evidence
        self._given = compiled
        self._warned: set[str] = set()
        self._steps_looked_at = 0
        self.mesh: Mesh | AbstractMesh = target.any_mesh(layout.mesh)
        program = analysis.program
        count = len(program.state)
        flat = shardings(self.mesh, self._specs.inputs)
        self.state_shardings: Any = jax.tree.unflatten(program.state_tree, flat[:count])
        self.batch_shardings: Any = jax.tree.unflatten(program.batch_tree, flat[count:])

    @functools.cached_property
    def _constrained(self) -> Specs:
        """The shardings whose constraints the running step has."""
        return minimal_constraints(self._analysis, self._specs)

    @property
    def program(self) -> Program:
        return self._analysis.program

    @property
    def axes(self) -> Axes:
        """The logical axes of the program, which the rules name."""
        return self._analysis.axes

    @property
    def target(self) -> Target:
        """The devices that the plan is for."""
        return self._target

    @property
    def digest(self) -> str:
        """The digest of the program that the plan is for."""
        return self._analysis.digest

    @property
    def keep_constraints(self) -> bool:
        """Whether the step's own sharding constraints stay in it."""
        return self.program.keeps_constraints

    @property
    def fixed_leaves(self) -> tuple[tuple[str, Spec], ...]:
        """(path, spec) of the state leaves the user fixed."""
        return tuple((self.program.state[i].path, s) for i, s in self._space.fixed_leaves)

    @property
    def fixed_axes(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Logical axis -> mesh axes, as the user fixed them."""
        return self._space.pinned

    @property
    def platform(self) -> str:
        """The platform that programs are lowered for."""
        return self._target.lowering_platform

    @property
    def candidate(self) -> Candidate:
        return Candidate(layout=self.layout, knobs=self._space.knobs)

    @property
    def trial(self) -> Trial | None:
        """The winner's trial."""
        return self.evidence.winner

    @property
    def summary(self) -> PlanSummary:
        """The plan as plain data, from which `str` prints."""
        return PlanSummary(
            evidence=self.evidence,
            layout=self.layout,
            target=self._target.describe(),
            is_here=self._target.is_here,
            labels={axis.name: axis.label for axis in self.axes.axes},
        )

    @property
    def specs(self) -> Specs:
        """Every sharding of the plan: inputs, outputs and sites."""
        return self._specs

    def init(self) -> Any:
        """The initial state, made sharded: no device holds the whole of it.

        Raises:
          PlanError: the plan is for named hardware. `place`, `put`, `step`, `jit` and `check` raise
            it too.
        """
        self._must_be_here()
        wanted = jax.tree.leaves(self.state_shardings)
        make = jax.jit(as_function(self.program.plain_init), out_shardings=wanted)
        with quiet(), without_mesh():
            compiled = make.lower().compile()
        return jax.tree.unflatten(self.program.state_tree, compiled())

    def place(self, state: Any) -> Any:
        """A state from elsewhere (a checkpoint, host arrays), sharded as the plan wants it.

        The given arrays stay usable: the placed ones share no memory with them, so `step` may
        donate them.

        Raises:
          PlanError: a leaf has another shape or dtype than the plan's state, or is deleted.
        """
        self._must_be_here()
        leaves = self._flat("state", state, self.program.state, self.program.state_tree)
        with without_mesh():
            placed = [
                # A copy first: device_put may keep an array's own buffers, also as one of many
                # shards.
                jax.device_put(jnp.copy(x) if isinstance(x, jax.Array) else np.array(x), s)
                for x, s in zip(leaves, jax.tree.leaves(self.state_shardings), strict=True)
            ]
        return jax.tree.unflatten(self.program.state_tree, placed)

    def put(self, batch: Any) -> Any:
        """A batch on the devices. In a job of many processes each process gives its own part.

        Args:
          batch: arrays; with one process the global batch, with many this process's part of it
            (the rows that its devices hold). On CPU devices the batch may share memory with a
            NumPy array, as with `jax.device_put`: do not fill an array again that a step reads.
        """
        self._must_be_here()
        leaves, tree = jax.tree.flatten(batch)
        program = self.program
        if tree != program.batch_tree:
            raise PlanError(f"the batch has structure {tree}, expected {program.batch_tree}")
        targets = jax.tree.leaves(self.batch_shardings)
        if jax.process_count() == 1:
            leaves = self._flat("batch", batch, program.batch, program.batch_tree)
            placed = [jax.device_put(x, s) for x, s in zip(leaves, targets, strict=True)]
        else:
            placed = [
                jax.make_array_from_process_local_data(s, np.asarray(x), leaf.shape)
                for x, s, leaf in zip(leaves, targets, program.batch, strict=True)
            ]
        return jax.tree.unflatten(tree, placed)

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """One training step: (state, batch) -> (new state, metrics).

        The state is donated: use the new one. Both have the same shardings, so steps compile once.
        The batch is never donated. Metrics are replicated.

        Arrays with other shardings are moved, which costs time at each step. The first time this
        happens to a state, and to a batch, a warning names the leaf.

        Raises:
          PlanError: an array has another shape or dtype than the plan's, or was deleted, like a
            donated state.
        """
        self._must_be_here()
        program = self.program
        flat, tree = jax.tree.flatten((state, batch))
        out: list[jax.Array] | None = None
        if tree == self._trees and all(isinstance(x, jax.Array) for x in flat):
            refuse_deleted(flat, program.inputs)
            if self._steps_looked_at < _LOOKED_AT:
                # JAX moves arrays that are not committed to a device without a word.
                self._steps_looked_at += 1
                self._warn_of_moves(flat)
            # As a rule all else is as it should be; a look at each from Python takes longer.
            run = self.compiled
            with contextlib.suppress(TypeError, ValueError):  # said, or mended, below
                out = run(*flat)
        if out is None:
            flat = self._checked(state, batch)
            self._warn_of_moves(flat)
            out = self.compiled(*self._placed(flat))
        count = len(program.state)
        return (
            jax.tree.unflatten(program.state_tree, out[:count]),
            jax.tree.unflatten(program.metrics_tree, out[count:]),
        )

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The program that `step` runs, on the leaves of state and batch.

        It is compiled once: by `load_plan`, which checks it, or at the first use.
        """
        self._must_be_here()
        if self._given is not None:
            return self._given
        with quiet(), without_mesh():
            return compilable_step(self._analysis, self._constrained, self._target).compile()

    @functools.cached_property
    def _trees(self) -> Any:
        """The structure of (state, batch)."""
        return jax.tree.structure((self.state_shardings, self.batch_shardings))

    def _checked(self, state: Any, batch: Any) -> list[Any]:
        """Their leaves, each looked at."""
        program = self.program
        return self._flat("state", state, program.state, program.state_tree) + self._flat(
            "batch", batch, program.batch, program.batch_tree
        )

    def _placed(self, flat: Sequence[Any]) -> list[jax.Array]:
        """The leaves of a state and a batch, moved where they are elsewhere than planned."""
        return [
            x if isinstance(x, jax.Array) and x.sharding == s else jax.device_put(x, s)
            for x, s in zip(flat, self._wanted, strict=True)
        ]

    @functools.cached_property
    def _wanted(self) -> list[jax.sharding.Sharding]:
        """The shardings of the leaves of state and batch."""
        return jax.tree.leaves((self.state_shardings, self.batch_shardings))

    def _warn_of_moves(self, flat: Sequence[Any]) -> None:
        """Warns once of a state and once of a batch that the step moves.

        NumPy arrays and numbers are left out: they are moved in any case.
        """
        count = len(self.program.state)
        moved = [
            ("state" if i < count else "batch", leaf.path, x.sharding, s)
            for i, (leaf, x, s) in enumerate(
                zip(self.program.inputs, flat, self._wanted, strict=True)
            )
            if isinstance(x, jax.Array)
            and x.shape == leaf.shape  # else the step is refused
            and not x.sharding.is_equivalent_to(s, x.ndim)
        ]
        for word, call in (("state", "plan.place(state)"), ("batch", "plan.put(batch)")):
            found = [row for row in moved if row[0] == word]
            if not found or word in self._warned:
                continue
            self._warned.add(word)
            _, path, got, expected = found[0]
            others = f" (and {len(found) - 1} more leaves)" if found[1:] else ""
            warnings.warn(
                f"plan.step moves {path}{others}, at each step that gets it so: got {got}, expected"
                f" {expected}. Place the {word} before the step: {call}",
                stacklevel=3,
            )

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(state, batch)` jitted with the plan's shardings, for evaluation.

        The function has logical axes of its own. Those that the plan has rules for are sharded.
        Other batch shapes are accepted: a dimension that does not divide is replicated. Nothing is
        donated, and results are replicated. Each shape is compiled once; the programs of the last
        16 shapes are kept.
        """
        self._must_be_here()
        return Evaluation(function, self._analysis, self._specs, self.layout, self.mesh)

    def check(self, steps: int = 2, seed: int = 0) -> NumericsReport:
        """Compares the step with the unsharded one, from one initial state, on these devices.

        A search checks everything that it measures. This checks a plan that was made for named
        hardware, or with other versions. One device must hold the unsharded step; if the step uses
        `shard_map`, each device must. The host holds two states beside the initial one. With less
        free memory the unsharded step runs several times; with room for less than one state some
        leaves are not compared.

        Args:
          seed: the seed of the batches, from the workload's `sample` or synthetic.

        Returns:
          Every leaf of state and metrics, with its error and what was allowed. `unchecked` names
          the leaves for which the host had no room.

        Raises:
          PlanError: a leaf differs by more, or the unsharded step does not run.
        """
        self._must_be_here()
        return compared(self.program, self._target, self.lower(), steps=steps, seed=seed)

    def lower(self) -> Module:
        """The running step as plain data; its digest is that of the program that was measured."""
        return lower_step(self._analysis, self._constrained, self._target)

    def save(self, path: str) -> None:
        """Writes the plan as JSON, completely or not at all; `autoshard.load_plan` reads it."""
        record = PlanRecord(
            candidate=self.candidate,
            program=describe_program(self.program, self.digest),
            target=describe_target(self._target),
            versions=versions(),
            fixed_leaves=self.fixed_leaves,
            fixed_axes=self.fixed_axes,
            evidence=self.evidence,
            keep_constraints=self.keep_constraints,
        )
        write_plan(record, path)

    def __str__(self) -> str:
        return describe(self.summary)

    def __repr__(self) -> str:
        return f"<Plan {self.layout.to_json()} knobs={self.knobs}>"

    def _must_be_here(self) -> None:
        if not self._target.is_here:
            raise PlanError(
                f"the plan is for {self._target.describe()}, which are not here: save it with"
                " plan.save(path), and where they are load it with autoshard.load_plan(path,"
                " model_fn, jax.devices())"
            )

    def _flat(self, word: str, tree: Any, leaves: Sequence[Leaf], treedef: Any) -> list[Any]:
        flat, got = jax.tree.flatten(tree)
        if got != treedef:
            raise PlanError(f"the {word} has structure {got}, expected {treedef}")
        refuse_deleted(flat, leaves)
        taken: list[Any] = []
        for x, leaf in zip(flat, leaves, strict=True):
            shape, dtype = np.shape(x), getattr(x, "dtype", None)
            if dtype is not None and (word == "batch" or _fits(x, leaf.dtype)):
                # As jit takes them. A state must not lose half of its bits.
                dtype = held_dtype(dtype)
            if dtype is None and tuple(shape) == leaf.shape:
                taken.append(_number(x, leaf))
                continue
            # Not `in (None, ...)`: NumPy says that float64 equals None.
            if tuple(shape) != leaf.shape or dtype != leaf.dtype:
                raise PlanError(
                    f"{leaf.path}: got {dtype}{list(shape)}, expected"
                    f" {leaf.dtype}{list(leaf.shape)}"
                )
            taken.append(x)
        return taken


def _number(x: Any, leaf: Leaf) -> np.ndarray:
    """A Python number as a leaf, where jit would take it beside values of that dtype."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if jnp.result_type(x, leaf.dtype) == leaf.dtype:
            return np.asarray(x, leaf.dtype)
    raise PlanError(f"{leaf.path}: got {x!r}, expected {leaf.dtype}{list(leaf.shape)}")


def _fits(x: Any, dtype: np.dtype) -> bool:
    """Whether NumPy integers have values that a leaf's dtype has too."""
    numbers = isinstance(x, np.ndarray | np.generic) and np.issubdtype(x.dtype, np.integer)
    if not numbers or not jnp.issubdtype(dtype, jnp.integer):
        return False
    limits = jnp.iinfo(dtype)
    return bool(np.size(x) == 0 or (limits.min <= np.min(x) and np.max(x) <= limits.max))
