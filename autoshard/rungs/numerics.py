"""Does a sharded program compute what the reference computes? Relative errors of the *change*.

Parameters alone cannot tell: with adamw a gradient wrong by 8x moves them by 6e-6 of their size.
So every leaf of the state, optimizer moments included, is compared by what the steps added to it:
`||dx - dx_ref|| / ||dx_ref||` over the leaf, in float64 on the host. To a value that was not finite
before (a best loss of infinity) they added all that it is.

What that alone would get wrong is rounding. Some changes are nothing but rounding noise: the
gradient of a bias that cancels is zero but for it; adam divides noise by noise, so that
elements with no gradient move by a full step in a random direction; a bf16 parameter moves by
less than its last bit. No tolerance on the result can be right for those and strict for the rest.
So the reference runs again from a state and batch whose floats are perturbed by about one unit in
the last place: how far that moves a leaf is the leaf's *noise*. A third run, perturbed more,
finds the leaves with *jumps*: an element turned by a third of the largest change. A candidate is
allowed

    ||dx - dx_ref||  <=  tolerance * ||dx_ref||  +  4 * noise
                         [+  8 * max|dx_ref| if jumps]  [+  bend / 8 if kinks].

The term of jumps is sixteen elements that went the other way: such events are rare and all or
nothing, so that one run says little of how many the next will have. Kinks are what relu has: an
activation that rounding takes to the other side of 0 adds its whole part to a gradient, or takes it
away, while the loss hardly moves. A smooth leaf moves in proportion to the perturbation, and a
fourth run, perturbed by 0.3 of the third, shows whether it does; its *bend* is by how much not. The
activations that change sides grow in number as the perturbation does, and what they add up to as
its root: an eighth of what 1000 units do is what 16 do, and other orders of summation are a few.

In a healthy f32 leaf the noise is a tenth of the tolerance, and there are neither jumps nor kinks.
A leaf where the three exceed half the change is called noisy: there only gross errors show
(`NumericsReport.noisy`). So are adam's parameters judged; its moments do not amplify, and are
judged strictly, so that a wrong gradient is still caught. Errors that perturbing the inputs does
not excite (long sums added up in another order) have the tolerance.

A replicated or partly replicated leaf is read from every device: copies that drifted apart are a
missing all-reduce, and the worst copy counts.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from autoshard.rungs import norms
from autoshard.rungs.pieces import over_pieces
from autoshard.trial import Failure, Kind, Stage

REVISION = 4
"""Raise it when programs may pass that failed: failures of another revision are not believed."""

NOISE_FACTOR = 4.0
_JUMP = 0.3
_JUMP_FACTOR = 8.0
_NOISY = 0.5
_TINY = float(np.finfo(np.float64).tiny)
_COARSE = ("bf16", "f16")
_TOLERANCE = 1e-4
_COARSE_TOLERANCE = 3e-2
_CUT_TOLERANCE = _COARSE_TOLERANCE / 8  # of products that cut f32 to TF32: as its unit to bf16's
_PROBE = 1000.0  # units in the last place
_PART = 0.3  # of the probe: the run that shows whether a leaf moves in proportion
_ROUNDING = 16.0  # units that another order of summation may come to
_COARSE_PROBE = 8.0
_EIGHT_BIT_TOLERANCE = 0.25

Copies = tuple[np.ndarray, ...]
"""One value as the devices hold it: the distinct copies of the whole array, one if all agree."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What a program computed in a few steps.

    Attributes:
      state: the last state, for each leaf its copies.
      metrics: for each step, for each metric its copies.
    """

    state: tuple[Copies, ...]
    metrics: tuple[tuple[Copies, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafError:
    """How far one state leaf or metric is off.

    Attributes:
      path: pytree path; a metric's ends with its step, counted from 1.
      error: relative error, `||dx - dx_ref|| / (||dx_ref|| + slack / tolerance)`, so that it is
        within the tolerance exactly when the rule above holds. A metric is compared by its value.
        For integers, booleans and keys: the share of elements that differ.
      tolerance: the largest error that passes. 0 for integers, booleans and keys, unless rounding
        noise changes them in the reference too (a count of correct answers).
      noisy: the change is mostly rounding noise; only gross errors show.
      copies: distinct copies on the devices; more than 1 where replicas differ.
    """

    path: str
    error: float
    tolerance: float
    noisy: bool = False
    copies: int = 1

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NumericsReport:
    """The comparison of one program with a reference.

    Attributes:
      steps: steps that both ran from the same state.
      state, metrics: every leaf.
    """

    steps: int
    state: tuple[LeafError, ...]
    metrics: tuple[LeafError, ...]

    @property
    def leaves(self) -> tuple[LeafError, ...]:
        return self.state + self.metrics

    @property
    def passed(self) -> bool:
        return all(leaf.passed for leaf in self.leaves)

    @property
    def worst(self) -> LeafError | None:
        """The leaf with the largest error, failed ones first; None without any."""
        return max(self.leaves, key=lambda leaf: (not leaf.passed, leaf.error), default=None)

    @property
    def noisy(self) -> tuple[str, ...]:
        """Paths of the leaves where only gross errors show."""
        return tuple(leaf.path for leaf in self.leaves if leaf.noisy)

    def failure(self, elapsed_s: float = 0.0) -> Failure | None:
        """The failure this comparison means for the candidate, None if it passed.

        Args:
          elapsed_s: what the comparison took, seconds.
        """
        wrong = sorted((x for x in self.leaves if not x.passed), key=lambda x: -x.error)
        if not wrong:
            return None
        lines = [
            f"  {x.path}: error {x.error:.3g}, tolerance {x.tolerance:.3g}"
            + (f", {x.copies} different copies on the devices" if x.copies > 1 else "")
            for x in wrong[:5]
        ]
        share = f"{len(wrong)} of {len(self.leaves)} leaves"
        head = f"after {self.steps} steps {share} differ from the reference:"
        return Failure(
            stage=Stage.PROFILE,
            kind=Kind.NUMERICS,
            message="\n".join([head, *lines]),
            elapsed_s=elapsed_s,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceLost:
    """There is no comparison: the reference ran before, and failed when it had to run once more.

    That says nothing of who was to be compared with it.
    """

    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What candidates are compared with. Made by `reference`.

    Attributes:
      steps: length of the trajectory.
      initial: the state both start from, one array a leaf.
      trajectory: the reference's.
      state_slack, metrics_slack: what rounding is allowed to do to each leaf: an L2 norm, or for
        integers the share of elements that may differ. Metrics by step.
      coarse: tolerance that the float types inside the program call for.
    """

    steps: int
    initial: tuple[np.ndarray, ...]
    trajectory: Trajectory
    state_slack: tuple[float, ...]
    metrics_slack: tuple[tuple[float, ...], ...]
    coarse: float


