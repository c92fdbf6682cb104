"""The search space: what it holds, what it refuses and why."""

import dataclasses
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from autoshard.errors import LayoutError, WorkloadError
from autoshard.lowering.problem import SearchProblem, allowed_meshes, make_problem
from autoshard.program.program import Program, trace
from autoshard.records.layout import Gather, Layout, rules
from autoshard.space.baselines import baselines
from autoshard.space.meshes import factorizations, mesh_shapes
from autoshard.space.moves import neighbours
from autoshard.space.pinned import read_fix
from autoshard.space.space import Space
from autoshard.target.target import find_target
from tests import programs
from tests.analysed import analyse, judge, subject, target
from tests.programs import EMBED, MLP, normal, shaped, train

SMALL = ("custom_derivatives", "rnn", "odd_sizes", "indivisible_batch", "manual_region", "clip")


def fixed(name: str, fix: dict[str, object]) -> SearchProblem:
    return make_problem(trace(programs.EVERY[name]()), target(), "free", fix)


@pytest.mark.parametrize("count", [1, 2, 8, 12, 64])
def test_factorizations_are_all_of_them_once(count: int) -> None:
    found = factorizations(count)
    brute = {
        sizes
        for n in range(1, 4)
        for sizes in itertools.product(range(2, count + 1), repeat=n)
        if math.prod(sizes) == count
    } or {()}
    assert len(found) == len(set(found)) and set(found) == brute


def test_meshes_of_plain_devices_have_descending_sizes() -> None:
    assert mesh_shapes(8, (), ordered=False) == [
        (("x", 8),),
        (("x", 4), ("y", 2)),
        (("x", 2), ("y", 2), ("z", 2)),
    ]
    ordered = mesh_shapes(8, ("data", "model"), ordered=True)
    assert (("data", 2), ("model", 4)) in ordered and (("data", 4), ("model", 2)) in ordered


@pytest.mark.parametrize("name", list(programs.EVERY))
def test_samples_and_their_neighbours_belong_to_the_space(name: str) -> None:
    space = subject(name).space
    rng = random.Random(5)
    start = space.sample(rng)
    assert start is not None
    for _ in range(3):
        near = list(itertools.islice(neighbours(space, start), 25))
        assert start not in near and len(set(near)) == len(near)
        for candidate in near:
            assert space.contains(candidate) is None
            assert space.candidate(candidate.layout) == candidate  # canonical already
        start = rng.choice(near) if near else start


@pytest.mark.parametrize("name", SMALL)
def test_enumeration_gives_members_only_each_once(name: str) -> None:
    space = subject(name).space
    found = list(itertools.islice(space.enumerate(), 400))
    assert found and len(set(found)) == len(found)
    assert all(space.contains(c) is None for c in found[:100])


@pytest.mark.parametrize(
    ("name", "conflict_losers"),
    [
        ("custom_derivatives", {"a[0]:32", "a[1]:48"}),
        ("rnn", {"in[0]:8", "recurrent[0]:64"}),  # of which one matrix holds the latter twice
    ],
)
def test_a_small_space_is_enumerated_whole(name: str, conflict_losers: set[str]) -> None:
    one_mesh = dataclasses.replace(subject(name).space, meshes=((("x", 8),),))
    every = set(one_mesh.enumerate())
    # batch: in or out; embed and mlp: in or out for compute and storage, not both at once where
    # one tensor holds both; what the rules say twice is one candidate.
    assert 2 < len(every) <= one_mesh.size()
    rng = random.Random(0)
    drawn = {c for c in (one_mesh.sample(rng) for _ in range(200)) if c}
    assert drawn <= every
    near = {n for c in drawn for n in neighbours(one_mesh, c) if len(n.layout.mesh) == 1}
    assert near <= every
    for some in (every, drawn, near):
        assert {a for c in some for a in c.layout.conflict_losers} == conflict_losers


