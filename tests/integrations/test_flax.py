"""Workloads made from Flax modules: traceable, stable over steps, and right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from autoshard.errors import WorkloadError
from autoshard.integrations import flax as flax_file
from autoshard.integrations.flax import linen_variables, linen_workload, nnx_model, nnx_workload

BATCH = {
    "x": jax.ShapeDtypeStruct((16, 4), jnp.float32),
    "y": jax.ShapeDtypeStruct((16, 2), jnp.float32),
}


class Plain(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.up = nnx.Linear(4, 8, rngs=rngs, kernel_init=kernel_init)
        self.down = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class Stateful(nnx.Module):
    """Batch norm, dropout and a Variable that appears in the forward pass."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        self.hidden = nnx.Intermediate(x)
        return self.out(self.dropout(self.norm(x)))


class LinenStateful(linen.Module):
    """Logical names on the first kernel, batch norm and dropout."""

    @linen.compact
    def __call__(self, x, train=True):
        names = ("embed", "mlp")
        init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), names)
        x = linen.Dense(8, kernel_init=init, name="up")(x)
        x = linen.BatchNorm(use_running_average=not train, name="norm")(x)
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(2, name="down")(x)


def squared_error(model, batch):
    error = model(batch["x"]) - batch["y"]
    return jnp.mean(error**2), {"max_error": jnp.max(jnp.abs(error))}


def real_batch(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((16, 4)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :2])}


def plain(accumulate=1):
    return nnx_workload(Plain, squared_error, optax.adam(1e-2), BATCH, accumulate=accumulate)


def stateful(accumulate=1):
    return nnx_workload(Stateful, squared_error, optax.adam(1e-2), BATCH, accumulate=accumulate)


def linen_stateful(accumulate=1):
    return linen_workload(
        LinenStateful(),
        squared_error,
        optax.adam(1e-2),
        BATCH,
        inputs=lambda batch: (batch["x"],),
        rngs=("dropout",),
        accumulate=accumulate,
    )


ALL = pytest.mark.parametrize("make", [plain, stateful, linen_stateful])


def describe(tree):
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@ALL
@pytest.mark.parametrize("accumulate", [1, 4])
def test_new_state_has_the_structure_of_the_old(make, accumulate):
    workload = make(accumulate)
    state = jax.eval_shape(workload.init)
    new_state, metrics = jax.eval_shape(workload.step, state, workload.batch)
    assert describe(new_state) == describe(state)
    assert set(metrics) == {"loss", "max_error"}
    assert all(metric.shape == () for metric in metrics.values())


@ALL
def test_init_and_step_allocate_nothing_when_traced(make):
    before = len(jax.live_arrays())
    workload = make()
    jax.make_jaxpr(workload.step)(jax.eval_shape(workload.init), workload.batch)
    assert len(jax.live_arrays()) == before


@ALL
def test_loss_falls(make):
    workload = make()
    step = jax.jit(workload.step)
    state, losses = workload.init(), []
    for _ in range(60):
        state, metrics = step(state, real_batch())
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    assert int(state.step) == 60


def test_each_part_is_every_so_many_th_example_and_state_goes_from_part_to_part():
    """So that a part has examples of every device, and nothing is exchanged."""

    def gradient(params, seen, part):
        here = jnp.concatenate([seen[1:], part[None]])
        return jnp.zeros(()), here, {"first": part[0]}

    state = flax_file.TrainState(
        step=0, params=jnp.zeros(()), extra=jnp.zeros((4, 3)), opt_state=()
    )
    _, parts, metrics = flax_file._accumulated(gradient, 4, state, jnp.arange(12.0))
    np.testing.assert_array_equal(parts, np.arange(12.0).reshape(3, 4).T)
    assert metrics["first"] == np.mean([0, 1, 2, 3])


