import tracemalloc
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.records.numerics import LeafError, NumericsReport
from autoshard.records.trial import Failure, Kind
from autoshard.rungs.profile.chunked import PIECE
from autoshard.rungs.profile.numerics import Perturbed, Trajectory, compare, reference

F32 = frozenset({"f32"})
RNG = np.random.default_rng(3)
START = [RNG.normal(size=200).astype(np.float32)]
BATCHES = [[np.zeros(1, np.float32)]] * 2


def trajectory(*state, metrics=()):
    return Trajectory(
        state=tuple((np.asarray(leaf),) for leaf in state),
        metrics=tuple(tuple((np.asarray(m),) for m in step) for step in metrics),
    )


def adding(change):
    """A program whose step adds `change`, and does nothing else."""
    return lambda state, batches: trajectory(state[0] + change)


def against(run, start=START, floats=F32):
    return reference(start, floats, BATCHES, run)


def error_of(candidate, ref, paths=("state.x",)):
    report = compare(candidate, ref, paths, [])
    assert isinstance(report, NumericsReport), report
    return report.state[0]


def test_the_error_is_that_of_the_change_not_of_the_value():
    change = np.full(200, 1e-3, np.float32)
    ref = against(adding(change))
    leaf = error_of(trajectory(START[0] + 8 * change), ref)
    assert not leaf.passed and leaf.error > 1  # of the value it is 0.7 %
    assert error_of(trajectory(START[0] + change), ref).error == 0


def test_flips_of_the_last_bit_are_noise_and_a_wrong_update_is_not():
    """A bf16 parameter with updates below its last bit: some elements flip, most stay."""
    start = [np.full(2000, 1.0, jnp.bfloat16)]
    sizes = np.random.default_rng(5).uniform(0, 2**-7, 2000)

    def run(state, batches, scale=1.0, seed=0):
        rounding = np.sin(1e4 * state[0].astype(np.float64).sum() + np.arange(2000) + seed)
        update = scale * sizes * (1 + 0.01 * rounding)
        return trajectory((state[0].astype(np.float64) + update).astype(jnp.bfloat16))

    ref = against(run, start, frozenset({"bf16"}))
    assert error_of(run(start, BATCHES, seed=1), ref).passed
    assert not error_of(run(start, BATCHES, scale=8.0), ref).passed


def test_a_leaf_that_must_not_change_may_not():
    ref = against(lambda state, batches: trajectory(state[0]))
    assert error_of(trajectory(START[0].copy()), ref).passed
    moved = START[0].copy()
    moved[7] *= 1.01
    leaf = error_of(trajectory(moved), ref)
    assert not leaf.passed and np.isfinite(leaf.error)


def test_sign_like_updates_of_noise_pass_and_wrong_ones_do_not():
    """adam's first step is the sign of the gradient; a tenth of the gradients here are noise."""
    healthy = np.arange(200) < 180

    def run(state, batches, scale=1e-3):
        noise = np.sin(state[0].astype(np.float64) * 1e12)  # any rounding changes it
        gradient = np.where(healthy, state[0], noise)
        return trajectory(state[0] + scale * np.sign(gradient).astype(np.float32))

    ref = against(run)
    nearby = [np.nextafter(START[0], np.float32(9))]
    leaf = error_of(run(nearby, BATCHES), ref)
    assert leaf.passed and leaf.noisy
    assert not error_of(run(nearby, BATCHES, scale=8e-3), ref).passed


def test_a_rare_flip_passes_where_more_rounding_would_flip_some():
    """One update in 200 hangs on last bits, and the noise run happens to miss it."""
    update = np.full(200, 1e-3, np.float32)

    def run(state, batches):
        moved = abs(float(state[0][0] / START[0][0]) - 1) > 1e-5
        return trajectory(state[0] + np.where(np.arange(200) == 5, -1 if moved else 1, 1) * update)

    flipped = update.copy()
    flipped[9] *= -1
    leaf = error_of(trajectory(START[0] + flipped), against(run))
    assert leaf.passed and leaf.noisy
    assert not error_of(trajectory(START[0] + flipped), against(adding(update))).passed
    half = np.where(np.arange(200) < 100, -update, update)
    assert not error_of(trajectory(START[0] + half), against(run)).passed