def test_small_arrays_that_computing_divides_double_the_space() -> None:
    of = analyse(programs.biased_pair())
    one_mesh = dataclasses.replace(of.space, meshes=((("x", 8),),))
    every = set(one_mesh.enumerate())
    rng = random.Random(0)
    drawn = {c for c in (one_mesh.sample(rng) for _ in range(200)) if c}
    near = {n for c in drawn for n in neighbours(one_mesh, c) if len(n.layout.mesh) == 1}
    assert drawn | near <= every
    for some in (every, drawn, near):
        assert {c.layout.small_replicated for c in some} == {False, True}
    # Batch; units and features for compute and storage, and whether they give way where they have
    # a rule; levels; replicated or not.
    levels = len({c.layout.gather for c in every})
    assert one_mesh.size() == 2 * 7 * 7 * levels * 2 >= len(every)


def test_an_axis_without_a_rule_does_not_give_way() -> None:
    space = subject("rnn").space
    axis = "recurrent[0]:64"
    assert space.contested({axis: ("x",)}) == [axis]
    for rule in (None, "y"):  # a mesh axis of one device is no rule either
        layout = Layout(
            mesh=(("x", 8), ("y", 1)),
            activation_rules=rules({"batch": "x"} | ({axis: rule} if rule else {})),
            conflict_losers=(axis,),
        )
        assert space.canonical(layout).conflict_losers == ()


def test_an_axis_may_give_way_to_one_that_claims_the_same_mesh_axes() -> None:
    space = subject("custom_derivatives").space
    embed, mlp = "a[0]:32", "a[1]:48"  # one matrix holds them so, the other the other way round
    both = {embed: ("x", "y"), mlp: ("y",)}
    assert space.contested({}, both) == space.contested(both, {}) == [embed, mlp]
    assert space.contested({embed: ("x",), mlp: ("y",)}, {embed: ("y",), mlp: ("x",)}) == []
    assert space.contested({"batch": ("x",), embed: ("x",)}) == []  # the batch does so anyway


def test_the_baselines_are_in_the_space() -> None:
    for name in ("scanned_gpt", "with_constraints", "odd_sizes", "manual_region"):
        space = subject(name).space
        names = {b.name for b in baselines(space)}
        assert {"replicated", "data parallel"} <= names
        assert all(space.contains(b.candidate) is None for b in baselines(space))


@pytest.mark.parametrize("name", ["scanned_gpt", "clip", "rnn"])
def test_every_mesh_of_the_target_is_reached(name: str) -> None:
    space = subject(name).space
    rng = random.Random(0)
    drawn = [c for c in (space.sample(rng) for _ in range(60)) if c]
    assert {len(c.layout.mesh) for c in drawn} == {1, 2, 3}


def refusal(space: Space, layout: Layout) -> str:
    reason = space.contains(space.candidate(layout))
    assert reason is not None
    return reason


def test_reasons() -> None:
    space = subject("scanned_gpt").space
    mesh = (("x", 8),)
    loop = next(a.name for a in space.axes.axes if a.is_loop)
    assert "4 devices" in refusal(
        space, Layout(mesh=(("x", 4),), activation_rules=rules({"batch": "x"}))
    )
    assert "no logical axis 'nope'" in refusal(
        space, Layout(mesh=mesh, activation_rules=rules({"nope": "x"}))
    )
    assert "loop axis" in refusal(space, Layout(mesh=mesh, state_rules=rules({loop: "x"})))
    head_dim = next(a.name for a in space.axes.axes if a.size == 4)
    assert "shards nothing" in refusal(space, Layout(mesh=mesh, state_rules=rules({head_dim: "x"})))
    assert "no constraints" in refusal(space, Layout(mesh=mesh, as_annotated=True))
    wrong_knobs = dataclasses.replace(
        space.candidate(Layout(mesh=mesh)), knobs=(("remat", "full"),)
    )
    assert "knobs" in (space.contains(wrong_knobs) or "")


def test_a_batch_that_no_mesh_axis_divides() -> None:
    space = subject("indivisible_batch").space
    spread = Layout(mesh=(("x", 8),), activation_rules=rules({"batch": "x"}))
    reason = refusal(space, spread)
    assert "batch" in reason and "x" in reason
    names = [b.name for b in baselines(space)]
    assert "replicated" in names and "data parallel" not in names
    rng = random.Random(0)
    for _ in range(10):
        drawn = space.sample(rng)
        assert drawn is not None and "batch" not in dict(drawn.layout.activation_rules)