class Remade(nnx.Module):
    """Flax's transforms write parameters back, and mixed precision in place casts them."""

    def __init__(self):
        self.a = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        hidden = nnx.remat(lambda layer, x: layer(x))(self.a, x)
        narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), nnx.state(self.b, nnx.Param))
        nnx.update(self.b, narrow)
        return nnx.jit(lambda layer, x: layer(x))(self.b, hidden).astype(jnp.float32)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_loss_makes_of_parameters_is_for_its_call_alone(accumulate):
    workload = nnx_workload(Remade, squared_error, optax.sgd(0.1), BATCH, accumulate=accumulate)
    before = workload.init()
    after, _ = jax.jit(workload.step)(before, real_batch())
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and x.shape == y.shape, before, after)
    assert all(jax.tree.leaves(same))
    assert not np.allclose(before.params["a"]["kernel"], after.params["a"]["kernel"])


def test_parts_are_added_in_float32_where_parameters_are_narrower():
    """Of 512 parts that add a thousandth each, half would be lost in bfloat16."""
    added = jnp.asarray(1e-3, jnp.bfloat16)

    def gradient(params, extra, part):
        return added, extra, {"loss": jnp.mean(part)}

    state = flax_file.TrainState(step=0, params=jnp.zeros((), jnp.bfloat16), extra=(), opt_state=())
    mean, _, _ = flax_file._accumulated(gradient, 512, state, jnp.ones(512))
    assert mean.dtype == jnp.bfloat16 and mean == added
    wide = {flax_file._wide(jnp.dtype(t)) for t in ("float16", "bfloat16", "float8_e4m3fn")}
    assert wide == {jnp.float32} and flax_file._wide(jnp.dtype("float64")) == "float64"


@pytest.mark.parametrize(
    ("said", "match"), [({"mutable": True}, "mutable"), ({"rngs": {}}, "rngs")]
)
def test_what_apply_is_given_by_itself_is_said(said, match):
    def loss(apply, batch):
        return jnp.mean(apply(batch["x"], **said)), {}

    workload = linen_workload(
        linen.Dense(4), loss, optax.sgd(0.1), BATCH, inputs=lambda batch: (batch["x"],)
    )
    with pytest.raises(WorkloadError, match=f"apply got {match}.*linen_workload"):
        jax.eval_shape(workload.step, jax.eval_shape(workload.init), BATCH)


def test_apply_with_nothing_mutable_gives_the_output_alone():
    def loss(apply, batch):
        return jnp.mean(apply(batch["x"], mutable=False)), {}

    workload = linen_workload(
        linen.Dense(4), loss, optax.sgd(0.1), BATCH, inputs=lambda batch: (batch["x"],)
    )
    jax.eval_shape(workload.step, jax.eval_shape(workload.init), BATCH)


def test_accumulation_equals_no_accumulation():
    states, all_metrics = [], []
    for accumulate in (1, 4):
        workload = plain(accumulate)
        state, metrics = jax.jit(workload.step)(workload.init(), real_batch())
        states.append(state)
        all_metrics.append(metrics)
    np.testing.assert_allclose(all_metrics[0]["loss"], all_metrics[1]["loss"], rtol=2e-5)
    assert all_metrics[0]["max_error"] > all_metrics[1]["max_error"] > 0, "the mean of four maxima"
    # The moments are linear in the gradient; the parameters hide its size behind adam.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8),
        states[0].opt_state,
        states[1].opt_state,
    )


@pytest.mark.parametrize("accumulate", [1, 4])
def test_batch_norm_and_dropout_states_advance(accumulate):
    for make in (stateful, linen_stateful):
        workload = make(accumulate)
        old = workload.init()
        new, _ = jax.jit(workload.step)(old, real_batch())
        unchanged = [
            jax.tree_util.keystr(path)
            for (path, a), b in zip(
                jax.tree_util.tree_leaves_with_path(old.extra),
                jax.tree.leaves(new.extra),
                strict=True,
            )
            if np.array_equal(_raw(a), _raw(b))
        ]
        # NNX keeps the dropout key and advances its count; everything else must have moved.
        assert unchanged in ([], ["['dropout']['rngs']['key']"])


class Sowing(linen.Module):
    """A loss of its own for the load of its experts, sown as mixtures of experts do."""

    @linen.compact
    def __call__(self, x):
        y = linen.Dense(2, name="out")(x)
        self.sow("losses", "load", jnp.mean(y**2))
        return y


