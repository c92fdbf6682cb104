"""Which copies and transposes take elements out of their cache lines, read off compiled text."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.hlo import HloModule, parse
from autoshard.hlo.steps import Launch, Steps
from autoshard.hlo.transposes import transposed

pytestmark = pytest.mark.usefixtures("no_line_is_kept")

FUSED = """HloModule m, is_scheduled=true

%f (p: {source}) -> {made} {{
  %p = {source} parameter(0)
  ROOT %c = {made} {operation}
}}

ENTRY %main (x: {source}) -> {made} {{
  %x = {source} parameter(0)
  ROOT %fusion = {made} fusion(%x), kind=kLoop, calls=%f
}}
"""


def moved(source: str, made: str, operation: str) -> int:
    module = parse(FUSED.format(source=source, made=made, operation=operation))
    body = module.find("f")
    return transposed(body.root, body, True)[0]


@pytest.mark.parametrize(
    ("source", "made", "operation", "elements"),
    [
        # Another order of the same dimensions.
        ("f32[40,50]{0,1}", "f32[40,50]{1,0}", "copy(%p)", 2000),
        ("f32[40,50]{1,0}", "f32[40,50]{1,0}", "copy(%p)", 0),
        # Other dimensions in the same order, and the other way round.
        ("f32[40,50]{1,0}", "f32[50,40]{1,0}", "transpose(%p), dimensions={1,0}", 2000),
        ("f32[40,50]{1,0}", "f32[50,40]{0,1}", "transpose(%p), dimensions={1,0}", 0),
        ("f32[40,3,50]", "f32[3,50,40]", "transpose(%p), dimensions={1,2,0}", 6000),
        ("f32[40,3,50]", "f32[3,40,50]", "transpose(%p), dimensions={1,0,2}", 0),
        # However few lie in a row.
        ("f32[2,50]{1,0}", "f32[50,2]{1,0}", "transpose(%p), dimensions={1,0}", 100),
        ("bf16[32,50]{1,0}", "bf16[50,32]{1,0}", "transpose(%p), dimensions={1,0}", 1600),
        # Dimensions of one element lie nowhere.
        ("f32[40,1]{1,0}", "f32[40,1]{0,1}", "copy(%p)", 0),
        ("f32[40,1,50]{1,0,2}", "f32[40,1,50]{2,1,0}", "copy(%p)", 2000),
        ("f32[]", "f32[]", "copy(%p)", 0),
        ("f32[40,50]{1,0}", "f32[40,50]{1,0}", "negate(%p)", 0),
    ],
)
def test_elements_that_leave_their_lines(
    source: str, made: str, operation: str, elements: int
) -> None:
    assert moved(source, made, operation) == elements


def launched(module: HloModule) -> list[float]:
    steps = Steps(module, (("x", 1),)).of(module.entry)
    return [step.work.transposed for step in steps if isinstance(step, Launch)]


def test_a_launch_counts_what_is_fused_into_it() -> None:
    text = FUSED.format(
        source="f32[40,50]{1,0}",
        made="f32[50,40]{1,0}",
        operation="transpose(%p), dimensions={1,0}",
    )
    assert launched(parse(text)) == [2000.0]


def test_a_copy_by_itself_counts_too() -> None:
    text = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[40,50]) -> f32[40,50] {
  %x = f32[40,50]{1,0} parameter(0)
  ROOT %c = f32[40,50]{0,1} copy(%x)
}
"""
    assert launched(parse(text)) == [2000.0]


def test_a_copy_fused_with_the_product_that_reads_it_is_not_made(  # type: ignore[no-untyped-def]
    compile_hlo,
) -> None:
    x, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1128), (376, 1128)))
    module = compile_hlo(lambda x, w: jnp.tanh(x @ w.T), x, weights)
    opcodes = [{i.opcode for i in c.instructions} for c in module.computations]
    assert any({"copy", "dot"} <= found for found in opcodes)  # fused: XLA's loop for one row
    assert sum(launched(module)) == 0.0


@pytest.mark.parametrize(("contracted", "elements"), [(1, 0), (0, 2000)])
def test_a_fused_product_reads_in_order_what_lies_densest(contracted: int, elements: int) -> None:
    length, rest = (50, 40) if contracted else (40, 50)
    text = f"""HloModule m, is_scheduled=true

%f (p: f32[40,50], v: f32[{length}]) -> f32[{rest}] {{
  %p = f32[40,50]{{1,0}} parameter(0)
  %v = f32[{length}]{{0}} parameter(1)
  %c = f32[40,50]{{0,1}} copy(%p)
  ROOT %d = f32[{rest}]{{0}} dot(%v, %c), lhs_contracting_dims={{0}}, rhs_contracting_dims={{{contracted}}}
}}

ENTRY %main (x: f32[40,50], y: f32[{length}]) -> f32[{rest}] {{
  %x = f32[40,50]{{1,0}} parameter(0)
  %y = f32[{length}]{{0}} parameter(1)
  ROOT %fusion = f32[{rest}]{{0}} fusion(%x, %y), kind=kLoop, calls=%f
}}
"""
    body = parse(text).find("f")
    assert transposed(body.find("c"), body, True)[0] == elements


def test_compiled_for_cpu(compile_hlo) -> None:  # type: ignore[no-untyped-def]
    x = jax.ShapeDtypeStruct((40, 50), jnp.float32)
    assert sum(launched(compile_hlo(lambda x: x.T + 1.0, x))) == 2000.0
    assert sum(launched(compile_hlo(lambda x: x + 1.0, x))) == 0.0