def test_a_batch_that_the_second_mesh_axis_does_not_divide() -> None:
    def loss(params, x):
        return jnp.mean((x @ params) ** 2)

    space = analyse(train(loss, lambda: normal(0, EMBED, MLP), shaped(6, EMBED))).space
    mesh = (("x", 2), ("y", 4))
    both = Layout(mesh=mesh, activation_rules=rules({"batch": ("x", "y")}), state_rules=())
    assert refusal(space, dataclasses.replace(both, state_rules=_apart(space))) == (
        "batch[6, 32] cannot be divided by y=4"
    )


def _apart(space: Space) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """A rule on one of two mesh axes, which keeps them from merging."""
    width = next(a.name for a in space.axes.axes if a.size == EMBED)
    return ((width, ("y",)),)


def test_awkward_sizes_do_not_kill_a_layout() -> None:
    """197 tokens, 257 words, 6 heads."""
    of = subject("odd_sizes")
    names = {a.size: a.name for a in of.space.axes.axes}
    layout = of.space.layout(
        (("x", 2), ("y", 4)),
        {"batch": ("x",), names[6]: ("y", "x"), names[32]: ("y",)},
        {names[6]: ("x", "y"), names[32]: ("y",)},
    )
    assert of.space.contains(of.space.candidate(layout)) is None
    judge(of, layout)
    lost = of.space.layout((("x", 2), ("y", 4)), {names[6]: ("x", "y")}, {names[6]: ("x", "y")})
    assert of.space.contains(of.space.candidate(lost)) is None
    assert any("not divisible" in d for d in judge(of, lost).dropped)
    # The tokens and the words are no axes a rule could name at all.
    assert not {names[197], names[257]} & {a.name for a in of.space.shardable()}


def test_the_sequence_can_be_sharded_though_the_batch_has_one_token_more() -> None:
    of = subject("one_more_token")
    sequence = next(a for a in of.space.axes.axes if a.size == 25)
    assert sequence in of.space.shardable()
    layout = of.space.layout((("x", 8),), {sequence.name: ("x",)}, {})
    assert of.space.contains(of.space.candidate(layout)) is None
    assert judge(of, layout).flops < judge(of, Layout(mesh=(("x", 8),))).flops / 2
    assert any("25 is not divisible" in d for d in of.space.specs(layout).dropped)


def test_fix_pins_an_axis_everywhere() -> None:
    space = fixed("custom_derivatives", {"batch": "x"}).space
    rng = random.Random(1)
    drawn = [c for c in (space.sample(rng) for _ in range(20)) if c]
    assert drawn
    near = [n for c in drawn[:3] for n in neighbours(space, c)]
    every = [b.candidate for b in baselines(space)]
    assert every and near
    for candidate in (*drawn, *near, *every):
        assert dict(candidate.layout.activation_rules)["batch"] == ("x",)
        assert space.contains(candidate) is None
    free = subject("custom_derivatives").space.candidate(Layout(mesh=(("x", 8),)))
    assert "fixed" in (space.contains(free) or "")


@pytest.mark.parametrize(
    "value", [PartitionSpec(None, "x"), (None, "x"), [None, ("x",)]], ids=["spec", "tuple", "list"]
)
def test_fix_pins_a_leaf(value: object) -> None:
    of = fixed("custom_derivatives", {"state['a']": value})
    specs = of.space.specs(of.space.layout((("x", 8),), {"batch": ("x",)}, {}))
    leaf = [x.path for x in of.analysis.program.inputs].index("state['a']")
    assert specs.inputs[leaf] == specs.outputs[leaf] == ((), ("x",))


def test_fix_that_names_nothing_is_refused() -> None:
    analysis = subject("custom_derivatives").analysis
    with pytest.raises(LayoutError, match=r"nope.*batch"):
        read_fix({"nope": "x"}, analysis.program, analysis.axes)
    with pytest.raises(LayoutError, match="3 dimensions"):
        read_fix({"state['a']": ("x", None, None)}, analysis.program, analysis.axes)


