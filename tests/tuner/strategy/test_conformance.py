"""Laws that every strategy keeps: pure in (space, seed, history), inside the space, finite."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest

from autoshard.records.layout import Candidate
from autoshard.records.trial import Estimate, Failure, Kind, Rung, Stage, Trial
from autoshard.space.baselines import baselines
from autoshard.space.space import Space
from autoshard.tuner.strategy import Beam, Exhaustive, RandomSearch, Strategy
from autoshard.tuner.strategy.one_axis import one_axis_layouts
from tests.analysed import subject

MEMORY_BYTES = 10**9

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "beam": lambda: Beam(MEMORY_BYTES),
    "narrow beam": lambda: Beam(MEMORY_BYTES, width=1, batch=6, explore=1),
    "exhaustive": lambda: Exhaustive(batch=8),
    "random": lambda: RandomSearch(batch=8),
}
every_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)


def tell(candidate: Candidate) -> Trial:
    """An outcome made up from the candidate alone; one in seven fails."""
    draw = random.Random(candidate.key)
    if draw.random() < 1 / 7:
        failure = Failure(stage=Stage.PROPAGATE, kind=Kind.UNSUPPORTED, message="made up")
        return Trial(candidate=candidate, propagated=failure)
    time_s = draw.uniform(0.1, 1.0)
    return Trial(
        candidate=candidate,
        propagated=Estimate(
            rung=Rung.PROPAGATE,
            time_s=time_s,
            compute_s=time_s,
            communication_s=0.0,
            peak_memory_bytes=int(draw.uniform(0, 2 * MEMORY_BYTES)),
            state_bytes=0,
            flops=0.0,
            bytes_accessed=0.0,
            op_count=1,
        ),
    )


def search(
    strategy: Strategy, space: Space, seed: int, rounds: int, start: tuple[Trial, ...] = ()
) -> list[tuple[Candidate, ...]]:
    """Asks and tells; the asks of each round."""
    asks, history = [], start
    for _ in range(rounds):
        asked = strategy.ask(space, seed, history)
        asks.append(asked)
        history += tuple(tell(c) for c in asked)
    return asks


@pytest.fixture(scope="module")
def space() -> Space:
    return subject("custom_derivatives").space


@pytest.fixture(scope="module")
def start(space: Space) -> tuple[Trial, ...]:
    return tuple(tell(b.candidate) for b in baselines(space))


@every_strategy
def test_same_seed_and_same_tells_give_the_same_asks(
    make: Callable[[], Strategy], space: Space, start: tuple[Trial, ...]
) -> None:
    one, other = search(make(), space, 3, 5, start), search(make(), space, 3, 5, start)
    assert one == other


@every_strategy
def test_a_fresh_strategy_replays_a_history(
    make: Callable[[], Strategy], space: Space, start: tuple[Trial, ...]
) -> None:
    """What a strategy remembers besides the history decides nothing."""
    running, history = make(), start
    for _ in range(4):
        asked = running.ask(space, 1, history)
        assert make().ask(space, 1, history) == asked
        assert running.ask(space, 1, history) == asked
        history += tuple(tell(c) for c in asked)


@every_strategy
def test_asks_are_new_members_of_the_space(
    make: Callable[[], Strategy], space: Space, start: tuple[Trial, ...]
) -> None:
    done = {seen.candidate for seen in start}
    for asked in search(make(), space, 0, 6, start):
        assert len(set(asked)) == len(asked)
        assert done.isdisjoint(asked)
        assert all(space.contains(c) is None for c in asked)
        done.update(asked)


@every_strategy
def test_asking_works_without_a_history(make: Callable[[], Strategy], space: Space) -> None:
    assert make().ask(space, 0, ())


@every_strategy
def test_a_finite_space_comes_to_an_end(make: Callable[[], Strategy]) -> None:
    space = subject("scalars_only").space  # a batch axis and nothing else
    asks = search(make(), space, 0, 12)
    assert asks[0] and asks[-1] == ()
    if make is STRATEGIES["exhaustive"]:
        assert {c for asked in asks for c in asked} == set(space.enumerate())


@pytest.mark.parametrize("name", ["beam", "narrow beam", "random"])
def test_another_seed_asks_something_else(
    name: str, space: Space, start: tuple[Trial, ...]
) -> None:
    make = STRATEGIES[name]
    assert search(make(), space, 0, 2, start) != search(make(), space, 1, 2, start)


def test_exhaustive_asks_for_everything_in_the_space_s_order(space: Space) -> None:
    want = list(itertools.islice(space.enumerate(), 24))
    found = [c for asked in search(Exhaustive(batch=8), space, 0, 3) for c in asked]
    assert found == want


def test_exhaustive_goes_over_a_space_once(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    enumerate_, started = Space.enumerate, []

    def counted(of: Space) -> Iterator[Candidate]:
        started.append(of)
        return enumerate_(of)

    monkeypatch.setattr(Space, "enumerate", counted)
    strategy = Exhaustive(batch=8)
    assert len(search(strategy, space, 0, 3)) == 3 and len(started) == 1


def test_beam_goes_down_hill(space: Space) -> None:
    """On a score that counts decisions it must find the layout that takes the most."""
    one_mesh = dataclasses.replace(space, meshes=((("x", 2), ("y", 4)),))

    def count(candidate: Candidate) -> int:
        layout = candidate.layout
        return sum(len(to) for _, to in (*layout.activation_rules, *layout.state_rules))

    def told(candidate: Candidate) -> Trial:
        seen = tell(candidate)
        time_s = 1.0 / (1 + count(candidate))
        outcome = Estimate(
            rung=Rung.PROPAGATE,
            time_s=time_s,
            compute_s=time_s,
            communication_s=0.0,
            peak_memory_bytes=0,
            state_bytes=0,
            flops=0.0,
            bytes_accessed=0.0,
            op_count=1,
        )
        return Trial(candidate=seen.candidate, propagated=outcome)

    history = tuple(told(found.candidate) for found in baselines(one_mesh))
    beam = Beam(MEMORY_BYTES)
    before = max(count(s.candidate) for s in history)
    for _ in range(8):
        history += tuple(told(c) for c in beam.ask(one_mesh, 0, history))
    assert len(history) < one_mesh.size() / 20
    assert (
        max(count(s.candidate) for s in history) == max(map(count, one_mesh.enumerate())) > before
    )


def test_a_beam_looks_at_each_axis_alone_first_and_once(space: Space) -> None:
    every = list(one_axis_layouts(space))
    assert len(every) > 2
    first, second = search(Beam(MEMORY_BYTES), space, 0, 2, (tell(every[0]),))
    assert first == tuple(every[1:]) and second and not set(every) & set(second)
    # No more of them than half an ask: a model may have hundreds of axes.
    few = search(Beam(MEMORY_BYTES, batch=4, explore=1), space, 0, 2)
    assert few[0] == tuple(every[:2]) and few[1]


def test_an_axis_alone_is_divided_as_far_as_it_can_be(space: Space) -> None:
    two = dataclasses.replace(space, meshes=((("x", 2), ("y", 4)), (("x", 8),)))
    for of, most in ((two, 8), (dataclasses.replace(space, meshes=((("x", 2),),)), 2)):
        found = {axis: c for c in one_axis_layouts(of) for axis, _ in c.layout.activation_rules}
        assert len(found) == len(list(one_axis_layouts(of))) > 2
        for axis in of.shardable():
            if axis.name not in found:
                continue
            layout = found[axis.name].layout
            assert of.contains(found[axis.name]) is None
            (rule,) = layout.activation_rules
            ways = math.prod(layout.sizes[name] for name in rule[1])
            assert ways == max(n for n in (2, 4, 8) if n <= most and axis.sizes[0] % n == 0)
            assert layout.state_rules == (() if axis.is_data else (rule,))


def test_a_beam_goes_on_from_the_next_best_until_nothing_is_left(space: Space) -> None:
    one_mesh = dataclasses.replace(space, meshes=((("x", 8),),))
    every = list(one_mesh.enumerate())
    strategy = Beam(MEMORY_BYTES, width=1, batch=8, explore=1)
    asks = search(strategy, one_mesh, 0, len(every), (tell(every[0]),))
    assert () in asks
    assert {every[0], *itertools.chain(*asks)} == set(every)


def test_a_strategy_that_is_used_again_answers_from_the_space_it_is_asked_of() -> None:
    """The names of axes and meshes are the same in many spaces, and so are candidates."""
    first = subject("scanned_mlp").space
    second = dataclasses.replace(first, meshes=((("x", 8),),))
    used = Beam(MEMORY_BYTES)
    for space in (first, second, first):
        history = tuple(tell(found.candidate) for found in baselines(space))
        for _ in range(2):
            asked = used.ask(space, 0, history)
            assert asked == Beam(MEMORY_BYTES).ask(space, 0, history)
            history += tuple(map(tell, asked))
