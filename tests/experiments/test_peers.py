"""Search baselines over the same space, and rung 1's part of a search with any strategy."""

import importlib
import random

import pytest

from autoshard.records.trial import Estimate
from autoshard.space.baselines import baselines
from autoshard.tuner.strategy import Beam, Seen
from experiments.rung1_search import climb
from tests.analysed import COST, analyse, judge, subject
from tests.programs import biased_pair

pytest.importorskip("optuna")
peers = importlib.import_module("experiments.peers")

ROOM = 2**40


@pytest.mark.parametrize(
    ("make", "decision"),
    [
        (lambda: subject("scanned_mlp"), "conflict_losers"),
        (lambda: subject("gradient_accumulation"), "conflict_losers"),
        (lambda: subject("rnn"), "conflict_losers"),
        (lambda: analyse(biased_pair()), "small_replicated"),
    ],
)
def test_a_layout_and_its_parameters_are_one(make, decision):
    space = make().space
    rng = random.Random(0)
    drawn = [peers.draw(space, lambda _, choices: rng.choice(choices)) for _ in range(60)]
    members = [c.layout for c in drawn if space.contains(c) is None]
    members += [b.candidate.layout for b in baselines(space)]
    known = [(layout, peers.parameters(space, layout)) for layout in members]
    assert any(values for layout, values in known if getattr(layout, decision))
    assert sum(values is not None for _, values in known) > len(known) // 2
    for layout, found in known:
        if found is None:
            continue
        values, distributions = found
        assert values.keys() == distributions.keys()
        made = peers.draw(space, lambda parameter, _, values=values: values[parameter])
        assert made.layout == layout


@pytest.mark.parametrize("make", [peers.Uniform, lambda: peers.Tpe(ROOM)])
def test_a_peer_asks_for_new_members_of_the_space_the_same_for_a_seed(make):
    of = subject("scanned_mlp")

    def asked(seed):
        strategy, history = make(), []
        for b in baselines(of.space):
            outcome = judge(of, b.candidate.layout)
            history.append(Seen(candidate=b.candidate, outcome=outcome))
        for _ in range(12):
            (candidate,) = strategy.ask(of.space, seed, tuple(history))
            assert of.space.contains(candidate) is None
            assert candidate not in {seen.candidate for seen in history}
            history.append(Seen(candidate=candidate, outcome=judge(of, candidate.layout)))
        return [seen.candidate for seen in history]

    assert asked(3) == asked(3) != asked(4)


def test_a_climb_counts_from_the_baselines_on():
    of = subject("scanned_mlp")
    known = {}
    one = climb(of, COST, ROOM, Beam(ROOM), 40, 0, known)
    assert one.judged == 40 and one.baselines == len(baselines(of.space))
    assert len(known) == one.judged + one.baselines
    times = [i.time_s for i in one.curve]
    assert times == sorted(times, reverse=True) and one.best_s == times[-1]
    assert all(isinstance(x, Estimate) for x in known.values())
    assert one.best_s == min(x.time_s for x in known.values())
    assert one.candidates_until(times[0]) == 0 and one.candidates_until(times[-1] / 2) is None
    again = climb(of, COST, ROOM, Beam(ROOM), 40, 0)
    assert [(i.candidates, i.time_s) for i in again.curve] == [
        (i.candidates, i.time_s) for i in one.curve
    ]
    tight = climb(of, COST, 1, Beam(1), 4, 0)
    assert tight.curve == () and tight.best_s == float("inf")