def test_a_fixed_leaf_that_the_mesh_cannot_hold_is_refused() -> None:
    of = fixed("custom_derivatives", {"state['a']": (None, "y")})
    flat = of.space.candidate(of.space.layout((("x", 8),), {"batch": ("x",)}, {}))
    assert of.space.contains(flat) is not None
    with pytest.raises(LayoutError, match=r"state\['head'\]\[1\] of 257"):
        fixed("odd_sizes", {"state['head']": (None, "x")})


def test_a_step_with_a_manual_region_keeps_its_mesh() -> None:
    space = subject("manual_region").space
    assert space.meshes == ((("data", 8),),)
    other = Layout(mesh=(("x", 8),), activation_rules=rules({"batch": "x"}))
    reason = refusal(space, other)
    assert "data" in reason and "tests/programs.py:" in reason
    four = find_target(jax.devices()[:4])
    with pytest.raises(WorkloadError, match=r"unsupported.*programs\.py"):
        make_problem(trace(programs.manual_region()), four, "free", None)


def test_kept_constraints_keep_their_mesh() -> None:
    space = analyse(programs.with_constraints(), keep_constraints=True).space
    assert space.meshes == ((("data", 4), ("model", 2)),)
    drawn = space.sample(random.Random(0))
    assert drawn is not None and drawn.layout.mesh == space.meshes[0]
    assert space.annotated is None


def test_one_device_has_one_layout() -> None:
    alone = make_problem(
        trace(programs.custom_derivatives()), find_target(jax.devices()[:1]), "free", None
    )
    assert [c.layout.mesh for c in alone.space.enumerate()] == [()]
    assert [b.name for b in baselines(alone.space)] == ["replicated"]
    assert alone.space.sample(random.Random(0)) is not None


def test_mesh_axes_stay_apart_where_a_dimension_takes_only_the_first() -> None:
    """Merged to x=8, a rule over x=2 and y=4 would leave an axis of 6 whole."""
    space = subject("scanned_mlp").space
    axis = next(a for a in space.shardable() if a.is_batch)
    other = dataclasses.replace(axis, sizes=(6,), size=6)
    axes = dataclasses.replace(
        space.axes, axes=tuple(other if a is axis else a for a in space.axes.axes)
    )
    layout = Layout(mesh=(("x", 2), ("y", 4)), activation_rules=rules({axis.name: ("x", "y")}))
    assert space.canonical(layout).mesh == (("x", 8),)
    assert dataclasses.replace(space, axes=axes).canonical(layout) == layout


def layers_between_narrow_ends() -> Program:
    """Of 256 units, between two arrays that are small."""

    def loss(params, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"]) ** 2)

    def init():
        shapes = {"layers": (4, 256, 256), "in": (256, 8), "out": (8, 8)}
        return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}

    return trace(train(loss, init, shaped(64, 256)), (), False)


def fixed_along(program: Program, where: str) -> tuple[str, Space]:
    """The axis that lies there, and the space in which it is fixed to the mesh axis x."""
    axes = make_problem(program, target(), "free", None).space.axes.axes
    name = next(a.name for a in axes if where in a.where)
    return name, make_problem(program, target(), "free", {name: "x"}).space


def test_what_the_user_fixed_divides_small_arrays_too() -> None:
    """The axis lies in small and in large arrays: replicating the small ones is not offered."""
    name, space = fixed_along(layers_between_narrow_ends(), "state['in'][0]")
    assert any(f"state['layers']{d}" in space.axes.axis(name).where for d in ("[1]", "[2]"))
    found = [b.candidate for b in baselines(space)][:3]
    for start in tuple(found):
        found += neighbours(space, start)
    assert len(found) > 20
    for candidate in found:
        assert not candidate.layout.small_replicated, candidate


def test_what_the_user_fixed_stays_on_every_level_of_what_is_whole() -> None:
    """The axis lies in small arrays alone, of which higher levels take compute rules."""
    name, space = fixed_along(layers_between_narrow_ends(), "state['out'][0]")
    found = [b.candidate for b in baselines(space)]
    levels = {c.layout.gather for c in found}
    assert levels == set(Gather)
    for start in [c for c in found if c.layout.state_rules][:6]:
        found += neighbours(space, start)
    for candidate in found:
        tables = candidate.layout.activation_rules, candidate.layout.state_rules
        assert all(dict(table)[name] == ("x",) for table in tables), candidate
    lost = dataclasses.replace(found[-1].layout, state_rules=(), gather=Gather.PER_USE)
    assert "is fixed to x" in str(space.contains(space.candidate(lost)))


