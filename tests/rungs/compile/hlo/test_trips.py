"""Trip counts: what the compiler printed and what the counter says agree."""

import re

import jax
import jax.numpy as jnp
import pytest

from autoshard.rungs.compile.hlo import HloModule, parse, trip_count

X = jax.ShapeDtypeStruct((16, 16), jnp.float32)

# As libtpu prints a scan: no known_trip_count; here the limit is carried as a loop invariant.
LOOP = """\
HloModule jit_f, is_scheduled=true

%step (n: s32[], d: s32[]) -> s32[] {{
  %n = s32[] parameter(0)
  %d = s32[] parameter(1)
  ROOT %add.9 = s32[] {op}(%n, %d)
}}

%body (arg: (s32[], s32[])) -> (s32[], s32[]) {{
  %arg = (s32[]{{:T(128)}}, s32[]{{:T(128)}}) parameter(0)
  %c = s32[]{{:T(128)}} constant({step})
  %limit = s32[]{{:T(128)}} get-tuple-element(%arg), index=1
  %i = s32[]{{:T(128)}} get-tuple-element(%arg), index=0
  %next = s32[]{{:T(128)}} fusion(%i, %c), kind=kLoop, calls=%step
  ROOT %out = (s32[]{{:T(128)}}, s32[]{{:T(128)}}) tuple(%next, %{carried})
}}

%cond (arg.1: (s32[], s32[])) -> pred[] {{
  %arg.1 = (s32[]{{:T(128)}}, s32[]{{:T(128)}}) parameter(0)
  %limit.1 = s32[]{{:T(128)}} get-tuple-element(%arg.1), index=1
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[]{{:T(512)}} compare({sides}), direction={direction}
}}

ENTRY %main (p: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %start = s32[] constant({start})
  %copied = s32[] copy(%start)
  %stop = s32[] constant({stop})
  %tuple = (s32[], s32[]) tuple(%{first}, %stop)
  %while.1 = (s32[]{{:T(128)}}, s32[]{{:T(128)}}) while(%tuple), condition=%cond, body=%body
  ROOT %r = s32[] get-tuple-element(%while.1), index=0
}}
"""
DEFAULTS = {
    "op": "add", "step": 1, "carried": "limit", "sides": "%i.1, %limit.1", "direction": "LT",
    "start": 0, "stop": 5, "first": "copied",
}  # fmt: skip


def trips_of(module: HloModule) -> list[int | None]:
    return [
        trip_count(module, computation, i)
        for computation in module.computations
        for i in computation.instructions
        if i.opcode == "while"
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5),
        ({"start": 2, "step": 2}, 2),
        ({"direction": "LE"}, 6),
        ({"direction": "NE"}, 5),
        ({"direction": "NE", "step": 2}, None),
        ({"sides": "%limit.1, %i.1", "direction": "GT"}, 5),
        ({"start": 9, "stop": -1, "op": "subtract", "direction": "GT"}, 10),
        ({"start": 9, "stop": 0, "step": -3, "direction": "GE"}, 4),
        ({"start": 7}, 0),
        ({"direction": "GT"}, None),
        ({"carried": "next"}, None),
        ({"first": "p"}, None),
        ({"op": "multiply"}, None),
        ({"step": 0}, None),
    ],
)
def test_the_counter_is_read_where_no_count_is_printed(changes, expected):
    assert trips_of(parse(LOOP.format(**(DEFAULTS | changes)))) == [expected]


def scan(x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, jnp.zeros((6, 16, 16)))


def nested(x):
    def inner(x):
        return jax.lax.fori_loop(2, 5, lambda i, x: jnp.sin(x @ x) + i, x)

    return jax.lax.scan(lambda c, w: (inner(c) + w, c), x, jnp.ones((7, 16, 16)))


def count_down(x):
    def step(c):
        return c[0] - 3, jnp.cos(c[1] @ c[1])

    return jax.lax.while_loop(lambda c: c[0] >= 0, step, (20, x))


@pytest.mark.parametrize(("f", "expected"), [(scan, {6}), (nested, {3, 7}), (count_down, {7})])
def test_printed_and_read_counts_agree_on_compiled_loops(f, expected):
    text = jax.jit(f).lower(X).compile().as_text()
    assert set(trips_of(parse(text))) == expected
    bare = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"x":0', text)
    assert "known_trip_count" in text and "known_trip_count" not in bare
    assert set(trips_of(parse(bare))) == expected


def test_a_loop_on_data_has_no_count(compile_hlo):
    module = compile_hlo(
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.sin(c @ c), x), X
    )
    assert trips_of(module) == [None]
