"""How often a while loop runs: as the compiler printed it, or read off its counter.

XLA:CPU and XLA:GPU print `known_trip_count`; libtpu 0.0.42 does not, so there the counter is read:
`i` starts at a constant, the body adds a constant, the condition compares it with a constant.
Values are followed through fusions, copies and loop invariants, no further.
"""

from autoshard.rungs.compile.hlo.records import Computation, HloModule, Instruction

_TRANSPARENT = frozenset(("copy", "bitcast", "reshape", "convert", "copy-start", "copy-done"))
_LIMIT = 64

Scope = tuple[Computation, tuple[Instruction, ...], "Scope | None"]
"""A computation, and for a fused one what its parameters are in the scope of its caller."""


def trip_count(module: HloModule, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of `loop` runs, or None where that is unknown.

    Args:
      module: the module of the loop.
      computation: the computation the `while` instruction stands in.
      loop: the `while` instruction.
    """
    if loop.known_trip_count is not None:
        return loop.known_trip_count
    condition = module.find(loop.calls("condition")[0])
    body = module.find(loop.calls("body")[0])
    scope, test = _resolve(module, (condition, (), None), condition.root)
    if test.opcode != "compare":
        return None
    left, right = (_resolve(module, scope, scope[0].find(name)) for name in test.operands)
    direction = test.attribute("direction")
    for counter, limit, order in (
        (left, right, direction),
        (right, left, direction.translate(str.maketrans("LG", "GL"))),
    ):
        index = _carried(*counter)
        if index is None:
            continue
        start = _initial(module, computation, loop, index)
        stop = _constant(limit[1])
        carried = _carried(*limit)
        if stop is None and carried is not None and _invariant(body, carried):
            stop = _initial(module, computation, loop, carried)
        step = _step(module, body, index)
        if start is not None and stop is not None and step:
            return _trips(start, stop, step, order)
    return None


def _trips(start: int, stop: int, step: int, order: str) -> int | None:
    """Runs of `i = start; while i <order> stop: i += step`."""
    if order in ("LE", "GE"):
        stop += 1 if order == "LE" else -1
    if order in ("LT", "LE") and step > 0:
        return max(0, -(-(stop - start) // step))
    if order in ("GT", "GE") and step < 0:
        return max(0, -(-(start - stop) // -step))
    if order == "NE" and (stop - start) % step == 0 and (stop - start) // step >= 0:
        return (stop - start) // step
    return None


def _resolve(module: HloModule, scope: Scope, value: Instruction) -> tuple[Scope, Instruction]:
    """Follows a value through what does not change it, into fusions and out of them."""
    for _ in range(_LIMIT):
        computation, arguments, caller = scope
        if value.opcode == "fusion":
            inner = module.find(value.calls("calls")[0])
            scope = (inner, tuple(computation.find(name) for name in value.operands), scope)
            value = inner.root
        elif value.opcode == "parameter" and caller is not None:
            scope, value = caller, arguments[int(value.literal)]
        elif value.opcode in _TRANSPARENT:
            value = computation.find(value.operands[0])
        else:
            break
    return scope, value


def _carried(scope: Scope, value: Instruction) -> int | None:
    """The index of the loop-carried element that `value` is, if it is one.

    Scan and fori_loop carry tuples: anything else counts as not understood.
    """
    if value.opcode != "get-tuple-element" or scope[2] is not None:
        return None
    if scope[0].find(value.operands[0]).opcode != "parameter":
        return None
    return int(value.attribute("index"))


def _constant(value: Instruction) -> int | None:
    try:
        return int(value.literal) if value.opcode == "constant" else None
    except ValueError:
        return None


def _initial(
    module: HloModule, computation: Computation, loop: Instruction, index: int
) -> int | None:
    """The value of a carried element before the first iteration, if it is a constant."""
    operand = computation.find(loop.operands[0])
    if operand.opcode != "tuple":
        return None
    scope: Scope = (computation, (), None)
    return _constant(_resolve(module, scope, computation.find(operand.operands[index]))[1])


def _invariant(body: Computation, index: int) -> bool:
    if body.root.opcode != "tuple":
        return False
    return _carried((body, (), None), body.find(body.root.operands[index])) == index


def _step(module: HloModule, body: Computation, index: int) -> int | None:
    """What one iteration adds to a carried element, if it is a constant."""
    if body.root.opcode != "tuple":
        return None
    outer: Scope = (body, (), None)
    scope, value = _resolve(module, outer, body.find(body.root.operands[index]))
    if value.opcode not in ("add", "subtract"):
        return None
    parts = [_resolve(module, scope, scope[0].find(name)) for name in value.operands]
    sign = -1 if value.opcode == "subtract" else 1
    for counter, amount in (parts, parts[::-1]) if sign > 0 else (parts,):
        step = _constant(amount[1])
        if _carried(*counter) == index and step is not None:
            return sign * step
    return None
