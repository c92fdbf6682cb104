"""Files that autoshard 0.1 wrote: later versions read its plans, whatever their own words are."""

import json
import pathlib
import shutil

import jax
import pytest

import autoshard
from autoshard.errors import CalibrationError, JournalError
from autoshard.plan.file import read_plan
from autoshard.records.trial import Estimate, Measurement
from autoshard.rungs.profile.calibration_files import _kept
from autoshard.tuner.journal import Journal
from tests.goldens.make import CASES, input_shardings

FOLDER = pathlib.Path(__file__).parent / "goldens"
PLANS = FOLDER / "plans-0.1"
SHARDINGS = json.loads((FOLDER / "plans-0.1.shardings.json").read_text())


def recorded(name: str) -> dict:
    return json.loads((PLANS / f"{name}.json").read_text())


def test_every_word_of_a_layout_is_in_some_plan():
    layouts = [recorded(name)["candidate"]["layout"] for name in CASES]
    words = set().union(*layouts)
    assert words == {
        *("mesh", "compute", "storage", "giving_way", "whole", "small_replicated"),
        *("whole_into_loops", "as_written", "wording"),
    }
    assert {x.get("whole") for x in layouts} == {None, "small", "once", "used"}
    assert {x.get("wording") for x in layouts} >= {None, "least", "all"}
    assert any(x["giving_way"] for x in layouts) and any(x["as_written"] for x in layouts)
    assert recorded("knobs")["candidate"]["knobs"]
    assert recorded("fixed")["fixed_axes"] and recorded("fixed")["fixed_leaves"]


def test_every_file_has_a_case():
    assert {path.stem for path in PLANS.iterdir()} == set(CASES) == set(SHARDINGS)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_of_0_1_loads_with_the_shardings_it_had(name):
    """A plan for named hardware is loaded on CPU devices: its compiler may not be installed."""
    case = CASES[name]
    plan = autoshard.load_plan(
        PLANS / f"{name}.json", case.model_fn, jax.devices(), check_target=case.is_here
    )
    assert input_shardings(plan) == SHARDINGS[name]
    evidence = recorded(name)["evidence"]
    assert len(plan.evidence.trials) == len(evidence["trials"])
    assert list(plan.evidence.ranking) == evidence["ranking"]
    assert str(plan)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_of_0_1_is_read_without_its_model(name):
    record = read_plan(PLANS / f"{name}.json")
    data = recorded(name)
    assert record.target["device_count"] == 8
    assert record.program == data["program"]
    assert dict(record.candidate.knobs) == data["candidate"]["knobs"]
    assert [[m, n] for m, n in record.candidate.layout.mesh] == data["candidate"]["layout"]["mesh"]


def test_the_plans_hold_outcomes_of_all_three_rungs():
    plain = read_plan(PLANS / "plain.json").evidence.trials
    assert any(isinstance(t.propagated, Estimate) for t in plain)
    assert any(isinstance(t.compiled, Estimate) for t in plain)
    measured = [t.profiled for t in plain if isinstance(t.profiled, Measurement)]
    assert any(m.devices for m in measured)
    assert all(m.numerics_error is not None and m.numerics_allowed is None for m in measured)


def test_a_journal_of_0_1_is_refused_in_one_line_and_left_untouched(tmp_path):
    path = pathlib.Path(shutil.copy(FOLDER / "journal-0.1.jsonl", tmp_path))
    before = path.read_bytes()
    with pytest.raises(JournalError, match="has schema 1, this version reads 2: start a new one"):
        Journal(path)
    assert path.read_bytes() == before


def test_a_calibration_of_0_1_is_refused_in_one_line_and_left_untouched(tmp_path):
    path = pathlib.Path(shutil.copy(FOLDER / "calibration-0.1.json", tmp_path))
    before = path.read_bytes()
    with pytest.raises(CalibrationError) as refused:
        _kept(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    assert path.read_bytes() == before
