"""The program that runs: it computes what the plain step computes, and is what was judged."""

import random

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autoshard.lowering import lower as lowering
from autoshard.records.layout import Layout
from autoshard.space.baselines import baselines
from tests import programs
from tests.analysed import (
    analyse,
    arguments,
    baseline,
    run,
    run_plain,
    subject,
    target,
    worst_error,
)
from tests.programs import EMBED, MLP

TOLERANCE = 1e-4


LARGE = ("scanned_gpt", "gradient_accumulation", "mixture_of_experts")


@pytest.mark.parametrize("name", [n for n in programs.EVERY if n not in (*LARGE, "manual_region")])
def test_a_random_layout_computes_what_the_plain_step_does(name: str) -> None:
    of = subject(name)
    candidate = of.space.sample(random.Random(11))
    assert candidate is not None
    tolerance = 3e-2 if name in ("bfloat16", "momentum_layers") else TOLERANCE  # of bfloat16
    assert worst_error(of, run(of, candidate.layout), run_plain(of)) < tolerance


@pytest.mark.parametrize("name", ["equal_width_mlp", "key_in_state"])
def test_every_baseline_and_some_random_layouts_compute_the_same(name: str) -> None:
    of = subject(name)
    want = run_plain(of)
    rng = random.Random(4)
    layouts = [b.candidate.layout for b in baselines(of.space)]
    if name == "key_in_state":
        layouts = layouts[1::4]
    layouts += [c.layout for c in (of.space.sample(rng) for _ in range(3)) if c]
    assert len(layouts) >= 6
    for layout in layouts:
        assert worst_error(of, run(of, layout), want) < TOLERANCE, layout


@pytest.mark.parametrize("name", LARGE)
def test_fsdp_with_tensor_parallelism_computes_the_same(name: str) -> None:
    of = subject(name)
    layout = baseline(of.space, "FSDP x TP", 2)
    assert worst_error(of, run(of, layout), run_plain(of)) < TOLERANCE


@pytest.mark.parametrize("mesh_axes", [1, 2])
def test_tokens_that_travel_to_experts_compute_the_same(mesh_axes: int) -> None:
    of = subject("grouped_experts")
    want = run_plain(of)
    for name in ("FSDP x EP", "data x EP"):
        layout = baseline(of.space, name, mesh_axes)
        assert worst_error(of, run(of, layout), want) < TOLERANCE, name


def test_a_manual_region_computes_the_same_in_every_layout() -> None:
    of = subject("manual_region")
    workload = of.analysis.program.workload
    want = run(of, baseline(of.space, "replicated"))
    for name in ("data parallel", "FSDP", "tensor parallel"):
        assert worst_error(of, run(of, baseline(of.space, name)), want) < TOLERANCE
    # The same without shard_map.
    a, b, x = arguments(of)
    loss = np.mean((np.tanh(np.asarray(x) @ np.asarray(a)) @ np.asarray(b) - np.asarray(x)) ** 2)
    assert float(want[-1]) == pytest.approx(float(loss), rel=1e-5)
    assert workload.batch.shape == x.shape


def test_the_step_as_written_and_with_kept_constraints_compute_the_same() -> None:
    of = subject("with_constraints")
    want = run_plain(of)
    written = Layout(mesh=(("data", 4), ("model", 2)), as_annotated=True)
    assert worst_error(of, run(of, written), want) < TOLERANCE
    kept = analyse(programs.with_constraints(), keep_constraints=True)
    for name in ("replicated", "data parallel", "FSDP"):
        assert worst_error(kept, run(kept, baseline(kept.space, name)), want) < TOLERANCE


def test_the_measure_of_error_sees_a_wrong_gradient() -> None:
    of = subject("custom_derivatives")
    want = run_plain(of)
    wrong = [x.copy() for x in want]
    before = np.asarray(arguments(of)[0])
    wrong[0] = before + 1.01 * (want[0] - before)
    assert worst_error(of, wrong, want) > TOLERANCE