def test_activations_that_change_sides_pass_and_a_gradient_off_by_a_fifth_does_not():
    """relu: rounding takes some inputs near 0 to the other side, in no run the same ones."""
    rng = np.random.default_rng(11)
    inputs = rng.normal(size=(20_000, 200))
    above = rng.uniform(-0.1, 0.1, 20_000)  # each activation's distance from its kink
    kinks = inputs @ START[0].astype(np.float64) - above

    def run(state, batches, others=(), scale=1.0):
        active = inputs @ state[0].astype(np.float64) > kinks
        active[list(others)] ^= True
        return trajectory(state[0] - (scale * active @ inputs / 20_000).astype(np.float32))

    ref = against(run)
    nearest = np.argsort(np.abs(above))[:3]
    leaf = error_of(run(START, BATCHES, others=nearest), ref)
    assert leaf.passed and not leaf.noisy
    assert not error_of(run(START, BATCHES, scale=1.2), ref).passed
    assert not error_of(run(START, BATCHES, others=range(1000)), ref).passed


def test_the_worst_copy_counts():
    change = np.full(200, 1e-3, np.float32)
    ref = against(adding(change))
    good, bad = START[0] + change, START[0]
    leaf = error_of(Trajectory(state=((good, bad),), metrics=()), ref)
    assert leaf.copies == 2 and leaf.error > 0.9


def test_integers_are_exact_unless_rounding_moves_the_reference_too():
    start = [np.arange(10)]
    ref = against(lambda state, batches: trajectory(state[0] + 1), start)
    assert error_of(trajectory(start[0] + 1), ref).passed
    wrong = start[0] + 1
    wrong[3] = 0
    leaf = error_of(trajectory(wrong), ref)
    assert (leaf.error, leaf.tolerance, leaf.passed) == (0.1, 0, False)

    def counting(state, batches):
        return trajectory(
            state[0], metrics=[[np.int32(np.sin(state[0][0] * np.float64(1e12)) * 100)]]
        )

    ref = reference(START, F32, BATCHES[:1], counting)
    shifted = counting([np.nextafter(START[0], np.float32(9))], BATCHES)
    report = compare(
        Trajectory(state=((ref.state[0],),), metrics=shifted.metrics), ref, ["x"], ["count"]
    )
    assert report.passed and report.noisy == ("count at step 1",)


def test_what_was_infinite_before_is_compared_by_its_value():
    """A best loss of inf, of which the first step makes a number: all of that is its change."""
    best = np.float32([0.2152111])
    ref = against(lambda state, batches: trajectory(best), [np.float32([np.inf])])
    assert error_of(trajectory(np.nextafter(best, np.float32(1))), ref).passed
    assert not error_of(trajectory(best * np.float32(1.01)), ref).passed


def test_a_number_in_place_of_an_infinity_is_wrong():
    start = [np.array([-np.inf, 1.0], np.float32)]
    ref = against(lambda state, batches: trajectory(state[0] + np.float32([0, 1])), start)
    assert not error_of(trajectory(np.float32([3, 2])), ref).passed


def test_infinities_that_were_there_before_are_no_failure():
    start = [np.array([np.inf, 1.0], np.float32)]
    ref = against(lambda state, batches: trajectory(state[0] + np.float32([0, 1])), start)
    assert error_of(trajectory(np.float32([np.inf, 2])), ref).passed
    failure = compare(trajectory(np.float32([np.nan, 2])), ref, ["state.x"], [])
    assert isinstance(failure, Failure) and failure.kind is Kind.NUMERICS
    assert failure.message == "state.x: 1 of 2 values are not finite"


