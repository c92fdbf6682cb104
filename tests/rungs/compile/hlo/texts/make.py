"""Writes the texts beside it: small programs, as the compilers of real targets print them.

    python tests/rungs/compile/hlo/texts/make.py v5e:4x4 tower accumulation     needs libtpu
    python tests/rungs/compile/hlo/texts/make.py h100:1x2x8 tower               needs the CUDA 12 plugin
    python tests/rungs/compile/hlo/texts/make.py cpu:16 tower

All run on 16 devices, a mesh of data=4 and model=4. Paths are cut to file names; else nothing is
changed. Programs are sized so that their FLOPs follow from the text below (see test_texts.py).
"""

import functools
import gzip
import os
import pathlib
import re
import sys

if __name__ == "__main__":  # and before jax is imported
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }
    if sys.argv[1].startswith("h100"):
        # With --libraries products go to cuBLAS, which autotuning may choose on a real GPU.
        triton = "false" if "--libraries" in sys.argv else "true"
        os.environ["XLA_FLAGS"] = (
            f"--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm={triton}"
        )

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
EVERY = ("data", "model")
BF16 = jnp.bfloat16


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def trained(loss):
    """A step of gradient descent."""

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads)

    return step


def square(x):
    return (x.astype(jnp.float32) ** 2).mean()


def products(named):
    """Two large products, data parallel."""

    def step(x, v, w):
        return jax.nn.relu(x @ v) @ w

    ins = named(EVERY), named(), named()
    return jax.jit(step, in_shardings=ins), (
        array(32768, 8192),
        array(8192, 8192),
        array(8192, 8192),
    )


def tower(named):
    """Training of three layers, not scanned, FSDP x TP."""
    weights = [(array(2048, 8192), array(8192, 2048))] * 3
    layout = [(named("data", "model"), named("model", "data"))] * 3

    def loss(weights, x):
        for up, down in weights:
            x = x + jax.nn.gelu(x @ up) @ down
        return square(x)

    step = jax.jit(
        trained(loss), in_shardings=(layout, named("data")), out_shardings=(named(), layout)
    )
    return step, (weights, array(32, 512, 2048))


def accumulation(named):
    """Four micro-batches through three scanned layers with remat, FSDP x TP."""
    weights = array(3, 1024, 4096), array(3, 4096, 1024)
    layout = named(None, "data", "model"), named(None, "model", "data")

    def loss(weights, x):
        def layer(x, w):
            return x + jax.nn.gelu(x @ w[0]) @ w[1], None

        return square(jax.lax.scan(jax.checkpoint(layer), x, weights)[0])

    def step(weights, x):
        def add(total, x):
            grads = jax.grad(loss)(weights, x)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), None

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
        grads, _ = jax.lax.scan(add, zeros, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), weights, grads)

    ins = layout, named(None, "data")
    return jax.jit(step, in_shardings=ins, out_shardings=layout), (weights, array(4, 16, 512, 1024))


