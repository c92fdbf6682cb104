"""Rung 3's judge, on a bench of pretended programs; and once on a real one."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from autoshard.records.numerics import LeafError, NumericsReport, ReferenceLost
from autoshard.records.trial import Failure, Kind, Measurement, Stage
from autoshard.rungs.profile.checking import Finalist
from autoshard.rungs.profile.profile import judge, traced
from autoshard.rungs.profile.race import Footprint, RaceSettings
from autoshard.rungs.profile.runner import LocalRunner
from tests import lowered

SETTINGS = RaceSettings(max_rounds=6, min_rounds=3)
OOM = Failure(stage=Stage.PROFILE, kind=Kind.OOM, message="no room")
BLOWN = Failure(stage=Stage.PROFILE, kind=Kind.NUMERICS, message="not finite")
CRASH = Failure(stage=Stage.PROFILE, kind=Kind.CRASH, message="fell over")


class Pretended:
    """A bench whose programs take the time, and make the error, that a test says.

    Programs of one error agree with each other. As the real ones do, it knows only what is loaded.
    """

    renew = None

    def __init__(self, seconds, errors=(), broken=(), unchecked=()):
        self.unchecked = tuple(unchecked)
        self.seconds, self.errors, self.broken = seconds, dict(errors), dict(broken)
        self.loaded, self.compared, self.calls = set(), [], []
        self.trusted = None

    def load(self, name, module):
        self.calls.append(("load", name))
        if name in self.broken:
            return self.broken[name]
        self.loaded.add(name)
        return None

    def unload(self, name):
        self.loaded.discard(name)

    def run(self, name, steps):
        assert name in self.loaded, f"{name} is not loaded"
        seconds = self.seconds[name]
        return seconds if isinstance(seconds, Failure) else (seconds,) * steps

    def trust(self, name, module, steps=2):
        assert not self.loaded, "a reference needs the room"
        self.calls.append(("trust", name))
        self.trusted = None if name in self.broken else name
        return self.broken.get(name)

    def finite(self, name, steps=2):
        assert name in self.loaded, f"{name} is not loaded"
        return BLOWN if self.errors.get(name) == float("inf") else None

    def numerics(self, name, reference):
        assert name in self.loaded, f"{name} is not loaded"
        assert reference == self.trusted, f"{reference} is not trusted"
        self.compared.append((name, reference))
        off = abs(self.errors.get(name, 0.0) - self.errors.get(reference, 0.0))
        leaf = LeafError(path="state['w']", error=off, tolerance=1e-4)
        return NumericsReport(steps=2, state=(leaf,), metrics=(), unchecked=self.unchecked)

    def trace(self, name, folder, steps):
        assert name in self.loaded
        self.calls.append(("trace", name))
        return folder


def program(device_count=8):
    return types.SimpleNamespace(device_count=device_count, digest="0123456789abcdef")


def finalist(name, **changes):
    fields = {
        "name": name,
        "module": program(),
        "footprint": Footprint(held=5, running=5),
        "reference": "ref",
        "checked": None,
    }
    return Finalist(**{**fields, **changes})


def judged(bench, finalists, references=None, **options):
    return judge(
        bench,
        finalists,
        {"ref": program(1)} if references is None else references,
        **{
            "seed": 0,
            "memory_bytes": 1000,
            "settings": SETTINGS,
            **options,
        },
    )


def test_on_one_device_nothing_is_compared():
    """It is the unsharded step; on a GPU, whose sums have no order, it may differ from itself."""
    bench = Pretended(dict.fromkeys("abc", 0.03), {"a": 0.5, "b": 0.7, "c": float("inf")})
    result = judged(bench, [finalist(n, module=program(1)) for n in "abc"])
    assert set(result.ranking) == {"a", "b"} and bench.compared == []
    assert result.outcomes["c"] == BLOWN
    assert {result.outcomes[n].numerics for n in "ab"} == {"unsharded"}
    assert ("trust", "ref") not in bench.calls


def test_the_fastest_comes_first_and_all_samples_are_kept():
    bench = Pretended({"a": 0.03, "b": 0.02, "c": 0.025})
    result = judged(bench, [finalist(n) for n in "abc"])
    assert result.ranking == ("b", "c", "a")
    for name, outcome in result.outcomes.items():
        assert isinstance(outcome, Measurement)
        assert set(outcome.samples_s) == {bench.seconds[name]}
        assert len(outcome.samples_s) == len(outcome.rounds) >= 3
        assert (outcome.numerics, outcome.numerics_where) == ("exact", "state['w']")
        assert outcome.numerics_allowed == 1e-4
        assert outcome.trace == "" and outcome.devices == ()
    assert bench.compared == [("a", "ref"), ("b", "ref"), ("c", "ref")]
    assert bench.loaded == set(), "everything is freed again"


def test_near_equals_race_in_several_processes():
    bench = Pretended({"a": 0.0202, "b": 0.02, "c": 0.05})
    bench.renew = lambda: bench.calls.append(("renew", sorted(bench.loaded)))
    settings = RaceSettings(max_rounds=14)
    judged(bench, [finalist(n) for n in "abc"], settings=settings)
    assert [call for call in bench.calls if call[0] == "renew"] == [("renew", ["a", "b"])]


def test_who_computes_something_else_does_not_race():
    told = []
    bench = Pretended({"a": 0.03, "b": 0.01}, errors={"b": 1e-3})
    result = judged(bench, [finalist("a"), finalist("b")], on_failure=lambda *x: told.append(x))
    failure = result.outcomes["b"]
    assert failure.kind is Kind.NUMERICS and "state['w']" in failure.message
    assert result.ranking == ("a",) and told == [("b", failure)]


def test_a_check_of_some_leaves_is_noted_once():
    bench = Pretended({"a": 0.03, "b": 0.01}, unchecked=["state['v']", "state['u']"])
    (note,) = judged(bench, [finalist("a"), finalist("b")]).notes
    assert "compared 1 of 3 state leaves" in note and "state['v']" in note
    assert judged(Pretended({"a": 0.03}), [finalist("a")]).notes == ()


def test_failures_are_told_at_once_and_cost_one_finalist():
    told = []
    bench = Pretended({"a": 0.03, "b": 0.01, "c": CRASH}, broken={"b": OOM})
    result = judged(bench, [finalist(n) for n in "abc"], on_failure=lambda *x: told.append(x))
    assert result.outcomes["b"] == OOM and result.outcomes["c"] == CRASH
    assert told == [("b", OOM), ("c", CRASH)]
    assert result.ranking == ("a",)


def test_wrong_numerics_are_told_before_the_next_is_checked():
    """Whoever interrupts the next one keeps what is known of the last."""
    heard = []
    bench = Pretended({"a": 0.03, "b": 0.01}, errors={"a": 1.0})
    judged(
        bench,
        [finalist("a"), finalist("b")],
        on_failure=lambda name, failure: heard.append(name),
        on_progress=lambda done, text: heard.append(text),
    )
    assert heard.index("a") < heard.index("checking the numerics of b")


NO_REFERENCE = {"ref": OOM}


@pytest.mark.parametrize("wrong", ["b", "c", "d"])
def test_where_the_unsharded_step_does_not_run_most_are_believed(wrong):
    """Whichever comes first: it may be the wrong one."""
    right = sorted({"b", "c", "d"} - {wrong})
    bench = Pretended(
        dict.fromkeys("abcd", 0.01), errors={wrong: 1.0}, broken={**NO_REFERENCE, "a": OOM}
    )
    result = judged(bench, [finalist(n) for n in "abcd"])
    assert result.outcomes["a"] == OOM
    assert [result.outcomes[n].numerics for n in right] == ["relative", "relative"]
    assert result.outcomes[wrong].kind is Kind.NUMERICS
    assert set(result.ranking) == set(right)


def test_of_two_that_disagree_neither_is_believed_and_one_alone_is_unchecked():
    bench = Pretended({"a": 0.03, "b": 0.01}, errors={"b": 1.0}, broken=NO_REFERENCE)
    result = judged(bench, [finalist(n) for n in "ab"])
    for outcome in result.outcomes.values():
        assert outcome.kind is Kind.NUMERICS and "does not run here" in outcome.message
    assert set(result.outcomes) == {"a", "b"} and result.ranking == ()
    alone = judged(Pretended({"b": 0.01}, broken=NO_REFERENCE), [finalist("b")])
    assert alone.outcomes["b"].numerics == "unchecked"


@pytest.mark.parametrize("blown", ["a", "ab", "abc"])
def test_what_blows_up_is_never_what_others_are_compared_with(blown):
    inf = float("inf")
    bench = Pretended(dict.fromkeys("abc", 0.01), dict.fromkeys(blown, inf), NO_REFERENCE)
    result = judged(bench, [finalist(n) for n in "abc"])
    assert {n for n, outcome in result.outcomes.items() if outcome == BLOWN} == set(blown)
    assert set(result.ranking) == set("abc") - set(blown)


def test_an_earlier_check_by_each_other_is_believed():
    earlier = Measurement(samples_s=(1.0,), rounds=(0,), numerics="relative")
    bench = Pretended(dict.fromkeys("abc", 0.01), {"a": 1.0, "b": 1.0}, NO_REFERENCE)
    finalists = [finalist("a"), finalist("b"), finalist("c", checked=earlier)]
    result = judged(bench, finalists)
    assert bench.compared == [("a", "c"), ("b", "c")] and result.ranking == ("c",)


def test_programs_of_other_knobs_are_never_compared():
    bench = Pretended(dict.fromkeys("abcd", 0.01), {"c": 1.0, "d": 1.0, "other": 1.0}, {})
    of = {"a": "ref", "b": "ref", "c": "other", "d": "other"}
    finalists = [finalist(n, reference=of[n]) for n in "acbd"]
    for broken in ({}, {"other": OOM}, {"ref": OOM, "other": OOM}):
        bench.broken, bench.calls = broken, []
        result = judged(bench, finalists, references={n: program(1) for n in ("ref", "other")})
        assert set(result.ranking) == set("abcd")
        kinds = {n: "relative" if of[n] in broken else "exact" for n in of}
        assert {n: result.outcomes[n].numerics for n in of} == kinds
        trusted = [name for what, name in bench.calls if what == "trust"]
        assert trusted[:1] == ["ref"], "one after another: each has the devices for itself"


@pytest.mark.parametrize("wrong", ["b", "c"])
def test_a_reference_that_is_lost_is_nobodys_failure(wrong):
    """Whoever died took the process along; the unsharded step did not run in the next one."""
    late = Failure(stage=Stage.PROFILE, kind=Kind.TIMEOUT, message="killed after 60 s\nlog")
    bench = Pretended(dict.fromkeys("abcd", 0.01), errors={wrong: 1.0})
    compare = bench.numerics

    def numerics(name, reference):
        lost = reference == "ref" and len(bench.compared) == 1
        return ReferenceLost(late) if lost else compare(name, reference)

    bench.numerics = numerics
    result = judged(bench, [finalist(n) for n in "abcd"])
    assert set(result.ranking) == set("abcd") - {wrong}
    kinds = {n: result.outcomes[n].numerics for n in result.ranking}
    assert kinds.pop("a") == "exact" and set(kinds.values()) == {"relative"}
    assert result.outcomes[wrong].kind is Kind.NUMERICS
    (note,) = result.notes
    assert "compared with each other: timeout: killed after 60 s; Budget(measure_sec" in note


def test_a_yardstick_that_is_lost_is_no_yardstick():
    lost = []
    bench = Pretended(dict.fromkeys("abc", 0.01), broken=NO_REFERENCE)
    compare = bench.numerics

    def numerics(name, reference):
        if reference == "a":
            lost.append(name)
            return ReferenceLost(CRASH)
        return compare(name, reference)

    bench.numerics = numerics
    result = judged(bench, [finalist(n) for n in "abc"])
    assert lost == ["b", "c"] and set(result.ranking) == set("abc")
    assert {o.numerics for o in result.outcomes.values()} == {"relative"}


def test_what_a_failed_check_took_is_kept():
    bench = Pretended({"a": 0.03, "b": 0.01}, errors={"b": 1e-3})
    assert judged(bench, [finalist("a"), finalist("b")]).outcomes["b"].elapsed_s > 0


def test_an_earlier_check_stands():
    earlier = Measurement(
        samples_s=(1.0,),
        rounds=(0,),
        numerics="exact",
        numerics_error=1e-7,
        numerics_where="state['v']",
        numerics_allowed=3e-2,
    )
    bench = Pretended({"a": 0.03, "b": 0.01})
    result = judged(bench, [finalist("a", checked=earlier), finalist("b")])
    assert bench.compared == [("b", "ref")]
    assert result.outcomes["a"].numerics_where == "state['v']"
    assert result.outcomes["a"].numerics_allowed == 3e-2
    assert result.outcomes["a"].samples_s[0] == 0.03


def test_when_time_is_up_what_was_not_measured_is_left_out():
    bench = Pretended({"a": 0.03, "b": 0.01})
    result = judged(bench, [finalist("a"), finalist("b")], should_stop=lambda: True)
    assert bench.compared == [("a", "ref")], "one is checked however late it is"
    assert result.why_it_ended == "stopped" and result.ranking == ("a",)
    assert set(result.outcomes) == {"a"} and set(result.outcomes["a"].rounds) == {0, 1}


def test_a_bad_trace_costs_nothing(tmp_path):
    bench = Pretended({"a/b": 0.03})
    devices, where = traced(bench, finalist("a/b"), str(tmp_path))
    assert (devices, where) == ((), str(tmp_path / "a_b_01234567")), "it stays for other tools"
    assert ("trace", "a/b") in bench.calls and not bench.loaded
    kept = set(tmp_path.iterdir())
    assert traced(bench, finalist("a/b"), None) == ((), "") and set(tmp_path.iterdir()) == kept
    bench.broken["a/b"] = OOM
    assert traced(bench, finalist("a/b"), str(tmp_path)) == ((), "")
    bench.broken.clear()
    bench.trace = lambda *_: CRASH
    assert traced(bench, finalist("a/b"), str(tmp_path)) == ((), "")
    (tmp_path / "full").write_text("no folder")
    assert traced(bench, finalist("a/b"), str(tmp_path / "full")) == ((), "")


def test_progress_is_told():
    said = []
    judged(
        Pretended({"a": 0.03}),
        [finalist("a")],
        on_progress=lambda done, text: said.append(text),
    )
    assert said == [
        "running the unsharded step",
        "checking the numerics of a",
        "racing 1 programs",
    ]


@pytest.fixture(scope="module")
def modules():
    step = lowered.make_step()

    def mutant(state, x, y):
        new, metrics = step(state, x, y)
        return {**new, "key": new["key"] + 1}, metrics

    return {
        "ref": lowered.train_module(lowered.ONE),
        "right": lowered.train_module((("data", 8),), spec=jax.P()),
        "wrong": lowered.train_module((("data", 8),), spec=jax.P(), step=mutant),
    }


def test_on_real_programs(modules, tmp_path):
    bench = LocalRunner()
    bench.set_inputs(lowered.init_module(), lowered.make_batches())
    finalists = [dataclasses.replace(finalist(n), module=modules[n]) for n in ("right", "wrong")]
    result = judge(
        bench,
        finalists,
        {"ref": modules["ref"]},
        seed=0,
        memory_bytes=1 << 40,
        settings=RaceSettings(max_rounds=2, min_rounds=1),
    )
    assert result.ranking == ("right",)
    assert (
        result.outcomes["wrong"].kind is Kind.NUMERICS and "key" in result.outcomes["wrong"].message
    )
    right = result.outcomes["right"]
    assert right.numerics == "exact" and right.devices == ()
    devices, where = traced(bench, finalists[0], str(tmp_path))
    folder = tmp_path / f"right_{modules['right'].digest[:8]}"
    assert len(devices) == 8 and where == str(folder)
    assert all(np.isfinite([d.compute_s, d.communication_s, d.idle_s]).all() for d in devices)
    assert list(folder.rglob("*.xplane.pb"))
