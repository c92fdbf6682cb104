"""Planning for hardware that is not here: names, slow links, the whole search, the plan file."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import autoshard
from autoshard.records.trial import Estimate, Failure, Kind
from autoshard.rungs.propagate import Propagator
from autoshard.space.baselines import baselines
from autoshard.space.meshes import mesh_shapes
from autoshard.space.moves import axis_swaps, moves
from autoshard.target.catalogued import catalogued
from autoshard.target.cost import CostModel
from autoshard.target.network import Network
from autoshard.target.target import find_target
from autoshard.target.topology import Topology
from experiments.zoo.cases import of_size
from models.vit import VIT_B16
from tests import analysed, workloads
from tests.hardware import gpu, needs, tpu

BUDGET = autoshard.Budget(candidates=30, compiles=3)


SMALL = [
    pytest.param("tpu", "v5e:2x4", marks=pytest.mark.deviceless),
    pytest.param("tpu", "v5e:2x2*2", marks=pytest.mark.deviceless),
    pytest.param("cuda", "h100:1x8", marks=pytest.mark.deviceless),
]


@pytest.mark.parametrize("topology", [gpu(2, 4), tpu(2, 2, 1, slices=2)], ids=["hosts", "slices"])
def test_tensor_parallelism_stays_off_slow_links(topology: Topology) -> None:
    """The same degrees of data and tensor parallelism, laid over the links both ways."""
    of = analysed.analyse(workloads.mlp(batch=1 << 14))  # activations outweigh gradients
    space = dataclasses.replace(of.space, meshes=tuple(mesh_shapes(8, (), ordered=True)))
    cost = CostModel(catalogued(topology), network=Network(topology))
    inside = next(
        b.candidate.layout
        for b in baselines(space)
        if b.name == "data x TP" and b.candidate.layout.mesh == (("x", 2), ("y", 4))
    )
    across = next(axis_swaps(space, space.candidate(inside))).layout
    assert across.mesh == (("x", 4), ("y", 2))
    judged = [Propagator(of.analysis).judge(space, x, cost) for x in (inside, across)]
    assert judged[0].flops == judged[1].flops
    assert judged[0].communication_s < 0.5 * judged[1].communication_s


def test_the_order_of_mesh_axes_is_part_of_the_space_where_links_differ() -> None:
    here = find_target(jax.devices()[:8])
    assert not here.uneven
    there = dataclasses.replace(here, devices=(), topology=gpu(2, 4), shared_host=False)
    assert there.uneven
    space = dataclasses.replace(
        analysed.subject("scanned_mlp").space, meshes=tuple(mesh_shapes(8, (), ordered=True))
    )
    wide = next(b for b in baselines(space) if b.candidate.layout.mesh == (("x", 4), ("y", 2)))
    moved = {near.layout.mesh for near in moves(space, wide.candidate)}
    assert (("x", 2), ("y", 4)) in moved


@pytest.mark.parametrize(("platform", "name"), SMALL)
def test_a_search_for_hardware_that_is_not_here(
    platform: str, name: str, tmp_path, capfd: pytest.CaptureFixture[str]
) -> None:
    needs(platform)
    journal = tmp_path / "journal.jsonl"
    plan = autoshard.search(workloads.mlp, name, budget=BUDGET, journal=journal)
    assert capfd.readouterr() == ("", ""), "the compilers' noise reached the terminal"
    trials = plan.evidence.trials
    compiled = [t.compiled for t in trials if isinstance(t.compiled, Estimate)]
    assert len(compiled) == BUDGET.compiles and all(c.time_s > 0 for c in compiled)
    assert all(t.profiled is None for t in trials)
    text = str(plan)
    assert name in text and "unchecked" in text
    for call in (
        plan.init,
        lambda: plan.step(None, None),
        lambda: plan.put({}),
        lambda: plan.jit(id),
    ):
        with pytest.raises(autoshard.PlanError, match=r"not here.*load_plan"):
            call()

    # Again with the journal: nothing is compiled anew.
    lines = len(journal.read_text().splitlines())
    again = autoshard.search(workloads.mlp, name, budget=BUDGET, journal=journal)
    assert again.layout == plan.layout
    assert len(journal.read_text().splitlines()) == lines

    # The plan file goes to where the devices are; here 8 of another kind.
    path = str(tmp_path / "plan.json")
    plan.save(path)
    assert json.loads((tmp_path / "plan.json").read_text())["target"]["topology"] == name
    with pytest.raises(autoshard.PlanError, match="platform: recorded"):
        autoshard.load_plan(path, workloads.mlp, jax.devices()[:8])
    loaded = autoshard.load_plan(path, workloads.mlp, jax.devices()[:8], check_target=False)
    state, batch = loaded.init(), loaded.put(workloads.batch_of())
    for _ in range(2):
        state, metrics = loaded.step(state, batch)
    assert np.isfinite(metrics["loss"])
    assert not any("collectives differ" in note for note in loaded.evidence.notes), "it has none"
    with pytest.raises(autoshard.PlanError, match="another model"):
        autoshard.load_plan(
            path, lambda: workloads.mlp(rate=0.2), jax.devices()[:8], check_target=False
        )


@pytest.mark.deviceless
def test_a_chip_under_ones_own_name_is_compiled_for(tmp_path) -> None:
    """libtpu knows no `ours:2x2`, but what that inherits."""
    needs("tpu")
    hardware = tmp_path / "ours.toml"
    hardware.write_text('[chip.ours]\ninherits = "v5e"\nmemory_bandwidth = 7e11\n')
    budget = autoshard.Budget(candidates=10, compiles=1)
    plan = autoshard.search(workloads.mlp, "ours:2x2", budget=budget, hardware=hardware)
    assert plan.trial is not None and isinstance(plan.trial.compiled, Estimate)
    assert "ours:2x2" in str(plan)


@pytest.mark.deviceless
def test_loading_elsewhere_notes_collectives_that_run_over_other_axes(tmp_path) -> None:
    """A plan that communicates, its record altered to do so over another mesh axis."""
    needs("tpu")
    plan = autoshard.search(workloads.mlp, "v5e:2x4", budget=BUDGET, fix={"batch": ("x",)})
    path = tmp_path / "plan.json"
    plan.save(str(path))

    def notes() -> list[str]:
        loaded = autoshard.load_plan(path, workloads.mlp, jax.devices()[:8], check_target=False)
        return [n for n in loaded.evidence.notes if n.startswith("collectives differ")]

    assert not [n for n in notes() if "over" not in n], "the axes of all groups are known"
    data = json.loads(path.read_text())
    compiled = data["evidence"]["trials"][data["evidence"]["ranking"][0]]["compiled"]
    recorded = {c["kind"] for c in compiled["collectives"]}
    for collective in compiled["collectives"]:
        collective["mesh_axes"] = ["elsewhere"]
    path.write_text(json.dumps(data))
    for kind in recorded:
        said = [n for n in notes() if kind in n]
        assert any("over elsewhere: recorded" in n and n.endswith("now 0 B") for n in said)
        assert any("over x: recorded 0 B" in n for n in said)


@pytest.mark.parametrize(("platform", "name"), SMALL)
def test_what_fits_nowhere_is_told_with_what_would_help(platform: str, name: str) -> None:
    needs(platform)
    with pytest.raises(autoshard.NoPlanError) as error:
        autoshard.search(workloads.mlp, name, budget=BUDGET, memory_bytes=30_000)
    text = str(error.value)
    assert "no layout fits" in text and name in text and "closest needs" in text
    assert "devices instead of 8" in text
    larger = re.search(rf"({name.partition(':')[0]}:\S+), (\d+) devices instead of 8", text)
    assert larger and find_target(larger[1]).device_count == int(larger[2]) > 8


@pytest.mark.parametrize(("platform", "name"), SMALL)
def test_compiles_over_their_time_limit_are_killed_and_told(platform: str, name: str) -> None:
    needs(platform)
    budget = dataclasses.replace(BUDGET, compiles=2, compile_seconds=0.01)
    with pytest.raises(autoshard.NoPlanError, match="timeout"):
        autoshard.search(workloads.mlp, name, budget=budget)


def test_a_compiler_that_is_not_installed_is_named_with_the_command(monkeypatch) -> None:
    from autoshard.target import target

    def missing(platform: str) -> str:
        raise autoshard.TargetError(f"pip install 'autoshard[{platform}]'")

    monkeypatch.setattr(target, "require_compiler", missing)
    with pytest.raises(autoshard.TargetError, match=r"autoshard\[tpu\]"):
        autoshard.search(workloads.mlp, "v5e:2x4")


def test_unknown_hardware_is_refused_before_anything_else() -> None:
    with pytest.raises(autoshard.TargetError, match="v5x"):
        autoshard.search(workloads.mlp, "v5x:2x4")


def test_an_oom_of_the_compiler_is_a_typed_failure() -> None:
    """libtpu refuses with its true figures; they say how far the nearest layout is."""
    from autoshard.records.trial import Stage, Trial
    from autoshard.tuner.diagnosis import _peak

    target = dataclasses.replace(find_target(jax.devices()[:8]), topology=tpu(2, 2, 2), devices=())
    trial = Trial(
        candidate=next(iter(baselines(analysed.subject("scanned_mlp").space))).candidate,
        propagated=Failure(stage=Stage.PROPAGATE, kind=Kind.UNSUPPORTED, message=""),
        compiled=Failure(stage=Stage.COMPILE, kind=Kind.OOM, message="", missing_bytes=5),
    )
    assert _peak(trial, target) == 15_000_000_005


def test_no_advice_goes_beyond_the_memory_that_hardware_has() -> None:
    from autoshard.tuner.diagnosis import _more_memory

    here = find_target(jax.devices()[:8], 15_000_000_000)
    there = dataclasses.replace(here, topology=tpu(2, 2, 2), devices=())  # 15e9 usable of 16e9
    limit = 14_250_000_000
    assert _more_memory(14_400_000_000, limit, there) == [
        "memory_bytes of at least 15157894738",
        "memory_headroom of at most 0.04",
    ]
    assert _more_memory(20_000_000_000, limit, there) == []
    assert _more_memory(20_000_000_000, limit, here) == ["memory_bytes of at least 21052631580"]


@pytest.mark.deviceless
def test_products_that_triton_has_no_tiling_for_are_left_to_the_library() -> None:
    """Of 197 tokens an image: with jax 0.10.2 and 0.11.2 the compiler refuses such a step."""
    needs("cuda")
    size = dataclasses.replace(VIT_B16, layers=2, d_model=192, mlp_dim=384)
    model_fn = of_size("vit", size, 8).workload
    budget = autoshard.Budget(candidates=4, compiles=1)
    plan = autoshard.search(model_fn, "h100:1x1", budget=budget)
    assert plan.trial is not None and isinstance(plan.trial.compiled, Estimate)
    told = any("left to cuBLAS" in text for text in plan.trial.compiled.assumptions)
    assert told == (jax.__version_info__ < (0, 12))
