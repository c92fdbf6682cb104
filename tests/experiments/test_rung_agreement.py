"""The agreement of the rungs: stored figures, regret and rejection, today's rung 1."""

import jax
import pytest
from absl import app

from autoshard.records.layout import Candidate
from autoshard.target.cost import CostModel
from autoshard.target.target import find_target
from experiments import rung_agreement
from experiments.rung_agreement import Rung1, agreement, model_of, stored
from tests import workloads
from tests.analysed import CONSTANTS

LIMIT = 100


def point(rung1_s: float, rung2_s: float | None, peak: int = 50, fits: bool = True):
    """A stored layout; both rungs say the same of its memory."""

    def said(time_s: float):
        return {"time_s": time_s, "peak_memory_bytes": peak, "state_bytes": 10}

    rung2 = None if rung2_s is None else said(rung2_s)
    return {"candidate": {}, "fits": fits, "rung1": said(rung1_s), "rung2": rung2}


def case_of(points):
    return {"case": "tiny", "limit_bytes": LIMIT, "points": points}


def test_the_regret_is_that_of_the_best_of_rung_1s_first_eight() -> None:
    found = agreement(case_of([point(1.0 + i, 10.0 - i) for i in range(10)]), None)
    assert (found.compared, found.tau) == (10, pytest.approx(-1.0))
    assert found.regret == pytest.approx(2.0), "3 s by the eighth, 1 s by the tenth"
    assert found.times == pytest.approx((0.1, 0.5 * (5 / 6 + 6 / 5), 10.0), rel=0.02)
    assert found.peaks == (1.0, 1.0, 1.0) and found.rejected == 0
    assert "200.00%" in str(found)


def test_layouts_that_do_not_fit_or_did_not_compile_are_left_out() -> None:
    points = [point(3.0, 2.0), point(2.0, 3.0), point(1.0, 0.1, fits=False), point(1.0, None)]
    found = agreement(case_of(points), None)
    assert (found.compared, found.regret, found.tau) == (2, 0.0, pytest.approx(-1.0))


def test_layouts_that_rung_1_alone_rejects_are_counted() -> None:
    points = [point(1.0 + i, 1.0 + i, peak) for i, peak in enumerate((90, 105, 1000))]
    points[0]["rung1"]["state_bytes"] = LIMIT + 1
    assert agreement(case_of(points), None).rejected == 2


def test_the_stored_cases_are_read() -> None:
    """Regret and rejections are those of the day on which each case was stored."""
    cases = stored([])
    assert {"llama3-8b-h100-8x8", "mixtral-v5e-16x16"} <= {one["case"] for one in cases}
    for one in cases:
        found = agreement(one, None)
        assert found.compared >= 8 and found.rejected == 0, found
        assert 0.0 <= found.regret < 0.05 and found.tau > 0.4, found


def test_a_case_that_is_not_stored_is_refused() -> None:
    with pytest.raises(app.UsageError, match=r"no stored case \['llama3'\]: expected some of"):
        stored(["llama3"])


@pytest.mark.slow
def test_todays_rung_1_agrees_as_the_stored_one_did() -> None:
    """Layouts with `occurrences` are left out: the word of old files has another meaning now."""
    (one,) = stored(["llama3-8b-h100-8x8"])
    rung1 = Rung1(model_of(one["model"], one["batch_size"]), find_target(one["target"]))
    points = [p for p in one["points"] if not p["candidate"]["layout"]["occurrences"]]
    assert 0 <= len(one["points"]) - len(points) <= 1
    # Layouts that name a source line, as some axes were named then, are passed over.
    known = [p for p in points if rung1.judge(Candidate.from_json(p["candidate"])) is not None]
    assert len(known) > 0.7 * len(points)
    one = {**one, "points": known}
    then, now = agreement(one, None), agreement(one, rung1)
    assert now.compared == then.compared >= 30
    assert now.rejected == 0, now
    assert now.regret <= then.regret + 0.005, (then, now)


def test_adding_a_case_compiles_drawn_layouts_and_stores_it(tmp_path, monkeypatch) -> None:
    """On two CPU devices, in place of hardware that is not here."""
    here = find_target(jax.devices()[:2], 1 << 30)
    monkeypatch.setattr(rung_agreement, "find_target", lambda _: here)
    monkeypatch.setattr(rung_agreement, "cost_model", lambda _: CostModel(CONSTANTS))
    monkeypatch.setattr(rung_agreement, "model_of", lambda *_: workloads.mlp)
    monkeypatch.setattr(rung_agreement, "STORED", tmp_path / "stored.jsonl.xz")
    new = rung_agreement.compiled("mlp", "h100:1x2", 2)
    for _ in range(2):
        rung_agreement.store(new)
    assert stored([]) == [new] and new["case"] == "mlp-h100-1x2"
    assert len(new["points"]) >= 2 and all(p["fits"] for p in new["points"])
    assert all(p["rung2"]["time_s"] > 0 for p in new["points"])