def test_a_trailing_none_and_a_single_axis_have_one_spelling() -> None:
    assert lowering.partition_spec((("x",), ())) == PartitionSpec("x")
    assert lowering.partition_spec(((), ("x", "y"), ())) == PartitionSpec(None, ("x", "y"))
    assert lowering.partition_spec(((), ())) == PartitionSpec()


def test_state_is_donated_and_comes_back_as_it_went_in() -> None:
    of = subject("custom_derivatives")
    specs = of.space.specs(baseline(of.space, "FSDP"))
    mesh = target().mesh(specs.mesh)
    shardings = lowering.shardings(mesh, specs.inputs)
    step = lowering.jit_step(of.analysis, specs, target())
    placed = [jax.device_put(x, s) for x, s in zip(arguments(of), shardings, strict=True)]
    out = step(*placed)
    count = len(of.analysis.program.state)
    assert all(x.is_deleted() for x in placed[:count])
    assert not any(x.is_deleted() for x in placed[count:])
    for old, new in zip(shardings[:count], out[:count], strict=True):
        assert new.sharding.is_equivalent_to(old, new.ndim)
    assert all(x.sharding.is_fully_replicated for x in out[count:])
    step(*out[:count], *placed[count:])
    assert step._cache_size() == 1  # type: ignore[attr-defined]


def test_a_module_says_what_it_takes_and_its_digest_knows_the_layout() -> None:
    of = subject("key_in_state")
    layouts = [baseline(of.space, n) for n in ("data parallel", "FSDP", "data parallel")]
    modules = [lowering.lower_step(of.analysis, of.space.specs(x), target()) for x in layouts]
    assert modules[0].digest == modules[2].digest != modules[1].digest
    module = modules[1]
    assert module.state_count == len(of.analysis.program.state)
    assert module.device_count == 8
    keys = [x for x in module.inputs if x.path == "state['keys']"]
    assert keys[0].shape == (8, 2) and keys[0].dtype == "uint32"
    whole, cut = (sum(any(x.spec) for x in m.inputs[: m.state_count]) for m in modules[:2])
    assert whole == 0 < cut  # FSDP cuts the state, data parallel does not


def test_what_is_judged_is_what_runs() -> None:
    """Rung 2's module is the running step's, location-free."""
    of = subject("scanned_mlp")
    specs = of.space.specs(baseline(of.space, "FSDP"))
    module = lowering.lower_step(of.analysis, specs, target())
    step = lowering.jit_step(of.analysis, specs, target())
    lowered = step.lower(*lowering.shapes(of.analysis.program.inputs))
    again = lowering.module_of(
        lowered,
        specs.mesh,
        target().platform,
        of.analysis.program.inputs,
        specs.inputs,
        of.analysis.program.outputs,
        specs.outputs,
        len(of.analysis.program.state),
    )
    assert again.digest == module.digest


def test_manual_regions_of_the_unsharded_step_have_their_mesh() -> None:
    program = analyse(programs.manual_region()).analysis.program
    step = lowering.lower_unsharded(program, target())
    assert step.mesh == (("data", 8),)
    assert not any(axes for array in (*step.inputs, *step.outputs) for axes in array.spec)


@pytest.mark.parametrize("name", ["custom_derivatives", "key_in_state", "with_constraints"])
def test_the_unsharded_step_and_the_init_lower_for_one_device(name: str) -> None:
    program = analyse(programs.EVERY[name](), keep_constraints=True).analysis.program
    step = lowering.lower_unsharded(program, target())
    init = lowering.lower_init(program, target().lowering_platform)
    assert step.mesh == init.mesh == (("x", 1),)
    assert [x.shape for x in init.outputs] == [x.shape for x in step.inputs[: step.state_count]]
    if name != "key_in_state":
        assert {x.shape for x in init.outputs} == {(EMBED, MLP), (MLP, EMBED)}
