import dataclasses
import re
import types

import jax
import numpy as np
import pytest

import autoshard
from autoshard.errors import TargetError
from autoshard.target import host
from autoshard.target import target as target_module
from autoshard.target.catalogue import catalogue
from autoshard.target.target import find_target, require_own_devices
from tests.workloads import mlp

DEVICES = jax.devices()


def test_a_mesh_gives_its_devices_in_its_own_order():
    mesh = jax.sharding.Mesh(np.array(DEVICES).reshape(4, 2).T, ("a", "b"))
    target = find_target(mesh)
    assert target.devices == tuple(mesh.devices.flat)
    assert target.given == (("a", 2), ("b", 4))
    assert target.platform == "cpu" and target.device_count == 8 and target.shared_host
    assert target.describe() == "8 fake cpu devices"


@pytest.mark.parametrize(
    "devices", [DEVICES[:4], tuple(DEVICES[:4]), np.array(DEVICES[:4]).reshape(2, 2)]
)
def test_plain_devices_give_no_shape(devices):
    target = find_target(devices)
    assert target.devices == tuple(DEVICES[:4]) and target.given == ()


def test_the_kinds_of_axes_do_not_matter():
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(explicit, explicit))
    made = find_target(mesh).mesh((("a", 2), ("b", 4)))
    assert made.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert made.devices.tolist() == mesh.devices.tolist()


def test_meshes_are_made_over_the_devices_in_order():
    target = find_target(DEVICES)
    mesh = target.mesh((("x", 2), ("y", 2), ("z", 2)))
    assert mesh.axis_names == ("x", "y", "z") and list(mesh.devices.flat) == DEVICES
    assert find_target(DEVICES[:1]).mesh(()).shape == {"x": 1}
    with pytest.raises(TargetError, match="needs 4 devices, got 8"):
        target.mesh((("x", 4),))


def test_programs_are_placed_where_their_meshes_are(monkeypatch):
    target = find_target(DEVICES)
    monkeypatch.setattr(type(target), "order", lambda self, shape: tuple(range(8))[::-1])
    shape = (("x", 2), ("y", 4))
    assert list(target.placed(shape)) == list(target.mesh(shape).devices.flat) == DEVICES[::-1]
    assert target.placed((("x", 1),)) == (DEVICES[0],)  # the program that makes the state


def test_memory_is_the_hosts_share_unless_given():
    target = find_target(DEVICES)
    assert target.memory_bytes == host.memory_bytes() // 8
    assert target.memory_source.startswith("the host's memory that this process may use")
    given = find_target(DEVICES, 12345)
    assert (given.memory_bytes, given.memory_source) == (12345, "memory_bytes")
    with pytest.raises(TargetError, match="must be positive, got -1"):
        find_target(DEVICES, -1)


@dataclasses.dataclass(frozen=True)
class PodDevice:
    """A TPU of a job of many processes, as process 1 sees it."""

    id: int
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5p"

    @property
    def client(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(platform="tpu", process_index=lambda: 1)

    def memory_stats(self) -> dict[str, int]:
        if self.process_index != 1:
            raise jax.errors.JaxRuntimeError(
                "INVALID_ARGUMENT: MemoryStats is only supported for addressable PjRt devices."
            )
        return {"bytes_limit": 95 * 2**30}


def test_only_devices_of_this_process_are_asked_what_they_hold(monkeypatch):
    monkeypatch.setattr(jax, "Device", PodDevice)
    devices = [PodDevice(id=i, process_index=i // 4) for i in range(8)]
    target = find_target(devices)
    assert target.memory_bytes == 95 * 2**30
    assert target.memory_source == "the device's own limit"
    with pytest.raises(TargetError, match=r"none belongs to process 1.*give memory_bytes"):
        find_target(devices[:4])
    assert find_target(devices[:4], 123).memory_bytes == 123


@pytest.mark.parametrize("of", [range(8), range(4)], ids=["several processes", "another process"])
def test_a_search_on_devices_of_other_processes_is_refused(monkeypatch, of):
    monkeypatch.setattr(jax, "Device", PodDevice)
    devices = [PodDevice(id=i, process_index=i // 4) for i in of]
    processes = re.escape(str(sorted({d.process_index for d in devices})))
    with pytest.raises(TargetError, match=f"processes {processes}, expected .* process 1 alone"):
        autoshard.search(mlp, devices, memory_bytes=2**30)


def test_a_search_on_the_devices_of_this_process_is_not_refused(monkeypatch):
    require_own_devices(find_target(DEVICES))
    monkeypatch.setattr(jax, "Device", PodDevice)
    require_own_devices(find_target([PodDevice(id=i, process_index=1) for i in range(4)]))


@dataclasses.dataclass(frozen=True)
class SilentGpu:
    """A GPU that does not say how much memory it has."""

    id: int
    device_kind: str
    platform: str = "gpu"
    process_index: int = 0

    @property
    def client(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(platform="gpu", process_index=lambda: 0)

    def memory_stats(self) -> None:
        return None


def test_an_accelerator_that_does_not_say_its_memory_has_the_catalogues(monkeypatch):
    monkeypatch.setattr(jax, "Device", SilentGpu)
    target = find_target([SilentGpu(id=i, device_kind="NVIDIA H100 80GB HBM3") for i in range(2)])
    usable = catalogue()["h100"].usable_bytes
    assert (target.memory_bytes, target.memory_source) == (int(usable.value), usable.source)
    unknown = [SilentGpu(id=0, device_kind="GeForce 256")]
    with pytest.raises(TargetError, match=r"GeForce 256 does not say .*give memory_bytes"):
        find_target(unknown)
    assert find_target(unknown, 123).memory_bytes == 123


def test_a_catalogue_file_is_for_hardware_that_is_named():
    with pytest.raises(TargetError, match=r"hardware='own\.toml' and devices that are here"):
        find_target(DEVICES, hardware="own.toml")


def test_named_hardware_has_no_more_memory_than_its_chip(monkeypatch):
    monkeypatch.setattr(target_module, "require_compiler", lambda platform: "")
    assert find_target("h100:1x8", 79 * 2**30).memory_bytes == 79 * 2**30, "more than is usable"
    with pytest.raises(TargetError, match=r"got memory_bytes 214748364800, expected at most 8\d+"):
        find_target("h100:1x8", 200 * 2**30)
