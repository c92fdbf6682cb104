"""Compiles small programs on the 8 fake CPU devices and reads their HLO."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.rungs.compile.hlo import HloModule, parse

AXES = (("a", 2), ("b", 4))


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))


@pytest.fixture(scope="session")
def compile_hlo(mesh: Mesh) -> Callable[..., HloModule]:
    """compile_hlo(f, *arrays, ins=specs, outs=specs): unsharded on one device without specs."""

    def build(
        f: Callable[..., object],
        *arrays: jax.ShapeDtypeStruct,
        ins: Sequence[PartitionSpec] | None = None,
        outs: PartitionSpec | None = None,
    ) -> HloModule:
        options = {}
        if ins is not None:
            options["in_shardings"] = tuple(NamedSharding(mesh, spec) for spec in ins)
        if outs is not None:
            options["out_shardings"] = NamedSharding(mesh, outs)
        return parse(jax.jit(f, **options).lower(*arrays).compile().as_text())

    return build
