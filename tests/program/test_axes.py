"""The logical axes of whole steps, with no annotation."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autoshard.program.axes import Axes, Dimensions, LogicalAxis
from autoshard.workload import Workload
from tests import programs
from tests.analysed import analyse, subject
from tests.programs import (
    BATCH,
    EMBED,
    HEAD_DIM,
    HEADS,
    LAYERS,
    MLP,
    SEQUENCE,
    VOCAB,
    shaped,
    train,
)


def axes_of(name: str) -> Axes:
    return subject(name).analysis.axes


def held_by(name: str, path: str) -> Dimensions:
    """Factors of each dimension of an input."""
    analysis = subject(name).analysis
    (found,) = [
        dims
        for leaf, dims in zip(analysis.program.inputs, analysis.axes.inputs, strict=True)
        if leaf.path == path
    ]
    return found


def axis_at(name: str, path: str, dim: int) -> LogicalAxis:
    """The axis of a dimension of one factor."""
    ((axis, _),) = held_by(name, path)[dim]
    assert axis is not None
    return axes_of(name).axis(axis)


def sizes(axes: Axes) -> list[int]:
    return sorted(a.size for a in axes.axes if not a.is_loop)


def test_a_scanned_gpt_has_exactly_the_axes_a_person_would_name() -> None:
    axes = axes_of("scanned_gpt")
    # Data flow ties the head_dim of queries to that of keys, and that of values to the output's;
    # and the words that come in are not the words that go out.
    wanted = [VOCAB, VOCAB, EMBED, HEADS, HEAD_DIM, HEAD_DIM, MLP, BATCH, SEQUENCE]
    assert sizes(axes) == sorted(wanted)
    assert {a.size for a in axes.axes if a.is_loop} == {LAYERS}
    embed = axis_at("scanned_gpt", "state['emb']", 1)
    assert axis_at("scanned_gpt", "state['layers']['up']", 1) == embed
    assert axis_at("scanned_gpt", "state['out']", 0) == embed
    heads = axis_at("scanned_gpt", "state['layers']['q']", 2)
    assert axis_at("scanned_gpt", "state['layers']['o']", 1) == heads
    assert axis_at("scanned_gpt", "state['layers']['q']", 0).is_loop


def test_one_axis_is_the_batch_and_it_is_called_so() -> None:
    axes = axes_of("scanned_gpt")
    assert [a.name for a in axes.axes if a.is_batch] == ["batch"]
    assert axes.axis("batch").size == BATCH and axes.axis("batch").is_data
    sequence = axis_at("scanned_gpt", "batch", 1)
    assert sequence.is_data and not sequence.is_batch and not sequence.is_loop


def test_activations_hold_the_axes_of_their_weights() -> None:
    axes = axes_of("scanned_gpt")
    hidden = axis_at("scanned_gpt", "state['layers']['up']", 2).name
    found = [
        [axis for dim in dims for axis, _ in dim]
        for dims in axes.sites.values()
        if len(dims) == 3 and dims[2] == ((hidden, MLP),)
    ]
    sequence = axis_at("scanned_gpt", "batch", 1).name
    assert ["batch", sequence, hidden] in found


@pytest.mark.parametrize("layers", [2, 5])
def test_unrolled_layers_are_tied_as_decisions(layers: int) -> None:
    axes = analyse(programs.unrolled_gpt(layers)).analysis.axes
    assert len(axes.axes) == len(axes_of("unrolled_gpt").axes)
    heads = [a for a in axes.axes if a.size == HEADS]
    assert [a.repeats for a in heads] == [layers]


def test_gradient_accumulation_does_not_make_the_batch_a_loop_dimension() -> None:
    axes = axes_of("gradient_accumulation")
    batch = axes.axis("batch")
    assert not batch.is_loop and batch.size == BATCH // 2
    (outer, inner) = held_by("gradient_accumulation", "batch")[0]
    assert axes.axis(outer[0] or "").is_loop and inner == ("batch", BATCH // 2)


def test_fused_queries_keys_and_values_keep_their_heads() -> None:
    fused = held_by("fused_qkv", "state['qkv']")[1]
    assert [n for _, n in fused] == [3, HEADS, HEAD_DIM]
    out = held_by("fused_qkv", "state['out']")[0]
    assert out == fused[1:]


def test_grouped_query_heads_are_groups_times_repeats() -> None:
    ((groups, n),) = held_by("grouped_query", "state['k']")[1]
    query = held_by("grouped_query", "state['q']")[1]
    assert n == 2 and query[0] == (groups, 2) and query[1][1] == HEADS // 2
    assert held_by("grouped_query", "state['o']")[0] == query


def test_clip_has_two_batch_axes() -> None:
    axes = axes_of("clip")
    batch = [a.name for a in axes.axes if a.is_batch]
    assert batch == ["batch.image", "batch.text"]
    assert ((("batch.image", BATCH),), (("batch.text", BATCH),)) in axes.sites.values()


def test_one_more_token_is_the_sequence() -> None:
    sequence = axis_at("one_more_token", "batch", 1)
    assert sequence.sizes == (SEQUENCE, SEQUENCE + 1) and sequence.is_data
    inner = [d for dims in axes_of("one_more_token").sites.values() for d in dims]
    assert ((sequence.name, SEQUENCE),) in inner


@pytest.mark.parametrize("layers", [4, 6, 10])
def test_an_equal_width_mlp_keeps_columns_and_rows_apart(layers: int) -> None:
    of = analyse(programs.equal_width_mlp(layers))
    axes = of.analysis.axes
    weights = axes.inputs[:layers]
    for (rows,), (columns,) in weights:
        assert rows[0] != columns[0]
    # Column, row, column, row: every other weight is cut the same way.
    assert weights[0][1] == weights[1][0] == weights[2][1]
    assert weights[1][1] == weights[2][0]
    assert weights[0][1] != weights[1][1]
    assert len(axes.axes) == len(axes_of("equal_width_mlp").axes)


def test_a_recurrent_weight_holds_one_axis_twice() -> None:
    axes = axes_of("rnn")
    hidden = axis_at("rnn", "state['recurrent']", 0).name
    assert axis_at("rnn", "state['recurrent']", 1).name == hidden
    assert (hidden, hidden) in axes.meetings
    assert axis_at("rnn", "batch[0]", 1).is_loop  # time


def test_attention_scores_hold_the_sequence_twice() -> None:
    sequence = axis_at("scanned_gpt", "batch", 1).name
    meetings = axes_of("scanned_gpt").meetings
    assert [first for first, second in meetings if first == second] == [sequence]


def test_tied_embedding_has_one_vocabulary() -> None:
    assert sizes(axes_of("tied_embedding")).count(VOCAB) == 1


def test_experts_are_an_axis() -> None:
    up, down = (held_by("mixture_of_experts", f"state['{n}']") for n in ("up", "down"))
    assert up[0] == down[0] == held_by("mixture_of_experts", "state['router']")[1]


def test_optimizer_moments_share_the_axes_of_their_parameters() -> None:
    analysis = subject("adamw").analysis
    square = {
        dims
        for leaf, dims in zip(analysis.program.state, analysis.axes.inputs, strict=False)
        if leaf.shape == (160, 136)
    }
    assert len(square) == 1


def test_factored_moments_share_the_axes_of_their_parameters() -> None:
    names = {a.size: a.name for a in axes_of("adafactor").axes}
    analysis = subject("adafactor").analysis
    vectors = [
        (leaf, dims)
        for leaf, dims in zip(analysis.program.state, analysis.axes.inputs, strict=False)
        if len(leaf.shape) == 1 and leaf.shape[0] in (160, 136)
    ]
    assert len(vectors) >= 4
    for leaf, dims in vectors:
        assert dims == (((names[leaf.shape[0]], leaf.shape[0]),),)


def test_a_pooled_image_is_the_major_part_of_the_image() -> None:
    axes = axes_of("conv_net")
    major, minor = held_by("conv_net", "batch['image']")[1]
    assert (major[1], minor[1]) == (4, 2)
    pooled = [dims for dims in axes.sites.values() if [_size(d) for d in dims] == [16, 4, 4, 32]]
    assert pooled and all(dims[1] == (major,) for dims in pooled)


def _size(dim: tuple[tuple[str | None, int], ...]) -> int:
    total = 1
    for _, n in dim:
        total *= n
    return total


def test_a_constant_used_twice_ties_nothing() -> None:
    def loss(params, batch):
        mask = jnp.tri(16)
        a, b = batch["a"] @ params["a"], batch["b"] @ params["b"]
        return jnp.sum(a * mask) + jnp.sum(b * mask)

    batch = {"a": shaped(16, 8), "b": shaped(16, 8)}
    workload = train(loss, lambda: {n: programs.normal(0, 8, 16) for n in "ab"}, batch)
    axes = analyse(workload).analysis.axes
    assert [a.name for a in axes.axes if a.is_batch] == ["batch.a", "batch.b"]


def test_operations_the_partitioner_has_no_rule_for_do_not_cut_the_flow() -> None:
    def loss(params, x):
        h = jax.lax.erf(x @ params["up"])
        h = h / jnp.sqrt(jnp.var(h, axis=-1, keepdims=True) + 1e-6)
        return jnp.mean(jnp.square(h @ params["down"]))

    def init():
        return {"up": programs.normal(0, EMBED, MLP), "down": programs.normal(1, MLP, EMBED + 8)}

    axes = analyse(train(loss, init, shaped(BATCH, EMBED))).analysis.axes
    assert sizes(axes) == sorted([BATCH, EMBED, MLP, EMBED + 8])
    assert axes.opaque == ()


def test_a_model_s_own_names_name_the_axes() -> None:
    plain = programs.unrolled_gpt(2)
    names: dict[str, tuple[str | None, ...]] = {"['emb']": ("vocab", "embed")}
    for i in range(2):
        names[f"['layers'][{i}]['q']"] = ("embed", "heads", "kv")
        names[f"['layers'][{i}]['up']"] = ("embed", "mlp")
    named = dataclasses.replace(plain, axis_names=names)
    found = {a.name: a for a in analyse(named).analysis.axes.axes}
    assert {"vocab", "embed", "heads", "kv", "mlp", "batch"} <= set(found)
    assert found["mlp"].size == MLP and found["mlp"].repeats == 2
    assert found["heads"].size == HEADS


def test_names_are_unique_and_say_where_in_words() -> None:
    for name in ("scanned_gpt", "equal_width_mlp", "conv_net", "associative_scan"):
        names = [a.name for a in axes_of(name).axes]
        assert len(set(names)) == len(names)
    assert axis_at("scanned_gpt", "state['layers']['down']", 1).name.startswith("layers.")


@pytest.mark.parametrize("name", list(programs.EVERY))
def test_the_factors_of_a_dimension_multiply_to_its_size(name: str) -> None:
    analysis = subject(name).analysis
    sites = analysis.sites.sites
    known = {a.name: a for a in analysis.axes.axes}
    held = [
        *(
            ((*x.shape, 2) if x.is_key else x.shape, dims)
            for x, dims in zip(analysis.program.inputs, analysis.axes.inputs, strict=True)
        ),
        *((sites[i].shape, dims) for i, dims in analysis.axes.sites.items()),
    ]
    for shape, dims in held:
        assert len(dims) == len(shape)
        for n, dim in zip(shape, dims, strict=True):
            if n > 1:
                assert _size(dim) == n
            for axis, size in dim:
                assert axis is None or size in known[axis].sizes


def test_every_site_knows_its_axes() -> None:
    """No value of a plain transformer step is left to the partitioner."""
    for dims in axes_of("scanned_gpt").sites.values():
        assert all(axis is not None for dim in dims for axis, _ in dim)


def test_an_evaluation_function_has_axes_too() -> None:
    workload = Workload(
        step=lambda state, x: (state, {"y": x @ state["w"]}),
        init=lambda: {"w": programs.normal(0, EMBED, MLP)},
        batch=shaped(BATCH, EMBED),
    )
    assert sizes(analyse(workload).analysis.axes) == sorted([BATCH, EMBED, MLP])


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("scanned_gpt", {"batch", "sequence", "vocab", "embed", "heads", "hidden"}),
        ("unrolled_gpt", {"batch", "sequence", "vocab", "embed", "heads", "hidden"}),
        ("fused_qkv", {"batch", "sequence", "heads", "head_dim"}),
        ("mixture_of_experts", {"batch", "sequence", "experts", "hidden"}),
        ("adamw", {"batch", "hidden"}),
        ("conv_net", {"batch"}),
        ("equal_width_mlp", {"batch"}),
    ],
)
def test_the_data_flow_gives_short_names(name: str, roles: set[str]) -> None:
    labels = [a.label for a in axes_of(name).axes]
    assert {label for label in labels if label.replace("_", "").isalpha()} == roles
    assert len(set(labels)) == len(labels)


def test_roles_name_the_right_axes() -> None:
    found = {a.label: a.size for a in axes_of("unrolled_gpt").axes}
    wanted = {"batch": BATCH, "vocab": VOCAB, "embed": EMBED, "heads": HEADS, "hidden": MLP}
    assert {role: found[role] for role in wanted} == wanted
    assert found["out[1]"] == VOCAB and found["k[2]"] == found["o[1]"] == HEAD_DIM


def test_names_that_the_model_gives_are_labels_too() -> None:
    workload = dataclasses.replace(
        programs.unrolled_gpt(), axis_names={"['emb']": ("tokens", "model")}
    )
    labels = {a.label for a in analyse(workload).analysis.axes.axes}
    assert {"tokens", "model"} <= labels and not {"vocab", "embed"} & labels
