"""Search baselines: strategies that know nothing of layouts, over the same space.

The space as a table of categorical parameters: a mesh shape, for every logical axis the mesh axes
of its compute rule and of its storage rule, which axes give way, how far arrays stay whole, and
what is gathered before loops.
What the space does not contain is drawn again and not counted.
"""

import dataclasses
import random
import warnings
from collections.abc import Callable

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState, create_trial

from autoshard.records.layout import Candidate, Gather, Layout
from autoshard.space.space import Space
from autoshard.tuner.strategy import Seen
from autoshard.tuner.strategy.base import score

_DRAWS = 3000
"""Draws for one ask, after which a strategy has nothing new to ask.

Of the recommender's space one draw in 27 is a layout; most others have rules that divide nothing.
"""

_ASKS = 20
"""Trials that TPE is asked for one new candidate, after which one is drawn."""

_LIKELIEST_OF = 2
"""Values of a parameter that TPE draws, to take the likeliest (Optuna: `n_ei_candidates`).

By Optuna's default, 24, the likeliest of so few categories is the best candidate's nearly always:
136 of 150 new candidates had to be drawn evenly in its stead, with 2 of them one, and the best was
2.70 ms instead of 2.65 (the decoder for h100:1x8).
"""

Values = dict[str, str]
Choose = Callable[[str, tuple[str, ...]], str]
"""(name of a parameter, its choices) -> one of them."""


def draw(space: Space, choose: Choose) -> Candidate:
    """The candidate that a choice of every parameter makes."""
    meshes = {_written(tuple(f"{n}={s}" for n, s in mesh)): mesh for mesh in space.meshes}
    mesh = meshes[choose("mesh", tuple(meshes))]
    compute: dict[str, tuple[str, ...]] = {}
    storage: dict[str, tuple[str, ...]] = {}
    for axis in space.shardable():
        options = {_written(to): to for to in space.options(axis, mesh)}
        # Which choices there are depends on the mesh, so that each mesh has parameters of its own.
        where = f"{axis.name} on {_written(tuple(f'{n}={s}' for n, s in mesh))}"
        compute[axis.name] = options[choose(f"compute {where}", tuple(options))]
        if not axis.is_data:
            storage[axis.name] = options[choose(f"storage {where}", tuple(options))]
    whole = Gather(choose("whole", tuple(Gather)))
    conflict_losers = [
        axis
        for axis in space.contested(compute, storage)
        if choose(f"way {axis}", ("kept", "given")) == "given"
    ]
    layout = space.layout(mesh, compute, storage, conflict_losers, whole)
    if space.divides_small(layout):
        replicated = choose("small", ("as computed", "replicated")) == "replicated"
        layout = dataclasses.replace(layout, small_replicated=replicated)
    if space.enters_loops(layout):
        into_loops = choose("into loops", ("divided", "whole")) == "whole"
        layout = dataclasses.replace(layout, gather_loop_inputs=into_loops)
    return space.candidate(layout)


def _written(names: tuple[str, ...]) -> str:
    return "+".join(names) or "-"


class Uniform:
    """Every parameter drawn evenly (Bergstra & Bengio 2012): random search."""

    def ask(self, space: Space, seed: int, history: tuple[Seen, ...]) -> tuple[Candidate, ...]:
        done = {seen.candidate for seen in history}
        rng = random.Random(f"{seed}:{len(history)}")
        for _ in range(_DRAWS):
            candidate = draw(space, lambda _, choices: rng.choice(choices))
            if candidate not in done and space.contains(candidate) is None:
                return (candidate,)
        return ()


class Tpe:
    """Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), through ask and tell.

    Multivariate (Falkner, Klein & Hutter 2018): parameters that occur together are drawn together.
    Drawn one by one they make a layout that was not met before less often, and each draw costs two
    to three times as much. Of 150 candidates for h100:1x8 the best was, together and one by one,
    2.65 and 2.84 ms (decoder), 646 and 652 us (plain_gpt), but 430 and 375 us (recommender).

    It begins with the baselines, as every search here does. Where it draws only what it has drawn
    before, the next candidate is a random one. What does not fit the memory is told as
    worse than whatever fits, in order of how far it misses.

    Attributes:
      memory_bytes: what a device may use.
    """

    def __init__(self, memory_bytes: int):
        self.memory_bytes = memory_bytes
        self._study: optuna.Study | None = None
        self._asked: dict[Candidate, optuna.Trial] = {}
        self._told = 0

    def ask(self, space: Space, seed: int, history: tuple[Seen, ...]) -> tuple[Candidate, ...]:
        if self._study is None:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            with warnings.catch_warnings():  # both arguments are called experimental
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                sampler = optuna.samplers.TPESampler(
                    seed=seed, n_ei_candidates=_LIKELIEST_OF, multivariate=True, group=True
                )
            self._study = optuna.create_study(sampler=sampler)
        for seen in history[self._told :]:
            self._tell(space, seen)
        self._told = len(history)
        done = {seen.candidate for seen in history}
        for _ in range(_ASKS):
            trial = self._study.ask()
            candidate = draw(space, trial.suggest_categorical)
            if candidate not in done and space.contains(candidate) is None:
                self._asked[candidate] = trial
                return (candidate,)
            self._study.tell(trial, state=TrialState.FAIL)
        return Uniform().ask(space, seed, history)

    def _tell(self, space: Space, seen: Seen) -> None:
        assert self._study is not None
        excess, time_s = score(seen.outcome, self.memory_bytes)
        value = time_s if excess == 0.0 else 1e6 * (1 + excess)
        trial = self._asked.pop(seen.candidate, None)
        if trial is not None:
            state = TrialState.FAIL if value == float("inf") else TrialState.COMPLETE
            self._study.tell(trial, None if state is TrialState.FAIL else value, state)
        elif value != float("inf") and (known := parameters(space, seen.candidate.layout)):
            values, distributions = known
            self._study.add_trial(
                create_trial(params=values, distributions=distributions, value=value)
            )


def parameters(space: Space, layout: Layout) -> tuple[Values, dict[str, BaseDistribution]] | None:
    """The parameters that make a layout, None if it lies on a mesh that has merged."""
    if layout.mesh not in space.meshes:
        return None
    compute, storage = dict(layout.activation_rules), dict(layout.state_rules)
    values: Values = {}
    distributions: dict[str, BaseDistribution] = {}

    def choose(name: str, choices: tuple[str, ...]) -> str:
        kind, _, rest = name.partition(" ")
        if kind == "mesh":
            wanted = _written(tuple(f"{n}={s}" for n, s in layout.mesh))
        elif kind == "whole":
            wanted = layout.gather
        elif kind == "small":
            wanted = "replicated" if layout.small_replicated else "as computed"
        elif kind == "into":
            wanted = "whole" if layout.gather_loop_inputs else "divided"
        elif kind == "way":
            wanted = "given" if rest in layout.conflict_losers else "kept"
        else:
            axis = rest.rpartition(" on ")[0]
            wanted = _written((compute if kind == "compute" else storage).get(axis, ()))
        value = wanted if wanted in choices else choices[0]
        values[name] = value
        distributions[name] = CategoricalDistribution(choices)
        return value

    made = draw(space, choose)
    return (values, distributions) if made.layout == layout else None
