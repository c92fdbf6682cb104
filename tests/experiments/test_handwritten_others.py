"""The hand-written layouts of other models than text compute what their workloads do."""

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.handwritten import steps, train_steps
from experiments.handwritten.layouts import Rules
from experiments.zoo.cases import case
from tests.compiled import compiled
from tests.experiments import hand_layouts
from tests.experiments.hand_layouts import compiled_layout, gathered, of, sent, specs


@pytest.mark.parametrize(("name", "layout"), hand_layouts.every(hand_layouts.OTHERS))
def test_a_layout_computes_what_the_workload_does(name, layout):
    hand_layouts.check(name, layout)


def test_gathers_are_found_where_there_are_some():
    assert gathered("mlp", "fsdp x tensor parallel 4x2")


def test_divided_tables_are_not_gathered():
    first, last = "['params']['tables'][0]", "['params']['tables'][6]"  # 4096 rows, and 3
    columns = "tables by columns, exchanged at once"
    by_rows, by_columns = (specs("recommender", x) for x in ("tables by rows", columns))
    assert (by_rows[first][2], by_rows[last][2]) == (P("data", None), P(None, None))
    assert (by_columns[first][2], by_columns[last][2]) == (P(None, "data"), P(None, "data"))
    large = of("recommender").config.table_rows[0]
    assert not any(large in shape for shape in gathered("recommender", "tables by rows"))
    assert not gathered("recommender", columns)


def test_what_tables_found_is_exchanged_at_once():
    """Vectors of all of them, there and back, and those that the dense features give."""
    counts = [
        n
        for kind, n in sent("recommender", "tables by columns, exchanged at once")
        if kind == "all_to_all"
    ]
    assert len(of("recommender").config.table_rows) == 7
    assert 2 <= sum(counts) <= 4


def test_divided_edges_need_one_sum_for_each_round_of_messages():
    """And one of gradients; batch statistics, which data parallelism sums, are whole everywhere."""
    assert not gathered("graph_network", "edge parallel")
    text = compiled_layout("graph_network", "edge parallel")[1].as_text()
    rounds = of("graph_network").config.layers
    assert rounds <= len(re.findall(r" all-reduce(?:-start)?\(", text)) <= 2 * rounds


def test_rows_of_an_image_are_exchanged_at_the_border():
    prepared, step = compiled_layout("resnet50", "data x spatial 4x2")
    assert prepared.batch["image_BHWC"].spec == P("data", "space", None, None)
    assert "collective-permute" in step.as_text()


def test_pixels_that_look_at_others_are_divided_with_their_rows():
    """Scores of a device's rows with all rows, for its half of the batch: nothing is done twice."""
    chosen = of("unet")
    attended = set()
    laid = Rules.on(steps.hand_steps(chosen, 8)["data x spatial 4x2"], jax.devices())

    def noting(x, names):
        if names[1:] in (("queries", "hidden"), (None, "hidden")):
            attended.add((names[1], laid.activation(names, x.shape).spec))
        return x

    step, init = train_steps.train_step(chosen, noting)
    jax.eval_shape(step, jax.eval_shape(init), chosen.batch())
    assert attended == {("queries", P("data", "space", None)), (None, P("data", None, None))}


def test_a_divided_optimizer_is_no_more_than_an_eighth_and_gathers_each_parameter_once():
    name, layout = "mlp", "data parallel, optimizer divided"
    leaves = specs(name, layout)
    assert all(part == shape for path, (shape, part, _) in leaves.items() if "['params']" in path)
    moments = [(x, part) for path, (x, part, _) in leaves.items() if ".mu" in path or ".nu" in path]
    assert all(math.prod(shape) == 8 * math.prod(part) for shape, part in moments)
    chosen = case(name, "small")
    prepared = steps.prepare(chosen, steps.hand_steps(chosen, 8)[layout], jax.devices())
    step = compiled(prepared.step, jax.eval_shape(prepared.init), chosen.batch())
    count = len(re.findall(r" all-gather(?:-start)?\(", step.as_text()))
    assert 0 < count <= len(moments) / 2


def test_a_device_holds_its_share_of_a_fully_sharded_state():
    built = steps.build(case("mlp", "small"), steps.hand_steps(of("mlp"), 8)["fsdp"], jax.devices())
    leaves = jax.tree.leaves(built.state)
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    assert held < 1.001 * sum(x.nbytes for x in leaves) / 8
    state, metrics = built.step(built.state, built.batch)
    assert np.isfinite(metrics["loss"]) and int(state["step"]) == 1
    assert leaves[0].is_deleted()
