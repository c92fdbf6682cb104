"""The hand part of the benchmark: what is kept, how many processes are asked, what one leaves."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import pytest

from autoshard.records.layout import Candidate, Layout
from experiments.fidelity_parts import hand, report, searching, store
from experiments.fidelity_parts.store import Store, Task
from tests import workloads
from tests.experiments.tiny_case import TinyCase

HAND = Task(part="hand", case="tiny", devices=8)


def layouts(case: str, devices: int) -> list[str]:
    return ["fsdp 1x2", "data parallel"]


def missing(kept: Store, retry: bool) -> list[Task]:
    return list(store.missing(kept, ["tiny"], [8], ["hand"], retry, layouts))


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch, kept: Store) -> Callable[..., list[str]]:
    """Runs the hand part over two layouts; returns what was started.

    Those named `good` leave or add to a row, of this ratio in every process. Where the limit is
    below 10 seconds it is not decided, by as many as are ever asked. The `dies`-th process leaves
    nothing, the `stops`-th never starts.
    """
    store.write(kept.plan(HAND), {"candidate": {"layout": "the first"}})
    monkeypatch.setattr(hand.steps, "hand_steps", lambda case, n: dict.fromkeys(layouts("tiny", n)))

    def run(
        good: list[str],
        limit_s: float = 10.0,
        seed: int = 0,
        ratio: float = 0.9,
        dies: int | None = None,
        stops: int | None = None,
    ) -> list[str]:
        started: list[str] = []

        def start(layout: str) -> str:
            started.append(layout)
            if len(started) == stops:
                raise KeyboardInterrupt
            if layout in good and len(started) != dies:
                before = store.read(hand.row_file(kept, HAND, layout)) or {}
                row = {
                    "first_s": [*before.get("first_s", ()), *(20 * [ratio])],
                    "second_s": [*before.get("second_s", ()), *(20 * [1.0])],
                    "processes": [*before.get("processes", ()), 20] if limit_s >= 10 else [1] * 24,
                    "layout": layout,
                    "verdict": "met" if limit_s >= 10 else "undecided",
                    "ratio": ratio,
                    "low": ratio - 0.001,
                    "high": ratio + 0.001,
                    "decided": limit_s >= 10,
                    "planned": kept.planned(HAND),
                    "seed": seed,
                    "limit_s": limit_s,
                    **store.seen_on(),
                }
                store.write(hand.row_file(kept, HAND, layout), row)
            return "its process ended with code 1"

        hand.run(HAND, TinyCase(), kept, scale="small", seed=seed, limit_s=limit_s, start=start)
        return started

    return run


def test_a_hand_layout_without_result_is_undecided_and_the_others_are_kept(
    by_hand: Callable[..., list[str]], kept: Store
) -> None:
    assert by_hand(["data parallel"]) == ["fsdp 1x2", "data parallel"]
    found = store.read(kept.result(HAND))
    assert found is not None
    assert [row["verdict"] for row in found["rows"]] == ["undecided", "met"]
    assert "code 1" in found["rows"][0]["why"]
    row = report.hand_row(found)
    assert row is not None and (row["count"], row["met"], row["undecided"]) == (2, 1, 1)
    assert by_hand(["fsdp 1x2"]) == ["fsdp 1x2"]  # the other is there


def test_what_was_compared_before_a_stop_is_in_the_result(
    by_hand: Callable[..., list[str]], kept: Store
) -> None:
    both = ["fsdp 1x2", "data parallel"]
    with pytest.raises(KeyboardInterrupt):
        by_hand(both, stops=2)
    found = store.read(kept.result(HAND))
    assert found is not None
    assert [row["layout"] for row in found["rows"]] == ["fsdp 1x2"]
    assert missing(kept, retry=False) == [HAND]
    assert by_hand(both) == ["data parallel"]
    assert missing(kept, retry=True) == []

    with pytest.raises(KeyboardInterrupt):
        by_hand(both, seed=1, stops=2)  # what is of another seed is not kept beside it
    found = store.read(kept.result(HAND))
    assert found is not None
    assert [(row["layout"], row["seed"]) for row in found["rows"]] == [("fsdp 1x2", 1)]


def test_what_is_to_be_asked_anew_stays_until_there_is_something_in_its_place(
    by_hand: Callable[..., list[str]], kept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ["fsdp 1x2", "data parallel"]
    assert by_hand(both, ratio=1.01, dies=3) == ["fsdp 1x2"] * 3 + ["data parallel"] * 4
    found = store.read(kept.result(HAND))
    assert found is not None

    def said() -> list[tuple[str, list[int]]]:
        now = store.read(kept.result(HAND))
        assert now is not None
        return [(row["layout"], row["processes"]) for row in now["rows"]]

    both_said = [("fsdp 1x2", [20] * 2), ("data parallel", [20] * 4)]
    assert said() == both_said
    # What goes on and says nothing more is what it was, and goes on where it was.
    assert by_hand(both, ratio=1.01, dies=1) == ["fsdp 1x2"] and said() == both_said
    assert by_hand(both, ratio=1.01, dies=2) == ["fsdp 1x2"] * 2
    assert said() == [("fsdp 1x2", [20] * 3), both_said[1]]
    store.write(kept.result(HAND), found)
    monkeypatch.setattr(store, "machine", lambda: "another")
    for row in found["rows"]:
        row["processes"] = row["processes"][:2]  # near ties of two processes: both are open
        row["first_s"], row["second_s"] = row["first_s"][:40], row["second_s"][:40]
    store.write(kept.result(HAND), found)
    with pytest.raises(KeyboardInterrupt):
        by_hand(both, ratio=1.01, stops=1)
    with pytest.raises(KeyboardInterrupt):
        by_hand(both, ratio=1.01, dies=1, stops=2)  # the first begins anew and comes to nothing
    assert said() == [("fsdp 1x2", [20] * 2), ("data parallel", [20] * 2)]


def test_a_plan_that_an_older_version_wrote_is_the_same_in_other_words() -> None:
    now: dict[str, Any] = Candidate(layout=Layout(mesh=(("x", 8),))).to_json()
    then = json.loads(json.dumps(now))
    then["layout"]["occurrences"] = {}
    del then["layout"]["conflict_losers"]
    another = {**then, "layout": {**then["layout"], "compute": {"batch": ["x"]}}}
    assert then != now and store.is_same_plan(then, now)
    assert not store.is_of_another_plan({"part": "hand", "planned": now}, then)
    assert store.is_of_another_plan({"part": "hand", "planned": now}, another)
    assert store.is_of_another_plan({"part": "hand", "planned": None}, then)
    assert store.is_of_another_plan({"part": "hand", "planned": {"layout": "the second"}}, then)


def test_a_hand_comparison_is_made_anew_for_another_plan_and_when_its_result_is_deleted(
    by_hand: Callable[..., list[str]], kept: Store
) -> None:
    both = ["fsdp 1x2", "data parallel"]
    assert by_hand(both) == both and by_hand(both) == []
    assert by_hand(both, seed=1) == both
    kept.result(HAND).unlink()
    assert by_hand(both, seed=1) == both
    store.write(kept.plan(HAND), {"candidate": {"layout": "the second"}})
    assert missing(kept, retry=False) == [HAND]
    assert report.load(kept, ["tiny"], [8], layouts)["tiny", 8]["hand"] is None
    assert by_hand(both, seed=1) == both
    assert missing(kept, retry=False) == []


def test_layouts_come_and_go(by_hand: Callable[..., list[str]], kept: Store) -> None:
    by_hand(["fsdp 1x2", "data parallel"])

    def said(*layouts: str) -> tuple[list[Task], Any]:
        def names(case: str, devices: int) -> list[str]:
            return [*layouts]

        asked = (store.missing(kept, ["tiny"], [8], ["hand"], x, names) for x in (False, True))
        (open_,) = {tuple(tasks) for tasks in asked}
        return [*open_], report.hand_row(report.load(kept, ["tiny"], [8], names)["tiny", 8]["hand"])

    open_, row = said("data parallel", "new")
    assert open_ == [HAND] and (row["count"], row["met"], row["lacking"]) == (2, 1, 1)
    assert row["worst_layout"] == "data parallel" and row["not_met"] == []
    open_, row = said("data parallel")
    assert open_ == [] and (row["count"], row["met"], row["lacking"]) == (1, 1, 0)


def test_an_undecided_hand_comparison_gets_another_try_with_more_time(
    by_hand: Callable[..., list[str]], kept: Store
) -> None:
    both = ["fsdp 1x2", "data parallel"]
    assert by_hand(both, limit_s=5.0) == both
    assert missing(kept, retry=False) == []
    assert missing(kept, retry=True) == [HAND]
    assert by_hand(both, limit_s=5.0) == []
    assert by_hand(both, limit_s=20.0) == both
    assert by_hand(both, limit_s=40.0) == []  # decided: more time changes nothing


def test_about_a_ratio_near_one_four_processes_are_asked(
    by_hand: Callable[..., list[str]], kept: Store
) -> None:
    assert by_hand(["fsdp 1x2"], ratio=1.01, dies=3) == ["fsdp 1x2"] * 3 + ["data parallel"]
    found = store.read(kept.result(HAND))
    assert found is not None and found["lost"] == 2
    assert found["rows"][0]["processes"] == [20, 20] and "code 1" in found["rows"][0]["why"]
    assert found["rows"][0]["verdict"] == "undecided", "two of the four processes are no verdict"
    assert by_hand(["fsdp 1x2"], ratio=1.01) == ["fsdp 1x2"] * 2 + ["data parallel"]
    assert by_hand(["fsdp 1x2"], ratio=1.01) == ["data parallel"]
    found = store.read(kept.result(HAND))
    assert found is not None and found["rows"][0]["processes"] == [20] * 4
    # A result of before processes were counted is of one.
    del found["rows"][0]["processes"]
    store.write(kept.result(HAND), found)
    assert by_hand(["fsdp 1x2"], ratio=1.01) == ["fsdp 1x2"] * 4 + ["data parallel"]


def test_a_comparison_stays_with_its_machine_and_one_that_goes_on_elsewhere_begins_anew(
    by_hand: Callable[..., list[str]], kept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, here = ["fsdp 1x2", "data parallel"], store.machine()
    assert by_hand(both, ratio=1.01, dies=3) == ["fsdp 1x2"] * 3 + ["data parallel"] * 4
    found = store.read(kept.result(HAND))
    assert found is not None and found["rows"][0]["processes"] == [20] * 2
    for row in found["rows"]:  # as it was written before rows said it
        del row["machine"], row["versions"]
    store.write(kept.result(HAND), found)
    monkeypatch.setattr(store, "machine", lambda: "another")
    assert by_hand(both, ratio=1.01) == ["fsdp 1x2"] * 4
    found = store.read(kept.result(HAND))
    assert found is not None and found["machine"] == "another"
    assert [row["machine"] for row in found["rows"]] == ["another", here]
    assert [row["processes"] for row in found["rows"]] == [[20] * 4] * 2
    assert all(row["versions"]["jaxlib"] for row in found["rows"])


def test_processes_of_two_compilers_are_not_taken_together(
    by_hand: Callable[..., list[str]], kept: Store
) -> None:
    by_hand(["fsdp 1x2"], ratio=1.01, dies=3)
    found = store.read(kept.result(HAND))
    assert found is not None
    found["rows"][0]["versions"]["jaxlib"] = "0.0.1"
    store.write(kept.result(HAND), found)
    assert by_hand(["fsdp 1x2"], ratio=1.01)[:4] == ["fsdp 1x2"] * 4


def test_the_plan_runs_beside_a_step_by_hand(
    kept: Store, searched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(part="hand", case="tiny", devices=8)
    searching.slim(searched.plan).save(str(kept.plan(task)))
    work = workloads.mlp()

    @dataclasses.dataclass
    class Built:
        step: Any
        state: Any
        batch: Any

    def build(case: TinyCase, layout: object, devices: list[jax.Device], seed: int) -> Built:
        assert layout == "by hand"
        return Built(jax.jit(work.step), work.init(), case.sample(seed))

    monkeypatch.setattr(hand.steps, "hand_steps", lambda case, n: {"x": "by hand"})
    monkeypatch.setattr(hand.steps, "build", build)
    hand.compare_one(task, TinyCase(), kept, "x", seed=0, limit_s=0.01)
    row = store.read(hand.row_file(kept, task, "x"))
    assert row is not None and row["ratio"] > 0 and row["layout"] == "x"
    assert row["machine"] == store.machine() and row["versions"]["jax"] == jax.__version__
    assert len(row["first_s"]) == len(row["second_s"]) >= 20
    hand.compare_one(task, TinyCase(), kept, "x", seed=0, limit_s=0.01)
    again = store.read(hand.row_file(kept, task, "x"))
    assert again is not None and again["processes"][0] == row["processes"][0]
    assert again["first_s"][: row["processes"][0]] == row["first_s"]
    assert len(again["first_s"]) == sum(again["processes"]) and len(again["processes"]) == 2