def sowing(accumulate=1, asked="losses"):
    def loss(apply, batch):
        y, held = apply(batch["x"], mutable=asked)
        (load,) = held["losses"]["load"]
        return jnp.mean((y - batch["y"]) ** 2) + load, {"load": load}

    return linen_workload(
        Sowing(),
        loss,
        optax.sgd(0.1),
        BATCH,
        inputs=lambda batch: (batch["x"],),
        accumulate=accumulate,
    )


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("asked", ["losses", ["losses"]])
def test_what_a_module_sows_is_no_state_and_can_be_read(accumulate, asked):
    workload = sowing(accumulate, asked)
    state = workload.init()
    assert state.extra == {"collections": {}}
    step = jax.jit(workload.step)
    loads = []
    for _ in range(20):
        state, metrics = step(state, real_batch())
        loads.append(float(metrics["load"]))
    assert 0 < loads[-1] < loads[0]
    shapes = jax.eval_shape(workload.step, state, workload.batch)[0]
    assert describe(shapes) == describe(state)
    variables = linen_variables(state, Sowing(), BATCH, inputs=lambda batch: (batch["x"],))
    assert set(variables) == {"params"}


def test_each_call_sees_what_the_one_before_it_changed():
    module = LinenStateful()

    def loss(apply, batch):
        first = apply(batch["x"])
        second = apply(2.0 * batch["x"])
        return jnp.mean(first**2) + jnp.mean(second**2), {}

    workload = linen_workload(
        module,
        loss,
        optax.sgd(0.0),
        BATCH,
        inputs=lambda batch: (batch["x"],),
        rngs=("dropout",),
    )
    state = workload.init()
    new, _ = workload.step(state, real_batch())
    variables = {"params": state.params, **state.extra["collections"]}
    for x in (real_batch()["x"], 2.0 * real_batch()["x"]):
        _, changed = module.apply(
            variables, x, rngs={"dropout": jax.random.key(0)}, mutable=["batch_stats"]
        )
        variables = variables | changed
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        new.extra["collections"]["batch_stats"],
        variables["batch_stats"],
    )


@pytest.mark.parametrize(
    ("said", "names"),
    [
        (P("embed", None), ("embed", None)),
        (NamedSharding(AbstractMesh((2,), ("x",)), P("x", None)), ("x", None)),
        (SingleDeviceSharding(jax.devices()[0]), None),
    ],
)
def test_a_variable_may_say_its_sharding_in_many_ways(said, names):
    class Said(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((4, 2)), out_sharding=said)

    def loss(model, batch):
        return jnp.mean((batch["x"] @ model.w[...] - batch["y"]) ** 2), {}

    workload = nnx_workload(Said, loss, optax.sgd(0.1), BATCH)
    assert workload.axis_names == ({".params['w']": names} if names else {})


def test_axis_names_reach_parameters_and_moments():
    names = ("embed", "mlp")
    assert plain().axis_names == {
        ".params['up']['kernel']": names,
        ".opt_state[0].mu['up']['kernel']": names,
        ".opt_state[0].nu['up']['kernel']": names,
    }
    assert linen_stateful().axis_names == plain().axis_names
    assert stateful().axis_names == {}


@pytest.mark.parametrize("layers", [None, "layers"])
def test_stacked_layers_have_names_where_flax_says_which_dimension_is_the_layers(layers):
    def kernel(*names):
        return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 16, use_bias=False, kernel_init=kernel("a", "b"), rngs=rngs)

    class Stacked(nnx.Module):
        def __init__(self):
            said = {"transform_metadata": {nnx.PARTITION_NAME: layers}} if layers else {}
            make = nnx.split_rngs(splits=3)(nnx.vmap(Block, **said))
            self.layers = make(nnx.Rngs(0))

    def loss(model, batch):
        return jnp.mean(batch["x"]) * jnp.sum(model.layers.up.kernel[...]), {}

    workload = nnx_workload(Stacked, loss, optax.sgd(0.1, momentum=0.9), BATCH)
    found = set(workload.axis_names.values())
    assert found == ({("layers", "a", "b")} if layers else set())


