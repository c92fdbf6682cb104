"""A search that was stopped at any moment goes on from its journal: nothing twice, nothing lost."""

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.records.trial import Stage
from autoshard.rungs.profile import profile
from autoshard.tuner import compiling, propagating
from autoshard.tuner.loop import FIRST_WAVE_ROUNDS
from tests import noise, workloads
from tests.workloads import lines, mlp, write_lines

ROOT = pathlib.Path(__file__).parents[2]


def outcomes(records):
    return [(r["rung"], r["key"]) for r in records if r.get("record") == "outcome"]


def run(journal, calibration, **options):
    return autoshard.search(
        mlp,
        jax.devices(),
        **{
            "budget": workloads.MEASURED,
            "journal": journal,
            "calibration": calibration,
            **options,
        },
    )


@pytest.fixture
def counted(monkeypatch):
    """Counts what each rung is asked; still does it."""
    counts = {"propagate": 0, "compile": 0, "race": 0}

    def counting(name, function):
        def counted(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return counted

    judge = propagating.Propagator.judge
    monkeypatch.setattr(propagating.Propagator, "judge", counting("propagate", judge))
    compile_ = compiling.compile_in_process
    monkeypatch.setattr(compiling, "compile_in_process", counting("compile", compile_))
    monkeypatch.setattr(profile, "race", counting("race", profile.race))
    return counts


def test_a_finished_search_is_replayed_and_comes_out_the_same(searched, counted, tmp_path):
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(searched.journal.read_bytes())
    plan = run(journal, searched.calibration)
    assert counted == {"propagate": 0, "compile": 0, "race": 0}
    assert journal.read_bytes() == searched.journal.read_bytes()
    old, new = searched.plan.evidence, plan.evidence
    assert new.trials == old.trials
    assert new.ranking == old.ranking
    assert new.correction == old.correction and new.ended == "finished"
    assert plan.lower().digest == searched.plan.lower().digest


def test_the_journal_holds_each_answer_once(searched):
    records = lines(searched.journal)
    done = outcomes(records)
    assert len(done) == len(set(done))
    started = [r["key"] for r in records if r.get("record") == "started"]
    ended = {key for _, key in done}
    assert set(started) <= ended
    rungs = [rung for rung, _ in done]
    trials = searched.plan.evidence.trials
    assert rungs.count("compile") == sum(t.compiled is not None for t in trials)
    assert {"propagate", "compile", "profile", "trace"} == set(rungs)
    for r in records[1:]:
        assert {"record", "key", "rung", "baseline", "candidate"} <= set(r)
        assert r["candidate"]["layout"]["mesh"]


@pytest.mark.parametrize("kept", ["some of rung 1", "one compile", "no race", "one race"])
def test_only_what_is_missing_is_done(searched, counted, tmp_path, kept):
    records = lines(searched.journal)
    rung = [r.get("rung") for r in records]
    at = {
        "some of rung 1": 10,
        "one compile": next(
            i for i, r in enumerate(records) if (r.get("record"), rung[i]) == ("outcome", "compile")
        )
        + 1,
        "no race": rung.index("profile"),
        "one race": next((i for i, r in enumerate(records) if r.get("wave") == "final")),
    }[kept]
    journal = write_lines(tmp_path / "j.jsonl", records[:at])
    # Without measuring, unless that is what is asked, so that the test is short.
    measure = kept == "one race"
    budget = workloads.MEASURED if measure else workloads.UNMEASURED
    plan = run(journal, searched.calibration, budget=budget)
    after = lines(journal)
    assert after[:at] == records[:at]
    done = outcomes(after)
    assert len(done) == len(set(done)), "nothing was answered twice"
    asked = [json.dumps(r["candidate"]) for r in after if r.get("rung") == "propagate"]
    first = [json.dumps(r["candidate"]) for r in records if r.get("rung") == "propagate"]
    assert asked == first, "same seed, same answers, same asks"
    have = outcomes(records[:at])
    assert counted["propagate"] <= len(first) - sum(r == "propagate" for r, _ in have)
    compiled = sum(r == "compile" for r, _ in outcomes(after[at:]))
    assert counted["compile"] == compiled
    if kept in ("no race", "one race"):
        assert counted["propagate"] == counted["compile"] == 0
    assert counted["race"] == (1 if measure else 0)
    assert plan.evidence.ranking


@pytest.mark.slow
def test_a_wave_of_which_one_failed_is_not_tried_with_it_again(searched, counted, tmp_path):
    """A failed measurement is an answer too; and half a wave is raced anew, whole."""
    records = lines(searched.journal)
    end = next(
        i
        for i, r in enumerate(records)
        if (r.get("record"), r.get("rung")) == ("outcome", "profile")
    )
    failed = {
        **records[end],
        "outcome": {
            "is": "failure",
            "stage": "profile",
            "kind": "crash",
            "message": "fell over",
            "elapsed_s": 1.0,
            "missing_bytes": None,
        },
    }
    journal = write_lines(tmp_path / "j.jsonl", [*records[:end], failed])

    def stop(event):
        if event.stage is Stage.PROFILE and event.text == "measured":
            raise KeyboardInterrupt

    plan = run(journal, searched.calibration, callbacks=(stop,))
    del plan
    after = lines(journal)[end + 1 :]
    assert failed["key"] not in [r["key"] for r in after]
    assert counted["race"] == 1


def test_another_program_shares_no_key(searched, counted, tmp_path, calibration):
    journal = tmp_path / "j.jsonl"
    journal.write_bytes(searched.journal.read_bytes())
    before = len(lines(journal))
    plan = run(journal, calibration, budget=workloads.UNMEASURED)
    assert len(lines(journal)) == before
    changed = autoshard.search(
        lambda: mlp(rate=0.2),
        jax.devices(),
        budget=autoshard.Budget(candidates=1, compiles=1, profiles=0),
        journal=journal,
        calibration=calibration,
    )
    assert counted["compile"] == 1 and len(lines(journal)) > before
    assert changed.digest != plan.digest


@pytest.mark.slow
def test_who_mends_init_or_the_batches_is_measured_anew(searched, counted, tmp_path):
    """A failure of the numerics check speaks of the values it was made with."""
    journal = tmp_path / "j.jsonl"
    last = [key for rung, key in outcomes(lines(searched.journal)) if rung == "profile"][-1]
    failure = {
        "is": "failure",
        "stage": "profile",
        "kind": "numerics",
        "message": "state: not finite",
        "elapsed_s": 1.0,
        "missing_bytes": None,
    }
    written = lines(searched.journal)

    def failed(**changes):
        """The journal with the last measured program failed."""
        records = [
            {**r, "outcome": failure, **changes} if r["key"] == last and "outcome" in r else r
            for r in written[1:]
        ]
        write_lines(journal, [written[0], *records])

    def raced(**changes):
        before = counted["race"]
        autoshard.search(
            lambda: dataclasses.replace(mlp(), **changes),
            jax.devices(),
            budget=workloads.MEASURED,
            journal=journal,
            calibration=searched.calibration,
        )
        return counted["race"] - before

    failed()
    assert raced() == 0, "the same values: the failure stands"
    failed(inputs="of other batches")
    assert raced() == 1, "the wave that it failed in"
    init = mlp().init
    failed()
    assert raced(init=lambda: {**init(), "count": jnp.int32(1)}) == 2
    failed()
    assert raced(sample=None) == 2
    # What passed with other batches may not pass with these, nor take as long.
    write_lines(journal, written)
    assert raced(sample=lambda key: workloads.batch_of(5)) == 2


@pytest.mark.parametrize("ended", ["stopped", "no worker process could be started"])
def test_a_race_that_was_cut_short_is_raced_again_while_there_is_time(
    searched, counted, tmp_path, ended
):
    records = [
        {**r, "cut_short": ended} if r.get("wave") == "final" and "outcome" in r else r
        for r in lines(searched.journal)
    ]
    journal = write_lines(tmp_path / "j.jsonl", records)
    late = dataclasses.replace(workloads.MEASURED, seconds=1e-3)
    plan = run(journal, searched.calibration, budget=late)
    assert counted["race"] == 0 and plan.evidence.ended == "out of time"
    run(journal, searched.calibration)
    assert counted["race"] == 1
    run(journal, searched.calibration)
    assert counted["race"] == 1


@pytest.mark.slow
def test_more_rounds_are_run_and_what_had_too_little_time_gets_more(searched, counted, tmp_path):
    journal = tmp_path / "j.jsonl"
    journal.write_bytes(searched.journal.read_bytes())
    longer = dataclasses.replace(workloads.MEASURED, rounds=workloads.MEASURED.rounds + 1)
    for _ in range(2):
        run(journal, searched.calibration, budget=longer)
        assert counted["race"] == 1, "the last race alone, and once"
    written = lines(searched.journal)
    last = [key for rung, key in outcomes(written) if rung == "profile"][-1]
    failure = {
        "is": "failure",
        "stage": "profile",
        "kind": "timeout",
        "message": "killed after the time limit",
        "elapsed_s": workloads.MEASURED.measure_seconds,
        "missing_bytes": None,
    }
    write_lines(
        journal,
        [
            {**r, "outcome": failure} if r.get("key") == last and "outcome" in r else r
            for r in written
        ],
    )
    run(journal, searched.calibration)
    assert counted["race"] == 1, "as much time as it had is not more"
    patient = dataclasses.replace(workloads.MEASURED, measure_seconds=failure["elapsed_s"] + 1)
    run(journal, searched.calibration, budget=patient)
    assert counted["race"] == 2


def test_a_seed_of_numpy_is_the_same_seed(searched, counted, tmp_path):
    journal = tmp_path / "j.jsonl"
    journal.write_bytes(searched.journal.read_bytes())
    before = lines(journal)
    run(journal, searched.calibration, seed=np.int64(0))
    assert counted["race"] == counted["compile"] == 0 and lines(journal) == before
    for seed, said in ((1.5, "a whole number, got 1.5"), (np.int64(-1), "0 or more, got -1")):
        with pytest.raises(ValueError, match=said):
            run(journal, searched.calibration, seed=seed)


@pytest.mark.slow
def test_who_is_interrupted_while_tracing_keeps_the_race(searched, counted, tmp_path):
    records = lines(searched.journal)
    end = next(i for i, r in enumerate(records) if r.get("wave") == "final")
    journal = write_lines(tmp_path / "j.jsonl", records[:end])

    def stop(event):
        if event.stage is Stage.PROFILE and event.text.startswith("tracing"):
            raise KeyboardInterrupt

    plan = run(journal, searched.calibration, callbacks=(stop,))
    best = plan.trial.profiled
    assert plan.evidence.ended == "interrupted" and counted["race"] == 1
    assert max(best.rounds) >= FIRST_WAVE_ROUNDS and best.trace == ""
    again = run(journal, searched.calibration)
    assert counted["race"] == 1 and again.trial.profiled == best


SCRIPT = """
import sys
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import autoshard
from tests import workloads

if __name__ == "__main__":
    plan = autoshard.search(
        workloads.mlp, jax.devices(), budget=workloads.MEASURED, journal=sys.argv[1],
        calibration=sys.argv[2],
    )
    plan.save(sys.argv[3])
    state, batch = plan.init(), plan.put(workloads.batch_of(0))
    for _ in range(2):
        state, metrics = plan.step(state, batch)
    assert metrics["loss"] > 0
"""


def start(tmp_path, journal, calibration, hash_seed):
    script = tmp_path / "search.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), str(journal), str(calibration), str(tmp_path / "plan.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(hash_seed)},
    )