def perturb(
    values: Sequence[np.ndarray], float_types: frozenset[str], units: float = 1.0
) -> list[np.ndarray]:
    """Moves every float but 0 a little up or down, the same way each time.

    By `units` times the spacing of its dtype, or, if that is more, half the spacing of the coarsest
    type the program computes in: one that casts f32 parameters to bf16 rounds like bf16.
    """
    rng = np.random.default_rng(20)
    coarsest = _unit(float_types) / 2
    moved = []
    for value in values:
        if jnp.issubdtype(value.dtype, jnp.inexact):
            share = units * max(float(jnp.finfo(value.dtype).eps), coarsest)
            value = _moved(value, share, rng)
        moved.append(value)
    return moved


def _moved(value: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Each element more or less by `share` of itself, at random."""
    moved = np.empty_like(value, order="C")
    bits = np.frombuffer(rng.bytes(-(-value.size // 8)), np.uint8)
    up = np.unpackbits(bits, count=value.size).view(np.bool_)

    def move(old: np.ndarray, up: np.ndarray, new: np.ndarray) -> None:
        new[:] = (norms.wide(old) * np.where(up, 1 + share, 1 - share)).astype(old.dtype)

    over_pieces(move, value, up, moved)
    return moved


def reference(
    initial: Sequence[np.ndarray],
    float_types: frozenset[str],
    batches: Sequence[Sequence[np.ndarray]],
    run: Callable[[Sequence[np.ndarray], Sequence[Sequence[np.ndarray]]], Trajectory],
) -> Reference:
    """Runs the reference as it is, and from starts perturbed by little and by more.

    Args:
      initial: the state leaves.
      float_types: what the reference computes in, as `compat.executable.float_types` has it.
      batches: one batch for each step.
      run: (state, batches) -> the reference program's trajectory.
    """
    trajectory = run(initial, batches)
    coarse = _program_tolerance(float_types)

    def perturbed(units: float) -> tuple[Trajectory, list[np.ndarray]]:
        """The trajectory from a perturbed start, and the start."""
        start = perturb(initial, float_types, units)
        return run(start, [perturb(batch, float_types, units) for batch in batches]), start

    changes = _changes(trajectory, initial)
    near, start = perturbed(1.0)
    noise = [
        NOISE_FACTOR * _apart(a, b) for a, b in zip(_changes(near, start), changes, strict=True)
    ]
    metrics_slack = tuple(
        tuple(NOISE_FACTOR * norms.distance(a[0], b[0]) for a, b in zip(x, y, strict=True))
        for x, y in zip(near.metrics, trajectory.metrics, strict=True)
    )
    fine = coarse == _TOLERANCE
    far = _changes(*perturbed(_PROBE if fine else _COARSE_PROBE))
    slack = [s + _jumps(a, b) for s, a, b in zip(noise, far, changes, strict=True)]
    if fine:
        part = _changes(*perturbed(_PROBE * _PART))
        rows = zip(part, far, changes, noise, strict=True)
        slack = [s + _kinks(*row) for s, row in zip(slack, rows, strict=True)]
    return Reference(
        steps=len(batches),
        initial=tuple(initial),
        trajectory=trajectory,
        state_slack=tuple(slack),
        metrics_slack=metrics_slack,
        coarse=coarse,
    )


class _Change(NamedTuple):
    """By what a leaf changed: the two arrays whose difference it is, which is twice as wide."""

    new: np.ndarray
    old: np.ndarray

    @property
    def is_float(self) -> bool:
        return bool(jnp.issubdtype(self.new.dtype, jnp.inexact))


def _changes(trajectory: Trajectory, start: Sequence[np.ndarray]) -> list[_Change]:
    return [_Change(new[0], old) for new, old in zip(trajectory.state, start, strict=True)]


def _apart(moved: _Change, change: _Change) -> float:
    """L2 norm of the difference of two changes; the share of integers that came out otherwise."""
    if not change.is_float:
        return norms.distance(moved.new, change.new)
    return norms.norm(norms.second, *moved, *change)


def _jumps(moved: _Change, change: _Change) -> float:
    """What jumping elements may add to the L2 norm of a leaf; 0 if none jumped."""
    if not change.is_float:
        return 0.0

    largest = norms.largest(norms.minus, *change)
    jump = norms.largest(norms.second, *moved, *change)
    return _JUMP_FACTOR * largest if jump > _JUMP * largest else 0.0


def _kinks(part: _Change, moved: _Change, change: _Change, noise: float) -> float:
    """What elements on the other side of a kink may add to a leaf's L2 norm; 0 if it is smooth.

    Args:
      part, moved: the leaf's change from starts perturbed by `_PART` of the probe and by all of it.
      noise: what rounding explains; that of these two runs, the first's enlarged, is as much again.
    """
    if not change.is_float:
        return 0.0

    def bent(*pieces: np.ndarray) -> np.ndarray:
        of_part, of_all, of_none = pieces[:2], pieces[2:4], pieces[4:]
        return norms.minus(
            norms.second(*of_all, *of_none), norms.second(*of_part, *of_none) / _PART
        )

    bend = norms.norm(bent, *part, *moved, *change)
    return math.sqrt(_ROUNDING / _PROBE) * bend if bend > 2 * noise else 0.0


def compare(
    candidate: Trajectory,
    against: Reference,
    state_paths: Sequence[str],
    metric_paths: Sequence[str],
) -> NumericsReport | Failure:
    """Compares leaf by leaf.

    Returns:
      A report, also when leaves are off; a Failure of kind numerics where the candidate has values
      that are not finite and the reference has not, or where both blew up.
    """
    broken = not_finite(candidate, against.trajectory, against.initial, state_paths, metric_paths)
    if broken is not None:
        return broken
    state = []
    for path, copies, expected, start, slack in zip(
        state_paths,
        candidate.state,
        against.trajectory.state,
        against.initial,
        against.state_slack,
        strict=True,
    ):
        state.append(_leaf(path, copies, expected[0], start, slack, against.coarse))
    metrics = []
    for step, (got, wanted, slacks) in enumerate(
        zip(candidate.metrics, against.trajectory.metrics, against.metrics_slack, strict=True), 1
    ):
        for path, copies, expected, slack in zip(metric_paths, got, wanted, slacks, strict=True):
            where = f"{path} at step {step}"
            metrics.append(_leaf(where, copies, expected[0], None, slack, against.coarse))
    return NumericsReport(steps=against.steps, state=tuple(state), metrics=tuple(metrics))


def _leaf(
    path: str,
    copies: Copies,
    expected: np.ndarray,
    start: np.ndarray | None,
    slack: float,
    coarse: float,
) -> LeafError:
    """The error of one leaf: of its change from `start`, or of its value where that is None."""
    distance = max(norms.distance(copy, expected) for copy in copies)
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return LeafError(
            path=path,
            error=distance,
            tolerance=min(1.0, slack),
            noisy=slack > 0,
            copies=len(copies),
        )
    tolerance = max(coarse, _leaf_tolerance(expected.dtype))
    change = (
        norms.norm(norms.wide, expected)
        if start is None
        else norms.norm(norms.minus, expected, start)
    )
    scale = change + slack / tolerance
    if scale == 0:  # nothing may move: any difference is measured against the values themselves
        eps = float(jnp.finfo(expected.dtype).eps)
        scale = eps * norms.norm(norms.wide, expected) + _TINY
    return LeafError(
        path=path,
        error=min(distance / scale, float(np.finfo(np.float64).max)),
        tolerance=tolerance,
        noisy=slack > _NOISY * change and slack > 0,
        copies=len(copies),
    )


def not_finite(
    candidate: Trajectory,
    expected: Trajectory,
    initial: Sequence[np.ndarray],
    state_paths: Sequence[str],
    metric_paths: Sequence[str],
) -> Failure | None:
    """The failure that says where a value is not finite that should be; None if all is well.

    Values that were not finite before the first step and still are the same (a best loss of inf,
    a mask of -inf, an evaluation of NaN that is yet to come) are no failure; but for those of a
    state that is no number anywhere, of which nothing could be compared.

    Args:
      expected: the reference's; of a program that is the reference its own.
    """
    numbers = any(_has_numbers(leaf) for leaf in initial)
    rows = list(zip(state_paths, candidate.state, expected.state, strict=True))
    starts: list[np.ndarray | None] = list(initial)
    for step, (got, wanted) in enumerate(zip(candidate.metrics, expected.metrics, strict=True), 1):
        names = [f"{path} at step {step}" for path in metric_paths]
        rows += zip(names, got, wanted, strict=True)
        starts += [None] * len(names)
    for (path, copies, (right, *_)), start in zip(rows, starts, strict=True):
        if not jnp.issubdtype(right.dtype, jnp.inexact):
            continue
        for copy in copies:
            known = [start] if start is not None and numbers else []
            pieces = over_pieces(_blown, copy, right, *known)
            bad, blown = (sum(piece[k] for piece in pieces) for k in (0, 1))
            if bad:
                both = " in the reference too" if blown and expected is not candidate else ""
                message = f"{path}: {bad} of {copy.size} values are not finite{both}"
                return Failure(stage=Stage.PROFILE, kind=Kind.NUMERICS, message=message)
    return None


def _has_numbers(leaf: np.ndarray) -> bool:
    """Whether a leaf of floats has any that is one, or infinite."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact)) and not bool(np.isnan(leaf).all())


def _blown(
    copy: np.ndarray, expected: np.ndarray, start: np.ndarray | None = None
) -> tuple[int, int]:
    """How many values are not finite that should be; how many of them not in the reference."""
    bad = ~np.isfinite(copy)
    blown = bad & ~np.isfinite(expected)
    if start is not None:
        kept = _equal(expected, start)
        bad, blown = bad & ~(kept & _equal(copy, start)), blown & ~kept
    return int(bad.sum()), int(blown.sum())


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Element by element; what is no number equals what is none."""
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _leaf_tolerance(dtype: np.dtype) -> float:
    bits = jnp.finfo(dtype).bits
    if bits <= 8:
        return _EIGHT_BIT_TOLERANCE
    return _COARSE_TOLERANCE if bits <= 16 else _TOLERANCE


def _program_tolerance(float_types: frozenset[str]) -> float:
    if any(name.startswith("f8") for name in float_types):
        return _EIGHT_BIT_TOLERANCE
    if float_types.intersection(_COARSE):
        return _COARSE_TOLERANCE
    return _CUT_TOLERANCE if "tf32" in float_types else _TOLERANCE


def _unit(float_types: frozenset[str]) -> float:
    """The spacing of numbers near 1 in the coarsest short type of the program, 0 without one."""
    units = {"bf16": 2.0**-7, "f16": 2.0**-10, "tf32": 2.0**-10}
    return max((unit for name, unit in units.items() if name in float_types), default=0.0)
