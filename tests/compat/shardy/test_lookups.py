"""Lookups as the partitioner of XLA divides them: rung 1 sends what the compiled program sends."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autoshard.compat.shardy import lookups, partitioner, shardings, stablehlo
from autoshard.compat.xla.executable import compile_module
from autoshard.lowering.lower import lower_step
from autoshard.records.layout import Layout, MeshShape
from autoshard.records.trial import Collective, Estimate
from autoshard.rungs.compile import hlo
from autoshard.target.cost import CostModel
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, propagator, target
from tests.programs import normal, shaped, train

ROWS, WIDTH, LENGTH = 512, 64, 4
CPU = CostModel(dataclasses.replace(CONSTANTS, forms_reduce_scatter=False))


def embedding(batch: int) -> Workload:
    def loss(params, batch):
        found = params["table"][batch["ids"]]
        return jnp.mean((jnp.tanh(found) - batch["y"][..., None]) ** 2)

    return train(
        loss,
        lambda: {"table": normal(0, ROWS, WIDTH)},
        {"ids": shaped(batch, LENGTH, dtype=jnp.int32), "y": shaped(batch, LENGTH)},
    )


def sent(collectives: tuple[Collective, ...]) -> dict[str, int]:
    """Bytes by kind."""
    found: collections.Counter[str] = collections.Counter()
    for one in collectives:
        found[one.kind] += one.bytes * one.count
    return dict(found)


ONE, TWO, SPARE = (("x", 8),), (("x", 4), ("y", 2)), (("x", 2), ("y", 4))
THREE = (("x", 2), ("y", 2), ("z", 4))
X, Y, BOTH = ("x",), ("y",), ("x", "y")
ROW, COLUMN, TIME = f"table[0]:{ROWS}", f"table[1]:{WIDTH}", f"ids[1]:{LENGTH}"


@pytest.mark.parametrize("batch", [64, 256, 4096])  # half, twice, 32 times the table is found
@pytest.mark.parametrize(
    ("mesh", "compute", "storage"),
    [
        (ONE, {"batch": X}, {COLUMN: X}),
        (ONE, {"batch": X, COLUMN: X}, {COLUMN: X}),
        (ONE, {"batch": X}, {ROW: X}),
        (ONE, {"batch": X, ROW: X}, {ROW: X}),
        (TWO, {"batch": BOTH}, {COLUMN: BOTH}),
        (TWO, {"batch": BOTH, COLUMN: Y}, {COLUMN: BOTH}),
        (SPARE, {"batch": X}, {ROW: X}),
        (SPARE, {"batch": X, ROW: X}, {ROW: X}),
        (ONE, {COLUMN: X, ROW: X}, {ROW: X}),
        pytest.param(
            *(SPARE, {COLUMN: X, ROW: X}, {ROW: X}),
            marks=pytest.mark.skipif(
                jax.__version_info__ >= (0, 12),
                reason="XLA gathers the gradient to divide it by rows (full rematerialization)",
            ),
        ),
    ],
)
def test_what_is_sent_for_lookups_as_compiled(
    mesh: MeshShape, compute: dict, storage: dict, batch: int
) -> None:
    of = analyse(embedding(batch))
    layout = Layout(
        mesh=mesh, activation_rules=tuple(compute.items()), state_rules=tuple(storage.items())
    )
    specs = of.space.specs(layout)
    predicted = propagator(of.analysis).judge(of.space, layout, CPU)
    assert isinstance(predicted, Estimate), predicted
    assert predicted.collectives
    compiled = compile_module(lower_step(of.analysis, specs, target()), jax.devices()[:8])
    counts = hlo.count(hlo.parse(compiled.hlo_text), specs.mesh)
    assert sent(predicted.collectives) == sent(counts.collectives)


@pytest.mark.parametrize(("batch", "gathered"), [(64, False), (1016, False), (1024, True)])
def test_tables_are_gathered_where_a_device_finds_as_much(batch: int, gathered: bool) -> None:
    """Of 512 rows each of eight devices looks up batch / 2."""
    of = analyse(embedding(batch))
    (table,) = (s.index for s in of.analysis.sites.sites if s.found >= 0)
    layout = Layout(mesh=ONE, activation_rules=(("batch", X),), state_rules=((COLUMN, X),))
    assert (table in of.space.specs(layout).sites) == gathered


@pytest.mark.parametrize("batch", [64, 4096])
def test_mesh_axes_to_spare_go_to_one_dimension_each(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookups are divided along two dimensions, the table's rows over both mesh axes."""
    written: list[tuple[tuple[str, ...], ...]] = []

    def keep(operations, sizes, attributes):  # type: ignore[no-untyped-def]
        def noting(text: str) -> stablehlo.Attribute:
            written.append(shardings.parse_sharding(text))
            return attributes(text)

        lookups.keep_tables(operations, sizes, noting)

    monkeypatch.setattr(partitioner, "keep_tables", keep)
    of = analyse(embedding(batch))
    compute, storage = (("batch", X), (TIME, Y), (ROW, BOTH)), ((ROW, BOTH),)
    layout = Layout(mesh=THREE, activation_rules=compute, state_rules=storage)
    assert isinstance(propagator(of.analysis).judge(of.space, layout, CPU), Estimate)
    assert any("z" in str(dims) for dims in written)
    for dims in written:
        axes = [axis for dim in dims for axis in dim]
        assert len(set(axes)) == len(axes), dims
