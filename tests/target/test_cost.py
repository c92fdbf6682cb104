"""The model of time: monotonic laws, exact small cases, and the fit of its corrections."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import CalibrationError, HloError
from autoshard.records.trial import COLLECTIVE_KINDS, Collective
from autoshard.records.work import Work
from autoshard.target.catalogue import catalogue
from autoshard.target.catalogued import catalogued
from autoshard.target.cost import (
    FRESH_FROM_BYTES,
    Constants,
    Correction,
    CostModel,
    MeshPrices,
    fit_correction,
)
from autoshard.target.topology import parse_topology
from tests.analysed import CONSTANTS, COST

amounts = st.floats(0, 1e15, allow_nan=False)
kinds = st.sampled_from(COLLECTIVE_KINDS)


def kernel_s(cost: CostModel, flops: float, bytes_: float, trips: float, contracts: bool) -> float:
    return cost.kernels_s(
        np.array([flops]), np.array([bytes_]), np.array([trips]), ["f32" if contracts else ""]
    )


def collective_s(cost: CostModel, kind: str, group: int, bytes_: float) -> float:
    one = Collective(kind=kind, group_size=group, mesh_axes=("x",), bytes=bytes_, count=1)
    return cost.collective_s(one, (("x", group),))


@given(amounts, amounts, amounts, st.booleans())
def test_more_work_never_takes_less_time(a: float, b: float, other: float, contracts: bool) -> None:
    low, high = sorted((a, b))
    assert kernel_s(COST, low, other, 1, contracts) <= kernel_s(COST, high, other, 1, contracts)
    assert kernel_s(COST, other, low, 1, contracts) <= kernel_s(COST, other, high, 1, contracts)


@given(kinds, st.integers(1, 64), amounts, amounts)
def test_more_bytes_never_take_less_time(kind: str, group: int, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert collective_s(COST, kind, group, low) <= collective_s(COST, kind, group, high)


@given(kinds, st.integers(2, 64), st.integers(2, 64), amounts)
def test_larger_groups_never_take_less_time(kind: str, a: int, b: int, bytes_: float) -> None:
    """True for links whose measured constants grow with the group, as these do."""
    low, high = sorted((a, b))
    assert collective_s(COST, kind, low, bytes_) <= collective_s(COST, kind, high, bytes_)


def of_work(cost: CostModel, flops: float, bytes_: float, contracts: bool) -> float:
    """Rung 2's price of one kernel."""
    work = Work(
        opcode="fusion",
        name="",
        matmul_flops=(("f32", flops),) if contracts else (),
        element_flops=0.0 if contracts else flops,
        bytes=bytes_,
    )
    return cost.kernel_s(work)


@pytest.mark.parametrize(
    ("flops", "bytes_", "contracts", "seconds"),
    [
        (1e11, 3e9, True, 1.0),  # bound by flops
        (1e10, 3e9, False, 1.0),
        (1e11, 3e10, True, 3.0),  # bound by bytes
        (1e10, 3e10, False, 3.0),
        (0.0, 0.0, False, 0.0),  # the launch alone
    ],
)
@pytest.mark.parametrize("devices", [1, 8])
def test_a_kernel_is_a_roofline_and_a_launch_in_both_rungs(
    flops: float, bytes_: float, contracts: bool, seconds: float, devices: int
) -> None:
    """The devices of a shared host take turns, so that their work adds up."""
    cost = CostModel(dataclasses.replace(CONSTANTS, shared=devices > 1))
    expected = pytest.approx(devices * (seconds + CONSTANTS.launch_s))
    assert kernel_s(cost, flops, bytes_, 1, contracts) == expected
    assert of_work(cost, flops, bytes_, contracts) == expected
    assert MeshPrices(cost, (("x", devices),)).kernel_s(
        Work(opcode="copy", name="", bytes=bytes_)
    ) == pytest.approx(devices * (bytes_ / 1e10 + CONSTANTS.launch_s))


def test_kernels_of_a_step_add_up_as_often_as_they_run() -> None:
    found = COST.kernels_s(
        np.array([1e11, 1e10]), np.array([0.0, 3e10]), np.array([2.0, 5.0]), ["f32", ""]
    )
    assert found == pytest.approx(2 * 1.0 + 5 * 3.0 + 7 * CONSTANTS.launch_s)


def test_products_alone_take_the_compilers_cycles() -> None:
    cost = CostModel(dataclasses.replace(CONSTANTS, clock_hz=1e9))
    product = Work(opcode="fusion", name="", matmul_flops=(("f32", 1e11),), bytes=3e10, cycles=7)
    assert cost.kernel_s(product) == pytest.approx(7e-9)
    moving = dataclasses.replace(product, matmul_flops=())
    assert cost.kernel_s(moving) == pytest.approx(3.0 + CONSTANTS.launch_s)
    assert COST.kernel_s(product) == pytest.approx(3.0 + CONSTANTS.launch_s), "no clock is known"


def test_a_block_that_the_allocator_does_not_keep_costs_its_pages() -> None:
    cost = CostModel(dataclasses.replace(CONSTANTS, shared=True, fresh_s_per_byte=1e-9))
    assert cost.fresh_s(FRESH_FROM_BYTES - 1) == 0.0
    whole = CONSTANTS.device_count * FRESH_FROM_BYTES * 1e-9
    assert cost.fresh_s(FRESH_FROM_BYTES) == pytest.approx(whole)
    assert cost.fresh_s(1e9) == pytest.approx(CONSTANTS.device_count * 1.0)
    assert COST.fresh_s(1e9) == 0.0, "accelerators keep their memory"


