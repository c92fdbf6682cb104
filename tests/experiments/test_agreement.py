"""What the figures of rung 1 against rung 2 count, on points made by hand."""

import dataclasses
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.records.layout import Candidate, Layout
from autoshard.records.trial import Estimate, Failure, Kind, Rung, Stage
from autoshard.space.baselines import baselines
from autoshard.target.cost import CostModel
from autoshard.tuner.state import Row
from experiments.agreement import Point, figures_of, summary, tau, walk
from experiments.draws import Draws, uniform
from tests.analysed import CONSTANTS, subject

LIMIT, USABLE = 1000, 1050


def point(one_bytes: int, two_bytes: int, time_s: float, group: str = "uniform") -> Point:
    one = Estimate(
        rung=Rung.PROPAGATE,
        time_s=2 * time_s,
        compute_s=time_s,
        communication_s=time_s,
        peak_memory_bytes=one_bytes,
        state_bytes=10,
        flops=1.0,
        bytes_accessed=1.0,
        op_count=1,
    )
    two = dataclasses.replace(one, rung=Rung.COMPILE, peak_memory_bytes=two_bytes, time_s=time_s)
    row = Row(
        subject=0,
        candidate=Candidate(layout=Layout(mesh=(("x", 8),)), knobs=()),
        baseline="",
        program=object(),
        propagated=one,
        compiled=two,
    )
    return Point(group=group, row=row, fits=two_bytes <= LIMIT)


def test_tau_is_one_where_the_orders_are_the_same() -> None:
    found = tau([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 5.0, 7.0, 11.0])
    assert found == pytest.approx({"tau": 1.0, "low": 1.0, "high": 1.0})
    turned = tau([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 5.0, 11.0, 7.0])
    assert turned["tau"] == pytest.approx(0.8)
    assert turned["low"] < 0.8 < turned["high"]


def test_rejections_that_rung_2_contradicts_are_counted() -> None:
    points = [point(900, 950, 1.0), point(500, 600, 2.0), point(2500, 990, 3.0)]
    points += [point(2500, 3000, 4.0), point(800, 1200, 0.5, "top"), point(700, 800, 0.6, "top")]
    found = summary(points, LIMIT, USABLE)
    assert (found["rejected"], found["wrongly_rejected"]) == (2, 1)
    assert found["fitting"] == 3
    assert found["compared"] == 5  # the sample that fits, and the best whatever they need
    assert found["top_too_large"] == 1 and found["without_time"] == found["without_memory"] == 0
    assert found["tau_time_s"]["tau"] == pytest.approx(1.0)
    assert found["ratios"]["time_s"]["median"] == 2.0


def test_what_rung_1_refuses_counts_as_rejected() -> None:
    refused = point(1, 500, 1.0)
    refused.row.propagated = Failure(stage=Stage.PROPAGATE, kind=Kind.UNSUPPORTED, message="no")
    found = summary([refused, point(500, 600, 2.0), point(700, 800, 3.0)], LIMIT, USABLE)
    assert (found["rejected"], found["wrongly_rejected"]) == (1, 1)
    assert json.dumps(figures_of(refused))


def stopped(point: Point, kind: Kind, missing_bytes: int | None = None) -> Point:
    """The point of a program that the compiler gave no executable of."""
    point.row.compiled = Failure(
        stage=Stage.COMPILE, kind=kind, message="no", missing_bytes=missing_bytes
    )
    return dataclasses.replace(point, fits=False)


def test_of_the_best_those_that_the_compiler_refuses_are_compared_by_what_it_says() -> None:
    """libtpu refuses what is too large, and says by how much."""
    points = [point(500, 600, 1.0), point(700, 800, 2.0), point(900, 950, 3.0)]
    refused = stopped(point(950, 0, 0.5, "top"), Kind.OOM, missing_bytes=100)
    lost = stopped(point(800, 0, 0.4, "top"), Kind.TIMEOUT)
    found = summary([*points, refused, lost], LIMIT, USABLE)
    assert (found["compared"], found["without_time"], found["without_memory"]) == (3, 2, 1)
    assert found["tau_peak_memory_bytes"]["tau"] == pytest.approx(1.0)
    assert found["ratios"]["peak_memory_bytes"]["least"] == pytest.approx(950 / (USABLE + 100))
    assert found["top_too_large"] == 2
    small = stopped(point(400, 0, 0.5, "top"), Kind.OOM, missing_bytes=100)
    with_small = summary([*points, small], LIMIT, USABLE)
    assert with_small["tau_peak_memory_bytes"]["tau"] == pytest.approx(0.0)
    assert figures_of(refused)["rung2"]["missing_bytes"] == 100


def test_draws_end_where_nothing_new_fits() -> None:
    """As a device that holds no layout's state has it, or a space that was drawn whole."""
    one = subject("scanned_mlp")
    ledger: Any = SimpleNamespace(
        subjects=[one], seed=0, limit_bytes=0, cost=CostModel(CONSTANTS), rows=[]
    )
    draws = Draws(ledger, set())
    assert list(draws.rows(uniform)) == [] and draws.skipped > 0
    assert ledger.rows == []


def test_walks_stay_in_the_space_and_depend_on_the_seed_alone() -> None:
    space = subject("scanned_mlp").space
    walks = [[walk((), space, random.Random(7)) for _ in range(3)] for _ in range(2)]
    assert walks[0] == walks[1]
    assert all(c is not None and space.contains(c) is None for c in walks[0])
    best = [baselines(space)[0].candidate]
    assert walk(best, space, random.Random(1)) is not None
