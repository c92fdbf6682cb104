import pathlib

import jax
import pytest

from autoshard.rungs.profile.runner import LocalRunner
from autoshard.rungs.profile.traces import read_trace, split
from tests import lowered


def plane(name: str, lines: dict[str, list[tuple]], stats: tuple[str, ...] = ()) -> str:
    """Text of an XPlane; events are (name, begin in us, duration in us, {stat: value})."""
    names: dict[str, int] = {}
    stat_ids = {stat: i + 1 for i, stat in enumerate(stats)}
    text = [f'name: "{name}"']
    for i, (line, events) in enumerate(lines.items(), 1):
        text.append(f'lines {{ id: {i} name: "{line}" timestamp_ns: 0')
        for event, begin, duration, values in events:
            at = names.setdefault(event, len(names) + 1)
            text.append(f"events {{ metadata_id: {at}")
            text.append(f"offset_ps: {begin}000000 duration_ps: {duration}000000")
            for stat, value in values.items():
                kind = "int64_value" if isinstance(value, int) else "str_value"
                shown = value if isinstance(value, int) else f'"{value}"'
                text.append(f"stats {{ metadata_id: {stat_ids[stat]} {kind}: {shown} }}")
            text.append("}")
        text.append("}")
    for event, at in names.items():
        text.append(f'event_metadata {{ key: {at} value {{ id: {at} name: "{event}" }} }}')
    for stat, at in stat_ids.items():
        text.append(f'stat_metadata {{ key: {at} value {{ id: {at} name: "{stat}" }} }}')
    return "planes { " + "\n".join(text) + " }"


def profiles(*planes: str, steps: int = 1) -> dict[str, tuple[float, float, float]]:
    """Microseconds of compute, communication and idle by device."""
    data = jax.profiler.ProfileData.from_text_proto("\n".join(planes))
    found = split(data, steps)
    return {
        p.device: tuple(round(t * 1e6, 3) for t in (p.compute_s, p.communication_s, p.idle_s))
        for p in found
    }


def test_a_real_cpu_trace(tmp_path):
    bench = LocalRunner()
    bench.set_inputs(jax.tree.leaves(lowered.init_state()), lowered.make_batches())
    bench.load("a", lowered.train_module())
    bench.run("a", 1)
    folder = bench.trace("a", str(tmp_path), 3)
    assert folder == str(tmp_path)
    found = read_trace(folder, 3)
    assert [p.device for p in found] == [f"CPU:{i}" for i in range(8)]
    spans = {round(p.compute_s + p.communication_s + p.idle_s, 9) for p in found}
    assert len(spans) == 1, "every device has the same step"
    assert all(p.compute_s > 0 and p.communication_s > 0 and p.idle_s >= 0 for p in found)


def test_a_real_gpu_trace():
    """The kernels of a command buffer name it as their operation, not their own."""
    text = (pathlib.Path(__file__).parent / "h100_mlp.textproto").read_text()
    (only,) = split(jax.profiler.ProfileData.from_text_proto(text), 2)
    assert only.device == "GPU:0" and only.communication_s == 0
    assert only.compute_s == pytest.approx(0.97577e-3, rel=1e-3)
    assert only.idle_s == pytest.approx(0.81325e-3, rel=1e-3), "the host, between two steps"


def test_a_program_without_collectives_does_not_communicate(tmp_path):
    bench = LocalRunner()
    bench.set_inputs(jax.tree.leaves(lowered.init_state()), lowered.make_batches())
    bench.load("one", lowered.train_module(lowered.ONE))
    bench.trace("one", str(tmp_path), 2)
    (only,) = read_trace(str(tmp_path), 2)
    assert only.device == "CPU:0" and only.compute_s > 0 and only.communication_s == 0


def test_cpu_events_are_split_by_device_whatever_thread_ran_them():
    stats = ("hlo_op", "device_ordinal")

    def event(op, device, begin, duration):
        return (op, begin, duration, {"hlo_op": op, "device_ordinal": device})

    threads = {
        "tf_XLAEigen/1": [
            event("dot.1", 0, 0, 10),
            event("all-reduce.3", 0, 10, 30),
            ("Rendezvous", 10, 30, {}),
            ("end: dot.1", 10, 1, {}),
            event("while.2", 1, 0, 50),
        ],
        "tf_XLAEigen/2": [event("dot.1", 1, 5, 10), event("all-reduce.3", 1, 20, 20)],
    }
    assert profiles(plane("/host:CPU", threads, stats)) == {
        "CPU:0": (10, 30, 0),
        "CPU:1": (10, 20, 10),
    }


def test_gpu_streams_overlap():
    lines = {
        "Stream #1(Compute)": [
            ("gemm_fusion_7", 0, 20, {"hlo_op": "gemm_fusion.7"}),
            ("loop_add", 30, 10, {}),
        ],
        "Stream #2(Compute)": [("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 20, {})],
        "XLA Ops": [("gemm_fusion.7", 0, 999, {})],
    }
    found = profiles(plane("/device:GPU:0", lines, ("hlo_op",)), steps=2)
    assert found == {"GPU:0": (15, 5, 0)}


def test_tpu_operations_are_named_by_their_instruction():
    lines = {
        "XLA Ops": [
            ("%fusion.1 = f32[8] fusion(%all-reduce.2)", 0, 20, {}),
            ("%all-reduce.2 = f32[8] all-reduce(%fusion.1)", 20, 10, {}),
            ("%while.3 = (f32[8]) while(%tuple)", 0, 60, {}),
            ("%fusion.4 = f32[8] fusion(%p)", 40, 10, {}),
        ],
        "Async XLA Ops": [
            ("%all-gather-start.5 = f32[8] all-gather-start(%p)", 35, 10, {}),
            ("%copy-start.6 = f32[8] copy-start(%p)", 0, 60, {}),
        ],
        "Steps": [("1", 0, 60, {})],
    }
    found = profiles(plane("/device:TPU:10", lines), plane("/device:TPU:9", lines))
    assert found == {"TPU:9": (30, 15, 5), "TPU:10": (30, 15, 5)}
    assert list(found) == ["TPU:9", "TPU:10"]


def test_no_device_events_and_no_trace(tmp_path):
    assert profiles(plane("/host:CPU", {"python": [("PjitFunction", 0, 5, {})]})) == {}
    with pytest.raises(FileNotFoundError, match="xplane"):
        read_trace(str(tmp_path), 1)
