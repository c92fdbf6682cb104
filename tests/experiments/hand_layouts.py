"""The cases under their hand-written layouts, compiled once for the tests of a file.

The layouts of all cases are in two files of tests, so that two processes can share them.
"""

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from autoshard.integrations.flax import TrainState
from autoshard.rungs.compile import hlo
from experiments.handwritten import steps, train_steps, trainer
from experiments.handwritten.layouts import Rules
from experiments.zoo.cases import CASES, case
from tests.compiled import compiled

TEXT = (
    "decoder",
    "encoder_decoder",
    "moe",
    "state_space",
    "recurrent",
    "linen_recurrent",
    "plain_gpt",
)
OTHERS = tuple(name for name in CASES if name not in TEXT)

# One of each kind of step and of rules. The others are marked slow: compiling a layout takes 2 to
# 20 seconds.
QUICKLY = {
    ("mlp", "fsdp x tensor parallel 4x2"),
    ("mlp", "data parallel, optimizer divided"),
    ("decoder", "fsdp x tensor parallel 4x2"),
    ("recurrent", "data parallel, gradients apart, optimizer divided"),
    ("recommender", "tables by columns, exchanged at once"),
    ("graph_network", "edge parallel"),
    ("linen_vit", "fsdp"),
    ("plain_gpt", "fsdp x tensor parallel 4x2"),
}


def every(names):
    """(case, layout) of each layout of these cases on 8 devices, to parametrize a test with.

    Of those that are the same but for the sizes of their meshes the first, and ResNet-50 for 152.
    """
    return [
        pytest.param(name, layout, marks=() if (name, layout) in QUICKLY else pytest.mark.slow)
        for name in names
        if name != "resnet152"
        for layout in each_rule(steps.hand_steps(case(name, "small"), 8))
    ]


def each_rule(layouts):
    found = {}
    for layout in layouts.values():
        axes = tuple(axis for axis, size in layout.axes if size > 1)
        found.setdefault(repr(dataclasses.replace(layout, name="", axes=axes)), layout.name)
    return list(found.values())


@functools.cache
def of(name):
    """The case at the scale small, trained so that a step is in proportion to the gradients.

    The others' optimizers make a step of any gradient, however small: of rounding errors too. With
    momentum there is something for the layouts of moments to divide.
    """
    return dataclasses.replace(case(name, "small"), optimizer=optax.sgd(0.1, momentum=0.9))


@functools.cache
def initial(name):
    """The state of `of(name)` on the host."""
    _, init = train_steps.train_step(of(name))
    return jax.tree.map(np.asarray, readable(compiled(init)()))


@functools.cache
def unsharded(name):
    """The state after a step of the case's own workload, and its metrics; on the host."""
    workload = of(name).workload()
    shapes, device = jax.eval_shape(workload.init), SingleDeviceSharding(jax.devices()[0])
    before = placed(
        of_workload(name, initial(name)), shapes, jax.tree.map(lambda _: device, shapes)
    )
    batch = of(name).sample(0)
    after, metrics = compiled(workload.step, before, batch)(before, batch)
    return jax.tree.map(np.asarray, readable((by_hand(name, after), metrics)))


def of_workload(name, state):
    """A state by hand as the case's workload has it."""
    kind = of(name).kind
    if kind == "plain":
        return state["params"]
    return TrainState(
        **state | ({"extra": {"collections": state["extra"]}} if kind == "linen" else {})
    )


def by_hand(name, state):
    """The parts that can be compared of a workload's state, as a state by hand has them."""
    kind = of(name).kind
    if kind == "plain":
        return {"params": state, "extra": {}}
    extra = state.extra["collections"] if kind == "linen" else state.extra
    return {"params": state.params, "extra": extra}


@functools.cache
def compiled_layout(name, layout):
    prepared = steps.prepare(of(name), steps.hand_steps(of(name), 8)[layout], jax.devices())
    return prepared, compiled(prepared.step, jax.eval_shape(prepared.init), of(name).sample(0))


def readable(tree):
    """With the numbers of random keys in place of them."""
    return jax.tree.map(
        lambda x: (
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ),
        tree,
    )


def placed(host, abstract, shardings):
    """A state on its devices: that of the host, with random keys where `abstract` has them."""

    def put(x, like, sharding):
        if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
            x = jax.random.wrap_key_data(x)
        return jax.device_put(x, sharding)

    return jax.tree.map(put, host, abstract, shardings)


def gathered(name, layout):
    """Shapes of what all-gathers make."""
    text = compiled_layout(name, layout)[1].as_text()
    found = re.findall(r"= \(?(.*?)\)? all-gather(?:-start)?\(", text)
    return {
        tuple(int(n) for n in dims.split(",") if n)
        for result in found
        for dims in re.findall(r"\w+\[([\d,]*)\]", result)
    }


def sent(name, layout):
    """(kind, how often a step does it) of each collective, in the order of the program."""
    prepared, step = compiled_layout(name, layout)
    mesh = next(x.mesh for x in jax.tree.leaves(prepared.state))
    found = hlo.count(hlo.parse(step.as_text()), tuple(mesh.shape.items())).collectives
    return [(one.kind, one.count) for one in found]


@functools.cache
def shapes_of(name, scale):
    """The state with the case's own optimizer."""
    chosen = case(name, scale)
    _, init = train_steps.train_step(chosen)
    return jax.eval_shape(init)


def specs(name, layout, devices=8, scale="small"):
    """Leaf of the state -> (its shape, its shape on one device, its spec)."""
    chosen, state = case(name, scale), shapes_of(name, scale)
    laid = Rules.on(steps.hand_steps(chosen, devices)[layout], jax.devices()[:devices])
    names = functools.partial(steps.names_of, name)
    shardings = trainer.shardings(laid, names, chosen.optimizer, state)
    return {
        jax.tree_util.keystr(path): (x.shape, sharding.shard_shape(x.shape), sharding.spec)
        for (path, x), sharding in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(shardings), strict=True
        )
    }


def check(name, layout):
    """A step under the layout does what a step of the workload does, and is laid out as said."""
    before, (after, metrics) = initial(name), unsharded(name)
    prepared, step = compiled_layout(name, layout)
    state = placed(before, jax.eval_shape(prepared.init), prepared.state)
    new, got = step(state, jax.device_put(of(name).sample(0), prepared.batch))

    assert jax.tree.map(lambda x: x.sharding, new) == prepared.state
    got = jax.tree.map(np.asarray, got)
    np.testing.assert_allclose(got["loss"], metrics["loss"], rtol=1e-5)
    assert got.keys() == metrics.keys()
    new = jax.tree.map(np.asarray, readable(new))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        new["extra"],
        after["extra"],
    )
    old, want, have = (jax.tree.leaves(x["params"]) for x in (before, after, new))
    whole = norm_of([b - a for a, b in zip(old, want, strict=True)])
    for a, b, c in zip(old, want, have, strict=True):
        # Some gradients are zero but for rounding, as that of a bias before a norm.
        error, change = norm_of([c - b]), norm_of([b - a])
        assert error < 1e-3 * change + 1e-5 * whole, (error, change, whole)


def norm_of(arrays):
    return math.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in arrays))
