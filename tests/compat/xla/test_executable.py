import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compat.xla.executable import (
    compile_module,
    compile_options,
    float_types,
    has_host_callback,
)
from autoshard.records.module import Module
from tests import lowered

MESH = (("a", 4), ("b", 2))
DATA = (("data", 8),)


def odd_leaves() -> tuple[dict, dict]:
    """One state leaf of each awkward kind, and the sharding of each."""
    rng = np.random.default_rng(0)
    live = lowered.make_mesh(MESH)
    leaves = {
        "bf16": (rng.normal(size=(16, 3)).astype(jnp.bfloat16), P(("a", "b"))),
        "bool": (rng.integers(0, 2, 8).astype(bool), P("a")),
        "complex": (np.array([1 + 2j, 3 - 1j], np.complex64), P("b")),
        "empty": (np.zeros((0, 4), np.float32), P()),
        "f32": (rng.normal(size=(8, 4)).astype(np.float32), P("a", "b")),
        "key": (np.array([1, 2], np.uint32), P()),
        "scalar": (np.array(3, np.int32), P()),
        "transposed": (rng.normal(size=(8, 4)).astype(np.float32), P("b", "a")),
    }
    values = {name: value for name, (value, _) in leaves.items()}
    return values, {name: NamedSharding(live, spec) for name, (_, spec) in leaves.items()}


def odd_step(state: dict, x: jax.Array) -> tuple[dict, dict]:
    new = {
        "bf16": state["bf16"] * 2,
        "bool": ~state["bool"],
        "complex": state["complex"] * 1j,
        "empty": state["empty"],
        "f32": state["f32"] + x.sum(),
        "key": state["key"] + jnp.uint32(1),
        "scalar": state["scalar"] + 1,
        "transposed": state["transposed"] @ jnp.ones((4, 4), jnp.float32),
    }
    return new, {"sum": new["f32"].sum()}


@pytest.fixture(scope="module")
def odd() -> tuple[Module, list[np.ndarray]]:
    state, shardings = odd_leaves()
    x = np.arange(8, dtype=np.float32)
    over = NamedSharding(lowered.make_mesh(MESH), P("a"))
    module = lowered.lower(odd_step, (state, x), (shardings, over), MESH, len(state))
    return module, [*jax.tree.leaves(state), x]


def test_run_equals_jit_for_every_kind_of_leaf(odd):
    module, values = odd
    executable = compile_module(module, jax.devices())
    outputs = executable.run(executable.place(values))
    expected = jax.tree.leaves(jax.jit(odd_step)(odd_leaves()[0], values[-1]))
    assert len(outputs) == len(expected)
    for got, want, spec in zip(outputs, expected, module.outputs, strict=True):
        assert got.dtype == want.dtype == np.dtype(spec.dtype), spec.path
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-6, err_msg=spec.path)
    assert outputs[4].sharding == NamedSharding(lowered.make_mesh(MESH), P("a", "b"))


def test_state_chains_and_donated_inputs_are_consumed(odd):
    module, values = odd
    executable = compile_module(module, jax.devices())
    arrays = executable.place(values)
    batch = arrays[-1]
    state = arrays[:-1]
    for _ in range(3):  # the first run checks shapes, later ones take the fast path
        old, state = state, executable.run([*state, batch])[: module.state_count]
        assert all(array.is_deleted() for array in old if array.size)
    assert not batch.is_deleted()
    assert int(state[6]) == 6
    np.testing.assert_allclose(np.asarray(state[4]), values[4] + 3 * 28, rtol=1e-6)
    assert values[6] == 3, "donation must not reach the host values"


def test_place_keeps_64_bit_values():
    with jax.enable_x64(True):
        state = {"f64": np.array([1 + 1e-12]), "i64": np.array([2**40])}
        shardings = NamedSharding(lowered.make_mesh(lowered.ONE), P())
        module = lowered.lower(
            lambda s: (jax.tree.map(lambda a: a + 1, s), {}), (state,), (shardings,), lowered.ONE, 2
        )
    executable = compile_module(module, jax.devices()[:1])
    for _ in range(2):
        f64, i64 = executable.run(executable.place([state["f64"], state["i64"]]))
        assert f64.dtype == np.float64 and np.asarray(f64)[0] == 2 + 1e-12
        assert i64.dtype == np.int64 and np.asarray(i64)[0] == 2**40 + 1


def test_placed_arrays_have_memory_of_their_own():
    raw = np.zeros(4 * 4096 + 64, np.uint8)
    start = -raw.ctypes.data % 64  # aligned, so that the CPU client could keep it
    value = raw[start : start + 4 * 4096].view(np.float32)
    sharding = NamedSharding(lowered.make_mesh(DATA), P())
    module = lowered.lower(lambda s: (s + 1, {}), (value,), (sharding,), DATA, 1)
    (array,) = compile_module(module, jax.devices()).place([value])
    value[:] = 7
    np.testing.assert_array_equal(np.asarray(array), np.zeros(4096))