def test_what_was_no_number_before_may_stay_so():
    """An evaluation that is yet to come, as NaN in the state."""
    start = [np.array([np.nan, 1.0], np.float32)]
    ref = against(lambda state, batches: trajectory(state[0] + np.float32([0, 1])), start)
    assert error_of(trajectory(np.float32([np.nan, 2])), ref).passed
    assert not error_of(trajectory(np.float32([np.nan, 9])), ref).passed
    failure = compare(trajectory(np.float32([np.nan, np.nan])), ref, ["state.x"], [])
    assert isinstance(failure, Failure)
    assert failure.message == "state.x: 1 of 2 values are not finite"
    nothing = [np.full(2, np.nan, np.float32)]
    ref = against(lambda state, batches: trajectory(state[0] + np.float32([0, 1])), nothing)
    failure = compare(trajectory(nothing[0]), ref, ["state.x"], [])
    assert isinstance(failure, Failure), "nothing of it could be compared"
    assert failure.message == "state.x: 2 of 2 values are not finite in the reference too"


def test_blowing_up_with_the_reference_is_a_failure_that_says_so():
    ref = against(lambda state, batches: trajectory(state[0] * np.float32(np.nan)))
    failure = compare(trajectory(START[0] * np.float32(np.nan)), ref, ["state.x"], [])
    assert failure.message == "state.x: 200 of 200 values are not finite in the reference too"


def test_metrics_are_compared_by_value_at_each_step():
    def run(state, batches):
        return trajectory(state[0], metrics=[[np.float32(2.0)], [np.float32(1.0)]])

    ref = against(run)
    got = trajectory(START[0], metrics=[[np.float32(2.0)], [np.float32(1.1)]])
    report = compare(got, ref, ["x"], ["loss"])
    assert [leaf.path for leaf in report.leaves if not leaf.passed] == ["loss at step 2"]
    assert report.worst.error == pytest.approx(0.1)
    assert "loss at step 2: error 0.1, tolerance 0.0001" in report.failure().message


@pytest.mark.parametrize(("floats", "most"), [({"f32"}, 2.4e-7), ({"f32", "bf16"}, 4e-3)])
def test_perturbing_moves_every_float_a_little_and_nothing_else(floats, most):
    values = [*START, np.arange(3), np.array([True]), np.float32(0), np.zeros((0, 2), np.float32)]
    moved = Perturbed([np.asarray(v) for v in values], frozenset(floats))
    relative = np.abs(moved[0] / START[0] - 1)
    assert relative.min() > 0 and most / 4 < relative.max() <= most
    for before, after in zip(values[1:], moved[1:], strict=True):
        np.testing.assert_array_equal(before, after)
    again = Perturbed([np.asarray(v) for v in values], frozenset(floats))
    np.testing.assert_array_equal(moved[0], again[0])


def test_products_in_tf32_round_more_than_those_of_f32_and_less_than_those_of_bf16():
    """Another order of summation of products with ten bits moves what they make by some 2^-11."""
    change = np.linspace(0.5, 1.0, 200).astype(np.float32)
    other = change * (1 + 2.0**-10 * np.random.default_rng(6).choice([-1, 1], 200))
    wrong = change * (1 + 2.0**-6 * np.random.default_rng(6).choice([-1, 1], 200))
    for floats, passed in (
        (("f32",), (False, False)),
        (("f32", "tf32"), (True, False)),
        (("f32", "bf16"), (True, True)),
    ):
        ref = against(adding(change), [np.zeros(200, np.float32)], frozenset(floats))
        moved = [error_of(trajectory(by.astype(np.float32)), ref).passed for by in (other, wrong)]
        assert tuple(moved) == passed, floats