def test_collectives_are_alpha_beta() -> None:
    small, large = (collective_s(COST, "all_gather", 8, b) for b in (0, 1e9))
    assert small == pytest.approx(1e-5) and large == pytest.approx(1e-5 + 0.8)
    assert collective_s(COST, "all_gather", 1, 1e9) == 0.0
    assert collective_s(COST, "all_gather", 5, 0) == pytest.approx(1e-5)


def test_collectives_that_nothing_is_known_of_are_never_free() -> None:
    alone = CostModel(dataclasses.replace(CONSTANTS, links=()))
    assert collective_s(alone, "all_reduce", 1, 1e9) == 0.0, "nobody to send to"
    with pytest.raises(HloError, match="'all_reduce' in groups of 8, expected one of"):
        collective_s(alone, "all_reduce", 8, 1e9)
    with pytest.raises(HloError, match=r"'something new'.*'all_gather', 'all_reduce'"):
        collective_s(COST, "something new", 8, 1e6)


def test_constants_go_through_json_with_their_digest() -> None:
    again = Constants.from_json(json.loads(json.dumps(CONSTANTS.to_json())))
    assert again == CONSTANTS and again.digest == CONSTANTS.digest
    assert dataclasses.replace(CONSTANTS, launch_s=2e-6).digest != CONSTANTS.digest


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"array_s": 1e-6, "bandwidths": [[1, 2.0]]}, "array_s, bandwidths"),
        ({"folds_sums": None}, "folds_sums"),
    ],
)
def test_constants_of_another_version_are_refused_in_one_line(change: dict, named: str) -> None:
    data = {**CONSTANTS.to_json(), **change}
    data = {name: value for name, value in data.items() if value is not None}
    with pytest.raises(CalibrationError, match=rf"differs in {named}: calibrate") as raised:
        Constants.from_json(data)
    assert "\n" not in str(raised.value)


positive = st.floats(1e-4, 10.0)


@given(st.lists(st.tuples(positive, positive), min_size=4, max_size=12), st.floats(0.3, 3.0))
def test_a_fit_finds_a_common_scale(parts: list[tuple[float, float]], scale: float) -> None:
    found = fit_correction((a, b, scale * (a + b)) for a, b in parts)
    assert found.compute == pytest.approx(scale, rel=1e-6)
    assert found.communication == pytest.approx(scale, rel=1e-6)


@given(st.lists(st.tuples(positive, positive, positive), max_size=12))
def test_a_fit_is_always_finite_and_positive(pairs: list[tuple[float, float, float]]) -> None:
    found = fit_correction(pairs)
    for factor in (found.compute, found.communication):
        assert np.isfinite(factor) and factor > 0


def test_a_fit_tells_the_two_parts_apart() -> None:
    pairs = [(1.0, 0.1 * k, 1.0 + 0.3 * k) for k in range(10)] * 5
    found = fit_correction(pairs, prior_weight=1e-6)
    assert found.compute == pytest.approx(1.0, rel=1e-3)
    assert found.communication == pytest.approx(3.0, rel=1e-3)


def test_nothing_seen_corrects_nothing() -> None:
    assert fit_correction([]) == Correction()
    assert fit_correction([(1.0, 1.0, 0.0)]) == Correction()


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        ("", CONSTANTS.element_flops_per_s),
        ("bf16", 4e14),
        ("f32", CONSTANTS.contract_flops_per_s),
        ("f8E4M3FN", 8e14),
        ("f8e5m2", 8e14),
        ("f4E2M1FN", 16e14),
        ("i8", 6e14),
        ("ui8", 6e14),
        ("s8", 6e14),
        ("u8", 6e14),
    ],
)
def test_a_rate_is_found_under_the_words_of_both_dialects(dtype: str, rate: float) -> None:
    by_dtype = (("bf16", 4e14), ("f4", 16e14), ("f8", 8e14), ("s8", 6e14))
    model = CostModel(dataclasses.replace(CONSTANTS, contract_by_dtype=by_dtype))
    assert model.rate(dtype) == rate


@pytest.mark.parametrize(
    ("name", "high", "highest", "thrice"),
    [
        ("h100:1x8", 494.7e12, 66.9e12, 989.4e12 / 3),
        ("v5e:2x2", 197e12 / 3, 197e12 / 6, 197e12 / 3),
    ],
)
def test_products_of_f32_cost_what_their_precision_does(
    name: str, high: float, highest: float, thrice: float
) -> None:
    """Without TF32 there are no tensor cores; on TPU f32 is several products in bf16."""
    model = CostModel(catalogued(parse_topology(name, catalogue())))
    assert model.rate("f32:high") == pytest.approx(high)
    assert model.rate("f32:highest") == pytest.approx(highest)
    assert model.rate("bf16_x3") == pytest.approx(thrice)


@pytest.mark.parametrize("dtype", ["f32:high", "f32:highest", "bf16_x3", "f32_x3"])
def test_on_cpu_precision_costs_nothing(dtype: str) -> None:
    model = CostModel(dataclasses.replace(CONSTANTS, contract_by_dtype=()))
    assert model.rate(dtype) == model.rate("f32")
