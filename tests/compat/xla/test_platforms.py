import types

import jax
import pytest

from autoshard.compat.xla.platforms import lowering_platform
from autoshard.target.target import find_target


@pytest.mark.parametrize("named", ["cuda", "rocm"])
def test_gpus_are_told_apart(named):
    """As jax itself reads a client (`jax._src.interpreters.pxla`); not seen on a GPU yet."""
    client = types.SimpleNamespace(platform="gpu", _raw_platform=named)
    assert lowering_platform(types.SimpleNamespace(platform="gpu", client=client)) == named


def test_a_client_that_has_one_name_has_that():
    client = types.SimpleNamespace(platform="tpu")
    assert lowering_platform(types.SimpleNamespace(platform="tpu", client=client)) == "tpu"


def test_cpu_devices_are_lowered_for_cpus():
    assert find_target(jax.devices()).lowering_platform == "cpu"
