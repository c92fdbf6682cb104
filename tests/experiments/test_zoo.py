"""The table of cases: the shrink rule and its cost, published sizes, batches, optimizers."""

import dataclasses
import functools
import math
import operator

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies

from experiments.zoo.cases import CASES, RECIPES, SCALES, SHRUNK, case, of_size
from experiments.zoo.published import PUBLISHED, Published, Size
from experiments.zoo.shrink import (
    LEAST_BATCH,
    LEAST_FACTOR,
    LIMIT_FLOP,
    choose,
    jaxpr_flop,
    shrunk,
    smaller,
    step_flop,
)
from models.decoder import LLAMA3_8B
from models.mlp import MLPConfig
from tests.compiled import compiled

# Of many layers, none of them scanned: longest to trace.
LONG = ("resnet152", "unet")
each_case = pytest.mark.parametrize("name", CASES)
each_case_traced = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in CASES]
)


def flop_of(function, *args):
    return jaxpr_flop(jax.make_jaxpr(function)(*args).jaxpr)


def test_matmuls_are_counted_once_for_each_round_of_a_loop():
    x, w = jnp.zeros((4, 8)), jnp.zeros((8, 8))
    assert flop_of(lambda: x @ w) == 2 * 4 * 8 * 8

    def loop(x):
        return jax.lax.scan(lambda x, _: (jax.jit(operator.matmul)(x, w), None), x, length=5)[0]

    assert flop_of(loop, x) == 5 * 2 * 4 * 8 * 8
    either = functools.partial(jax.lax.cond, True, lambda: x @ w, lambda: x @ w @ w)
    assert flop_of(either) == 2 * 2 * 4 * 8 * 8
    batched = jnp.zeros((3, 4, 8)), jnp.zeros((3, 8, 5))
    assert flop_of(operator.matmul, *batched) == 2 * 3 * 4 * 8 * 5
    assert flop_of(jnp.sin, x) == 0


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_costs_as_much_as_each_of_its_gradients(stride):
    x_BHWC, kernel = jnp.zeros((2, 8, 8, 3)), jnp.zeros((1, 1, 3, 5))

    def convolve(x_BHWC, kernel):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x_BHWC, kernel, (stride, stride), "VALID", dimension_numbers=dimensions
        )

    once = 2 * 2 * (8 // stride) ** 2 * 3 * 5
    assert flop_of(convolve, x_BHWC, kernel) == once

    def gradients(x_BHWC, kernel):
        y, pullback = jax.vjp(convolve, x_BHWC, kernel)
        return pullback(y)

    assert flop_of(gradients, x_BHWC, kernel) == 3 * once


@hypothesis.given(
    value=strategies.integers(1, 64) | strategies.integers(1, 10**6),
    kind=strategies.sampled_from(["width", "depth", "extent", "rows"]),
    multiple=strategies.sampled_from([1, 3, 12, 32]),
    least=strategies.integers(1, 300),
    factor=strategies.sampled_from([1, 4, 8, 16, 32, 64]),
)
def test_the_rule_of_one_number(value, kind, multiple, least, factor):
    few = smaller(value, Size(kind=kind, multiple=multiple, least=least), factor)
    if kind == "depth":
        assert few == max(math.ceil(value / factor), min(2, value))
        return
    wanted = max(math.ceil(value / (factor**2 if kind == "rows" else factor)), least)
    shared = math.gcd(value, 8)
    if kind == "rows":
        shared = 8 if wanted >= 8 else 1
    assert few % multiple == few % shared == 0
    assert 0 <= few - wanted < math.lcm(multiple, shared)


@each_case
@pytest.mark.parametrize("factor", [4, 16])
def test_sizes_shrink_by_the_rule_and_structure_stays(name, factor):
    published = PUBLISHED[name]
    before, after = leaves(published.config), leaves(shrunk(published, factor))
    assert before.keys() == after.keys()
    for field, old in before.items():
        size, new = published.sizes.get(field), after[field]
        if field == "dtype":
            assert new == "float32"
        elif size is None:
            assert new == old, field
        elif size.share_of:
            assert new * before[size.share_of] == old * after[size.share_of]
        elif isinstance(old, tuple):
            assert new == tuple(smaller(x, size, factor) for x in old)
        else:
            assert new == smaller(old, size, factor)
    assert published.sizes.keys() <= before.keys()


def leaves(config, prefix=""):
    """Field -> value; `a.b` where a field holds a dataclass itself."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        found |= leaves(value, f"{field.name}.") if nested else {prefix + field.name: value}
    return found


def test_a_share_that_is_no_whole_number_is_refused():
    published = dataclasses.replace(
        PUBLISHED["decoder"], config=dataclasses.replace(LLAMA3_8B, query_block=8)
    )
    with pytest.raises(ValueError, match="query_block=8 is no whole share of sequence=8192"):
        shrunk(published, 128)


def test_the_factor_is_the_smallest_and_the_batch_the_largest():
    published = Published(
        config=MLPConfig(width=4096, layers=8),
        batch_size=100,
        source="",
        sizes={"width": Size(kind="width")},
    )

    def flop(config, examples):
        return config.width**2 * examples * 250.0

    # At a factor of 4, 8 examples cost 2.1 GFLOP; eight times that is too much.
    assert choose(published, flop) == (4, 32)
    assert choose(published, lambda *size: 8 * flop(*size)) == (8, 16)
    assert choose(published, lambda *size: flop(*size) / 100) == (4, 64)
    with pytest.raises(ValueError, match="gets no smaller"):
        choose(published, lambda config, examples: 1e12)


@each_case_traced
def test_recorded_factors_and_batches_are_those_of_the_rule(name):
    published, (factor, batch_size) = PUBLISHED[name], SHRUNK[name]

    def flop(factor, examples):
        return step_flop(of_size(name, shrunk(published, factor), examples).workload())

    assert flop(factor, batch_size) <= LIMIT_FLOP
    assert LEAST_BATCH <= batch_size <= published.batch_size
    assert 2 * batch_size > published.batch_size or flop(factor, 2 * batch_size) > LIMIT_FLOP
    assert factor == LEAST_FACTOR or flop(factor // 2, LEAST_BATCH) > LIMIT_FLOP


@pytest.mark.parametrize(
    ("name", "count", "relative"),
    [
        ("mlp", 18 * 1025 * 1024, 0),
        ("decoder", 8_030_261_248, 0),
        ("encoder_decoder", 247_577_856, 0),
        ("vit", 86_567_656, 0),
        ("resnet50", 25_557_032, 0),
        pytest.param("resnet152", 60_192_808, 0, marks=pytest.mark.slow),
        ("moe", 46_702_792_704, 0),
        pytest.param("unet", 35_746_307, 0, marks=pytest.mark.slow),
        ("state_space", 129_135_360, 0),
        ("recurrent", 57e6, 0.01),
        ("recommender", 540e6, 2e-3),
        # 12,390,715 on the benchmark's leaderboard. Its encoder of kinds, names and depths and its
        # five heads, one for each word of a function's name, are not ours.
        ("graph_network", 12_390_715 - 10_149 * 300 - 5 * 301 * 5002 + 160 * 601, 0),
        ("clip", 151_277_313, 0),
        ("linen_vit", 86_567_656, 0),
        ("linen_resnet", 25_557_032, 0),
        ("linen_recurrent", 57e6, 0.01),
        ("plain_gpt", 6_658_596_864, 0),
    ],
)
def test_published_cases_have_the_published_number_of_parameters(name, count, relative):
    state = jax.eval_shape(case(name, "published").workload().init)
    found = sum(math.prod(x.shape) for x in jax.tree.leaves(getattr(state, "params", state)))
    assert found == pytest.approx(count, rel=relative, abs=0)


@each_case
def test_batches_have_the_shapes_that_are_announced(name):
    for scale in ("small", "shrunk"):
        chosen = case(name, scale)
        announced, batch = chosen.batch(), chosen.sample(0)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), announced) == jax.tree.map(
            lambda x: (x.shape, x.dtype), batch
        )
        for path, leaf in jax.tree.leaves_with_path(batch):
            # Else jax cuts it down as it takes it, from 0.11 with a warning.
            kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
            assert leaf.dtype == kept, jax.tree_util.keystr(path)
        again, other = chosen.sample(0), chosen.sample(1)
        assert all(map(np.array_equal, *map(jax.tree.leaves, (batch, again))))
        assert not all(map(np.array_equal, *map(jax.tree.leaves, (batch, other))))
    workload = case(name, "small").workload()
    drawn = workload.sample(jax.random.key(3))
    assert jax.tree.map(np.shape, drawn) == jax.tree.map(np.shape, workload.batch)


def test_the_tables_name_the_same_cases():
    assert set(RECIPES) == set(PUBLISHED) == set(SHRUNK) == set(CASES)
    kinds = [case(name, "small").kind for name in CASES]
    assert (kinds.count("linen"), kinds.count("plain")) == (3, 1)


def test_adafactors_moments_are_factored():
    chosen = case("encoder_decoder", "shrunk")
    state = jax.eval_shape(chosen.workload().init)
    params, moments = (
        sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
        for tree in (state.params, state.opt_state)
    )
    assert moments < params / 4


def test_a_plain_case_does_what_its_optimizer_says():
    config = dataclasses.replace(case("plain_gpt", "small").config, learning_rate=0.3)
    chosen = of_size("plain_gpt", config, 8)
    params, batch = compiled(chosen.make_model)(), chosen.sample(0)
    found, metrics = compiled(chosen.step, params, batch)(params, batch)

    def by_optimizer(params, batch):
        value, gradients = jax.value_and_grad(chosen.loss)(params, batch)
        updates, _ = chosen.optimizer.update(gradients, chosen.optimizer.init(params), params)
        return optax.apply_updates(params, updates), value

    expected, value = compiled(by_optimizer, params, batch)(params, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_what_is_not_in_the_table_is_refused():
    with pytest.raises(ValueError, match=r"unknown case 'gpt': expected one of \['mlp'"):
        case("gpt", "small")
    with pytest.raises(ValueError, match="unknown scale 'tiny': expected one of"):
        case("mlp", "tiny")
    assert SCALES == ("small", "shrunk", "published")