def test_axis_names_are_paths_of_the_state():
    for make in (plain, linen_stateful):
        workload = make()
        leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(workload.init))
        assert set(workload.axis_names) <= {jax.tree_util.keystr(path) for path, _ in leaves}


def test_nnx_model_has_the_trained_arrays_and_the_metadata():
    workload = plain()
    state, metrics = jax.jit(workload.step)(workload.init(), real_batch())
    model = nnx_model(state, Plain)
    assert model.up.kernel.get_metadata()["out_sharding"] == ("embed", "mlp")
    np.testing.assert_array_equal(model.up.kernel[...], state.params["up"]["kernel"])
    value, _ = squared_error(model, real_batch())
    assert value < metrics["loss"]


def test_linen_variables_are_boxed_again():
    workload = linen_stateful()
    state = workload.init()
    variables = linen_variables(
        state,
        LinenStateful(),
        BATCH,
        inputs=lambda batch: (batch["x"],),
        rngs=("dropout",),
    )
    kernel = variables["params"]["up"]["kernel"]
    assert isinstance(kernel, linen.LogicallyPartitioned)
    np.testing.assert_array_equal(kernel.value, state.params["up"]["kernel"])
    output = LinenStateful().apply(variables, real_batch()["x"], train=False)
    assert output.shape == (16, 2)


def test_linen_module_without_state_or_keys():
    workload = linen_workload(
        linen.Dense(2),
        squared_error,
        optax.sgd(0.1),
        BATCH,
        inputs=lambda batch: (batch["x"],),
    )
    state = jax.eval_shape(workload.init)
    assert describe(workload_step_state(workload, state)) == describe(state)
    assert state.extra == {"collections": {}}


def test_accumulate_must_divide_the_batch():
    with pytest.raises(WorkloadError, match=r"accumulate=3 .* shape \(16, 4\) at batch\['x'\]"):
        plain(accumulate=3)
    with pytest.raises(WorkloadError, match="at least 1, got 0"):
        plain(accumulate=0)


def test_make_model_must_return_a_module():
    with pytest.raises(WorkloadError, match="got dict"):
        nnx_workload(dict, squared_error, optax.sgd(0.1), BATCH)


def workload_step_state(workload, state):
    return jax.eval_shape(workload.step, state, workload.batch)[0]


def _raw(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


class Tabled(nnx.Module):
    """Plain arrays beside Variables: a table of JAX's, a mask of NumPy's."""

    def __init__(self, kept=nnx.data):
        self.table = kept(jnp.arange(4.0))
        self.mask = np.array([1.0, 1.0, 0.0, 1.0], np.float32)
        self.out = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.out(x * self.table * self.mask)


def test_plain_arrays_of_a_module_are_carried_along():
    workload = nnx_workload(Tabled, squared_error, optax.sgd(0.1), BATCH)
    state = workload.init()
    batch = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), BATCH)
    new, metrics = jax.jit(workload.step)(state, batch)
    np.testing.assert_array_equal(new.extra["table"], np.arange(4.0))
    np.testing.assert_array_equal(new.extra["mask"], [1, 1, 0, 1])
    assert jnp.isfinite(metrics["loss"])
    with pytest.raises(WorkloadError, match="table of Tabled: got a plain array"):
        nnx_workload(lambda: Tabled(lambda x: x), squared_error, optax.sgd(0.1), BATCH)


def test_one_random_key_may_be_named_by_itself():
    def made(rngs):
        return linen_workload(
            LinenStateful(),
            squared_error,
            optax.sgd(0.1),
            BATCH,
            inputs=lambda batch: (batch["x"],),
            rngs=rngs,
        )

    alone, several = (jax.eval_shape(made(rngs).init) for rngs in ("dropout", ("dropout",)))
    assert jax.tree.structure(alone) == jax.tree.structure(several)
    assert list(alone.extra["rngs"]) == ["dropout"]