def count(journal, rung, record):
    if not journal.exists():
        return 0
    found = 0
    for line in journal.read_text().split("\n")[:-1]:
        r = json.loads(line)
        found += r.get("rung") == rung and r.get("record") == record
    return found


@pytest.mark.slow
def test_killed_at_any_moment_nothing_is_lost_and_nothing_done_twice(
    searched, tmp_path, calibration
):
    """Kills one search again and again, in each rung, at moments drawn at random."""
    journal = tmp_path / "journal.jsonl"
    draw = random.Random(17)
    moments = [
        ("propagate", "outcome", draw.randint(1, 20)),
        ("compile", "started", draw.randint(1, 2)),
        ("compile", "outcome", draw.randint(1, 4)),
        ("profile", "started", draw.randint(1, 5)),
    ]
    kept = []
    for number, (rung, record, wanted) in enumerate(moments):
        process = start(tmp_path, journal, calibration, number)
        while count(journal, rung, record) < wanted and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
        assert process.returncode == -signal.SIGKILL, said
        now = journal.read_text().split("\n")[:-1]
        assert now[: len(kept)] == kept, "what was there stays"
        kept = now
    process = start(tmp_path, journal, calibration, 99)
    out, said = process.communicate()
    assert process.returncode == 0, said
    assert not noise.others(said) and not out, "nothing the compilers print reaches the terminal"
    records = lines(journal)
    assert [json.dumps(r, separators=(",", ":")) for r in records[: len(kept)]] == kept
    done = outcomes(records)
    assert len(done) == len(set(done)), "no finished trial was repeated"
    started = [r["key"] for r in records if r.get("record") == "started"]
    assert set(started) <= {key for _, key in done}, "no trial was lost"
    # Another process, another hash seed: the same asks as the fixture's uninterrupted search.
    first = [r["candidate"] for r in lines(searched.journal) if r.get("rung") == "propagate"]
    assert [r["candidate"] for r in records if r.get("rung") == "propagate"] == first
    plan = autoshard.load_plan(tmp_path / "plan.json", mlp, jax.devices())
    assert plan.evidence.ended == "finished"
    assert len(plan.evidence.trials) == len(searched.plan.evidence.trials)