def test_rules_that_shard_nothing_are_left_out() -> None:
    space = subject("momentum_layers").space
    fsdp = next(b.candidate.layout for b in baselines(space) if b.name == "FSDP")
    batch = next(a.name for a in space.axes.axes if a.is_batch)
    idle = dataclasses.replace(fsdp, state_rules=rules({**dict(fsdp.state_rules), batch: "x"}))
    assert space.contains(space.candidate(idle)) is not None
    assert space.effective(idle) == space.canonical(fsdp)


def test_an_axis_that_no_array_of_the_state_holds_is_fixed_for_computing_alone() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sin(x @ w @ normal(1, 32, 24)))

    program = trace(train(loss, lambda: normal(0, 16, 32), shaped(64, 16), lambda key: key))
    free = make_problem(program, target(), "free", None).space
    (inside,) = [a.name for a in free.axes.axes if a.size == 24]
    space = make_problem(program, target(), "free", {inside: "x"}).space
    layouts = [b.candidate.layout for b in baselines(space)]
    layouts.append(space.layout((("x", 4), ("y", 2)), {"batch": ("y",)}, {}))
    assert len(layouts) > 1
    for layout in layouts:
        assert space.contains(space.candidate(layout)) is None
        assert dict(layout.activation_rules)[inside] == ("x",) and inside not in dict(
            layout.state_rules
        )


def test_a_given_mesh_is_tried_whatever_its_shape() -> None:
    def meshes(*sizes: int, names: str = "abcd") -> list:
        devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
        return list(allowed_meshes(find_target(Mesh(devices, tuple(names))), "free", None))

    given = dataclasses.replace(target(), given=tuple(zip("abcd", (2, 2, 2, 2), strict=True)))
    four = allowed_meshes(dataclasses.replace(given, devices=given.devices * 2), "free", None)
    assert four[0] == given.given
    flat = meshes(1, 8, names="dm")
    assert flat[0] == (("m", 8),) and len({tuple(n for _, n in mesh) for mesh in flat}) == len(flat)


@pytest.mark.parametrize(("a", "b"), [("a", "b"), ("y", "x")])
def test_a_fix_names_no_mesh_axis_of_size_one_that_other_shapes_widen(a: str, b: str) -> None:
    """`fix` over a and b is one over b where a has one device: in no shape has a more."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 8), (a, b))
    program = trace(programs.EVERY["equal_width_mlp"]())
    named = {"batch": (a, b), "state[0]": PartitionSpec(a)}
    space = make_problem(program, find_target(mesh), "free", named).space
    assert space.pinned == (("batch", (b,)),) and space.fixed_leaves == ((0, ((), ())),)
    assert max(map(len, space.meshes)) == 3
    assert all(a not in dict(shape) for shape in space.meshes)
    free = make_problem(program, find_target(mesh), "free", {"batch": b}).space
    assert any(a in dict(shape) for shape in free.meshes)


def test_mesh_axes_of_size_one_that_a_step_names() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 8), ("a", "b"))
    over = PartitionSpec("b")

    def step(state, x):
        def loss(w):
            held = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, over))
            specs = {"in_specs": (over, PartitionSpec()), "out_specs": over}
            return jnp.mean(jax.shard_map(jnp.matmul, mesh=mesh, **specs)(held, w) ** 2)

        return state - jax.grad(loss)(state), {}

    program = trace(
        programs.Workload(step=step, init=lambda: jnp.ones((EMBED, MLP)), batch=shaped(32, EMBED))
    )
    for fix in (None, {"batch": "b"}, {"batch": ("a", "b")}):
        space = make_problem(program, target(), "free", fix).space
        assert {b.name for b in baselines(space)} >= {"as annotated", "FSDP"}


def test_a_leaf_that_is_fixed_to_one_mesh_axis_twice_is_refused() -> None:
    for spec in (PartitionSpec("x", "x"), PartitionSpec(("x", "x"))):
        with pytest.raises(LayoutError, match="names a mesh axis twice: x, x"):
            fixed("equal_width_mlp", {"state[0]": spec})