def test_a_large_leaf_is_judged_as_its_parts_together():
    """Of pieces that threads read: one wrong element among many is found, and its size is right."""
    size = 3 * PIECE + 5
    start = [np.random.default_rng(7).normal(size=size).astype(np.float32)]
    change = np.full(size, 0.5, np.float32)
    ref = against(adding(change), start)
    right = start[0] + change
    assert error_of(trajectory(right), ref).error == 0
    with np.errstate(over="raise"):  # a sum past all numbers is no error
        far = error_of(trajectory(start[0].astype(float) + 4e151), against(adding(0.5), start))
    assert not far.passed
    for place in (0, PIECE, size - 1):
        moved = right.copy()
        moved[place] += 64
        leaf = error_of(trajectory(moved), ref)
        assert not leaf.passed
        assert leaf.error == pytest.approx(64 / (0.5 * np.sqrt(size)), rel=0.05)
        moved[place] = np.nan
        broken = compare(trajectory(moved), ref, ["state.x"], [])
        assert isinstance(broken, Failure) and f"1 of {size} values" in broken.message


class ReadLate(Sequence):
    """A last state that is made leaf by leaf as it is read, as from devices."""

    def __init__(self, start, change):
        self.start, self.change = start, change

    def __len__(self):
        return len(self.start)

    def __getitem__(self, index):
        return (self.start[index] + np.float32(self.change),)


def many_leaves(count=30):
    return [
        np.random.default_rng(k).normal(size=2 * PIECE).astype(np.float32) for k in range(count)
    ]


def test_the_host_holds_two_states_beside_the_initial_one():
    start = many_leaves()
    total = sum(leaf.nbytes for leaf in start)
    tracemalloc.start()
    try:
        reference(start, F32, BATCHES, lambda s, _: Trajectory(state=ReadLate(s, 0.5), metrics=()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 2 * total < peak < 2.9 * total  # pieces in double precision come on top


@pytest.mark.parametrize("kept", [1.4, 1.8])
def test_with_less_room_the_reference_runs_more_often_and_allows_the_same(kept):
    start = many_leaves(8)
    start[3] = np.arange(4)
    total = sum(leaf.nbytes for leaf in start)
    runs = []

    def run(state, batches):
        runs.append(1)
        return Trajectory(state=ReadLate(state, 0.5), metrics=())

    whole = reference(start, F32, BATCHES, run)
    assert len(runs) == 4
    reserved = 4 * start[0].nbytes
    parted = reference(start, F32, BATCHES, run, room_bytes=int(kept * total) + reserved)
    assert len(runs) > 4 + 4
    assert parted.state_slack == whole.state_slack
    for a, b in zip(parted.state, whole.state, strict=True):
        np.testing.assert_array_equal(a, b)


def test_leaves_without_room_are_named_and_the_others_are_compared():
    start = [np.ones(n, np.float32) for n in (1000, 8, 2000, 16)]
    paths = ["large", "a", "larger", "b"]
    change = [np.full(x.size, 1e-3, np.float32) for x in start]

    def run(state, batches):
        return trajectory(*(x + d for x, d in zip(state, change, strict=True)))

    ref = reference(start, F32, BATCHES, run, room_bytes=3000)
    moved = [x + d for x, d in zip(start, change, strict=True)]
    report = compare(trajectory(*moved), ref, paths, [])
    assert report.unchecked == ("large", "larger")
    assert [leaf.path for leaf in report.state] == ["a", "b"] and report.passed
    wrong = [*moved[:3], moved[3] + 1]
    assert not compare(trajectory(*wrong), ref, paths, []).passed
    none = compare(trajectory(*moved), reference(start, F32, BATCHES, run, 0), paths, [])
    assert none.unchecked == tuple(paths) and none.state == ()


def test_the_worst_leaf_is_the_one_nearest_to_what_it_is_allowed():
    coarse = LeafError(path="coarse", error=7e-3, tolerance=3e-2)
    fine = LeafError(path="fine", error=9e-5, tolerance=1e-4)
    equal = LeafError(path="equal", error=0.0, tolerance=0.0)
    counted = LeafError(path="counted", error=0.1, tolerance=0.0)
    assert NumericsReport(steps=2, state=(coarse, fine, equal), metrics=()).worst is fine
    assert NumericsReport(steps=2, state=(coarse, equal), metrics=(counted,)).worst is counted
    assert NumericsReport(steps=2, state=(), metrics=()).worst is None