def test_memory_and_hlo_are_those_of_jit():
    over = NamedSharding(lowered.make_mesh(DATA), P("data"))

    def step(state, x):
        return state + (x @ state.T).T @ x, {}

    args = (np.zeros((64, 32), np.float32), np.ones((64, 32), np.float32))
    module = lowered.lower(step, args, (over, over), DATA, 1)
    executable = compile_module(module, jax.devices())
    jitted = jax.jit(step, in_shardings=over, out_shardings=(over, {}), donate_argnums=0)
    stats = jitted.lower(*args).compile().memory_analysis()
    memory = executable.memory
    assert memory.arguments_bytes == stats.argument_size_in_bytes == 2 * 64 * 32 * 4 // 8
    assert memory.aliased_bytes == stats.alias_size_in_bytes == 64 * 32 * 4 // 8
    assert memory.temporaries_bytes == stats.temp_size_in_bytes > 0
    assert memory.outputs_bytes == stats.output_size_in_bytes
    assert memory.peak_bytes >= memory.arguments_bytes + memory.temporaries_bytes
    assert "all-gather" in executable.hlo_text or "all-reduce" in executable.hlo_text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: [v[0].astype(np.float32), *v[1:]], r"state\['bf16'\]: got float32"),
        (lambda v: [*v[:4], v[4][:4], *v[5:]], r"state\['f32'\]: got float32\[4, 4\], expected"),
        (lambda v: [*v, v[-1]], "got 10 values from input 0 on, expected at most 9"),
    ],
)
def test_place_refuses_what_does_not_fit(odd, change, message):
    module, values = odd
    with pytest.raises(ValueError, match=message):
        compile_module(module, jax.devices()).place(change(values))


def test_run_refuses_arrays_that_lie_elsewhere(odd):
    module, values = odd
    executable = compile_module(module, jax.devices())
    arrays = executable.place(values)
    arrays[4] = jax.device_put(values[4], NamedSharding(lowered.make_mesh(MESH), P()))
    with pytest.raises(ValueError, match=r"state\['f32'\]: got NamedSharding"):
        executable.run(arrays)
    with pytest.raises(ValueError, match="got 8 arrays, expected 9"):
        executable.run(arrays[:-1])


def test_compile_refuses_a_wrong_number_of_devices(odd):
    with pytest.raises(ValueError, match="got 4 devices, expected 8"):
        compile_module(odd[0], jax.devices()[:4])


def test_float_types_are_those_inside_the_program(odd):
    assert float_types(odd[0]) == {"bf16", "f32"}
    assert float_types(lowered.train_module(step=lowered.make_step(dtype=jnp.float16))) == {
        "f16",
        "f32",
    }


@pytest.mark.parametrize(
    ("platform", "asked", "cut"),
    [
        ("cpu", "default", set()),
        ("cuda", "default", {"tf32"}),
        ("cuda", "high", {"tf32"}),
        ("cuda", "highest", set()),
        ("tpu", "default", {"bf16"}),
        ("tpu", "highest", set()),
        ("tpu", "BF16_BF16_F32", {"bf16"}),
        ("tpu", "BF16_BF16_F32_X3", set()),
        ("cuda", "TF32_TF32_F32", {"tf32"}),
        ("cuda", "F32_F32_F32", set()),
    ],
)
@pytest.mark.parametrize("kind", ["dot", "complex", "convolution", "ragged"])
def test_products_compute_in_what_their_platform_cuts_f32_to(platform, asked, cut, kind):
    if asked.isupper() and kind != "dot":
        pytest.skip("these have no dot algorithm")
    precision = getattr(jax.lax.DotAlgorithmPreset, asked) if asked.isupper() else asked

    def product(a, b):
        if kind == "convolution":
            return jax.lax.conv(a[None, None], b[None, None], (1, 1), "SAME", precision=precision)
        if kind == "ragged":
            sizes = jnp.array([3, 5], jnp.int32)
            return jax.lax.ragged_dot(a, jnp.stack([b, b]), sizes, precision=precision)
        a = jax.lax.complex(a, a) if kind == "complex" else a
        return jnp.abs(jnp.dot(a, b.astype(a.dtype), precision=precision))

    shape = jax.ShapeDtypeStruct((8, 8), np.float32)
    lowered_ = jax.jit(product).trace(shape, shape).lower(lowering_platforms=(platform,))
    module = Module(
        stablehlo=lowered.bytecode(lowered_),
        mesh=(),
        platform=platform,
        inputs=(),
        outputs=(),
        state_count=0,
    )
    assert float_types(module) == {"f32"} | cut


def test_host_callbacks_are_seen(odd):
    def chatty(state):
        jax.debug.print("{}", state)
        return state, {}

    sharding = NamedSharding(lowered.make_mesh(lowered.ONE), P())
    module = lowered.lower(chatty, (np.float32(1),), (sharding,), lowered.ONE, 1)
    assert has_host_callback(module)
    assert not has_host_callback(odd[0])


def test_only_a_tpu_gets_many_parameters_as_one_tuple():
    """As jit compiles it: another program, with another peak, would be judged than the one run."""
    one = lowered.train_module()
    many = (one.inputs[0],) * 2001
    for platform, inputs, tupled in (
        ("tpu", many, True),
        ("tpu", many[1:], False),
        ("cpu", many, False),
        ("cuda", many, False),
    ):
        module = dataclasses.replace(one, platform=platform, inputs=inputs)
        options = compile_options(module, range(one.device_count))
        assert options.parameter_is_tupled_arguments is tupled