def convolutions(named):
    """Training of three convolutions, data parallel."""
    kernels = [array(3, 3, 64, 128), array(3, 3, 128, 128), array(3, 3, 128, 256)]

    def loss(kernels, x):
        for i, kernel in enumerate(kernels):
            stride = 2 if i % 2 else 1
            x = jax.lax.conv_general_dilated(
                x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return square(x)

    ins = [named()] * 3, named(EVERY)
    step = jax.jit(trained(loss), in_shardings=ins, out_shardings=(named(), [named()] * 3))
    return step, (kernels, array(256, 64, 64, 64))


def experts(named):
    """Training of 16 experts over the model axis, tokens sent to them and back."""
    weights = array(16, 1024, 4096), array(16, 4096, 1024)

    def local(up, down, x):
        x = jax.lax.all_to_all(x, "model", 0, 1, tiled=True)
        x = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", x, up)), down)
        return jax.lax.all_to_all(x, "model", 1, 0, tiled=True)

    run = jax.shard_map(
        local,
        mesh=named().mesh,
        in_specs=(P("model"), P("model"), P(None, EVERY)),
        out_specs=P(None, EVERY),
    )
    layout = named("model"), named("model")
    step = jax.jit(
        trained(lambda w, x: square(run(w[0], w[1], x))),
        in_shardings=(layout, named(None, EVERY)),
        out_shardings=(named(), layout),
    )
    return step, (weights, array(16, 16384, 1024))


def by_hand(named):
    """One collective of each kind, and products that could hide them."""

    def local(x, y, w):
        ring = [(i, (i + 1) % 4) for i in range(4)]
        return (
            jax.lax.psum_scatter(x, "model", tiled=True),
            jax.lax.all_gather(y, "data", tiled=True),
            jax.lax.psum(y * 2, EVERY),
            jax.lax.ppermute(x + 1, "model", ring),
            jax.lax.all_to_all(x * 3, "model", 0, 1, tiled=True),
            x @ w @ w @ w,
        )

    step = jax.shard_map(
        local,
        mesh=named().mesh,
        in_specs=(P(EVERY), P(EVERY), P()),
        out_specs=P(EVERY),
        check_vma=False,
    )
    return jax.jit(step), (array(16384, 4096), array(16384, 4096), array(4096, 4096))


def ragged(named):
    """A ragged all-to-all."""

    def local(x, out, *sizes):
        return jax.lax.ragged_all_to_all(x, out, *(s[0] for s in sizes), axis_name="model")

    step = jax.shard_map(
        local, mesh=named().mesh, in_specs=(P(EVERY),) * 6, out_specs=P(EVERY), check_vma=False
    )
    x, sizes = array(131072, 1024), array(16, 4, dtype=jnp.int32)
    return jax.jit(step), (x, x, sizes, sizes, sizes, sizes)


def kernels(named):
    """Five times two Pallas kernels, of which one declares its cost."""
    from jax.experimental import pallas as pl

    def kernel(x, y, out):
        out[...] = jax.lax.dot(x[...], y[...], preferred_element_type=jnp.float32)

    def product(x, y, cost):
        (m, k), n = x.shape, y.shape[1]
        return pl.pallas_call(
            kernel,
            grid=(m // 256, n // 256),
            in_specs=[
                pl.BlockSpec((256, k), lambda i, j: (i, 0)),
                pl.BlockSpec((k, 256), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((256, 256), lambda i, j: (i, j)),
            out_shape=array(m, n, dtype=jnp.float32),
            cost_estimate=cost,
        )(x, y)

    def local(x, y):
        flops = 2 * 1024 * 2048 * 2048
        cost = pl.CostEstimate(flops=flops, transcendentals=7, bytes_accessed=20971520)
        return product(x, y, cost), product(x + 1, y, None)

    run = jax.shard_map(
        local, mesh=named().mesh, in_specs=(P(EVERY), P()), out_specs=P(EVERY), check_vma=False
    )

    def step(x, y):
        def body(x, _):
            a, b = run(x, y)
            return (a + jnp.sin(b)).astype(x.dtype), None

        return jax.lax.scan(body, x, None, length=5)[0]

    ins = named(EVERY), named()
    return jax.jit(step, in_shardings=ins), (array(16384, 2048), array(2048, 2048))


def splash(named):
    """The gradient of JAX's splash attention, 2 sequences of 4 heads on a device."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    causal = masks.MultiHeadMask([masks.CausalMask((1024, 1024))] * 4)
    return attended(named, jax.vmap(splash.make_splash_mha_single_device(causal)))


def flash(named):
    """The gradient of JAX's flash attention, of the same sizes."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    return attended(named, functools.partial(flash_attention, causal=True))


def attended(named, attend):
    """The gradient of a kernel that is divided along batch and heads by hand."""
    spec = P("data", "model")
    run = jax.shard_map(
        attend, mesh=named().mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )
    grads = jax.grad(lambda q, k, v: square(run(q, k, v)), argnums=(0, 1, 2))
    x = array(8, 16, 1024, 128)
    return jax.jit(grads, in_shardings=(NamedSharding(named().mesh, spec),) * 3), (x, x, x)


def pointwise(named):
    """A Pallas kernel through Triton, whose declared cost JAX drops."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def kernel(x, y, out):
        out[...] = jnp.exp(x[...]) + y[...]

    def local(x, y):
        block = pl.BlockSpec((64, 64), lambda i, j: (i, j))
        return pl.pallas_call(
            kernel,
            grid=(x.shape[0] // 64, x.shape[1] // 64),
            in_specs=[block, block],
            out_specs=block,
            out_shape=array(*x.shape, dtype=x.dtype),
            compiler_params=triton.CompilerParams(),
            cost_estimate=pl.CostEstimate(flops=x.size, transcendentals=x.size, bytes_accessed=7),
        )(x, y)

    step = jax.shard_map(
        local, mesh=named().mesh, in_specs=P(EVERY), out_specs=P(EVERY), check_vma=False
    )
    x = array(16384, 1024, dtype=jnp.float32)
    return jax.jit(step), (x, x)


def attention(named):
    """The gradient of cuDNN's causal attention."""
    from jax._src.cudnn import fused_attention_stablehlo as library

    # What is not here cannot say its version.
    library.check_cudnn_version = lambda: 91000
    library.check_compute_capability = lambda _: True
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=True)
    grads = jax.grad(lambda q, k, v: square(attend(q, k, v)), argnums=(0, 1, 2))
    x = array(16, 2048, 16, 128)
    return jax.jit(grads, in_shardings=(named("data", None, "model"),) * 3), (x, x, x)


def routing(named):
    """Training of experts by annotation, with top-2 routing (v5p: scatters on the sparse core)."""
    experts, tokens = 16, 2048

    def loss(params, x):
        gate, up, down = params
        capacity = 2 * tokens // experts
        scores, chosen = jax.lax.top_k(jax.nn.softmax((x @ gate).astype(jnp.float32)), 2)
        hot = jax.nn.one_hot(chosen, experts, dtype=jnp.int32)
        place = jnp.cumsum(hot.reshape(x.shape[0], -1, experts), 1).reshape(hot.shape) * hot - 1
        sent = jax.nn.one_hot(place, capacity, dtype=x.dtype) * hot[..., None].astype(x.dtype)
        back = (sent * scores[..., None, None].astype(x.dtype)).sum(2)
        inside = jnp.einsum("btec,btd->ebcd", sent.sum(2), x)
        inside = jax.lax.with_sharding_constraint(inside, named("model", "data"))
        inside = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", inside, up))
        inside = jnp.einsum("ebcf,efd->ebcd", inside, down)
        out = jnp.einsum("btec,ebcd->btd", back, inside)
        return square(jax.lax.with_sharding_constraint(out, named(EVERY)))

    layout = named(), named("model"), named("model")
    step = jax.jit(
        trained(loss), in_shardings=(layout, named(EVERY)), out_shardings=(named(), layout)
    )
    params = array(1024, experts), array(experts, 1024, 4096), array(experts, 4096, 1024)
    return step, (params, array(32, tokens, 1024))


def devices_of(target):
    chip, _, shape = target.partition(":")
    if chip == "cpu":
        jax.config.update("jax_num_cpu_devices", int(shape))
        return jax.devices()
    from jax.experimental import topologies

    if chip == "h100":
        options = {"platform": "cuda", "topology_name": shape, "topology": shape}
        return topologies.get_topology_desc(target_config=H100, **options).devices
    return topologies.get_topology_desc(platform="tpu", topology_name=target).devices


def main(target, *programs):
    mesh = Mesh(np.array(devices_of(target)).reshape(4, 4), EVERY)
    suffix = "-libraries" if "--libraries" in programs else ""
    for program in programs:
        if program.startswith("--"):
            continue
        step, arguments = globals()[program](lambda *spec: NamedSharding(mesh, P(*spec)))
        text = step.lower(*arguments).compile().as_text()
        text = re.sub(r"/(?:[\w.\-]+/)+([\w.\-]+\.py)", r"\1", text)
        name = f"{program}{suffix}-{target.replace(':', '-')}-jax-{jax.__version__}.txt.gz"
        path = pathlib.Path(__file__).parent / name
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(name, len(text), path.stat().st_size, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
