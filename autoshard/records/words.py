"""Numbers and layouts in words."""

from collections.abc import Iterable, Mapping, Sequence

from autoshard.records.layout import Constraints, Gather, Layout, Rules

_WHOLE = {
    Gather.SMALL_REPLICATED: "small arrays as computed",
    Gather.PER_STEP: "parameters gathered once",
    Gather.PARAMS_REPLICATED: "parameters as computed",
}
_CONSTRAINTS = {Constraints.USUAL: "usual", Constraints.MINIMAL: "minimal", Constraints.ALL: "all"}
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_SIZES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_MOST_NAMES = 4

Unit = tuple[float, str]
"""Seconds or bytes of one of it, and its name."""


def seconds(value: float | None) -> str:
    """A duration with a unit that keeps three digits readable."""
    if value is None:
        return "-"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.0f} us"


def mebibytes(value: float | None) -> str:
    """A size with the largest binary unit that leaves a whole part."""
    if value is None:
        return "-"
    if value >= 2**30:
        return f"{value / 2**30:.2f} GiB"
    if value >= 2**20:
        return f"{value / 2**20:.1f} MiB"
    return f"{value / 2**10:.0f} KiB" if value >= 2**10 else f"{value:.0f} B"


def time_unit(values_s: Iterable[float]) -> Unit:
    """The unit of a column of durations, by the longest."""
    return _unit(values_s, _TIMES)


def size_unit(values: Iterable[float]) -> Unit:
    """The unit of a column of bytes, by the largest."""
    return _unit(values, _SIZES)


def _unit(values: Iterable[float], units: Sequence[Unit]) -> Unit:
    largest = max(values, default=0.0)
    return next((unit for unit in units if largest >= unit[0]), units[-1])


def figure(value: float | None, unit: Unit) -> str:
    """A number in a unit with three digits or more, without the unit's name.

    >>> [figure(x, (1e-3, "ms")) for x in (0.2817, 0.0123, 0.00123, 4e-6, 0.0, 12.5)]
    ['282', '12.3', '1.23', '0.004', '0', '12,500']
    """
    if value is None:
        return "-"
    number = value / unit[0]
    if number < 0.0005:
        return "<0.001" if number else "0"
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2 if number >= 0.995 else 3
    return f"{number:,.{digits}f}"


def power(value: float) -> str:
    """An error with one digit.

    >>> power(0.0071), power(0.0), power(12.0)
    ('7e-3', '0', '1e1')
    """
    digit, _, exponent = f"{value:.0e}".partition("e")
    return f"{digit}e{int(exponent)}" if value else "0"


def mesh_in_words(layout: Layout) -> str:
    if not layout.mesh:
        return "1 device"
    return " ".join(f"{name}={size}" for name, size in layout.mesh)


def rules_in_words(layout: Layout, names: Mapping[str, str] | None = None) -> str:
    """`batch over x; store embed over x`: compute rules, then what storage adds or takes away.

    Args:
      names: logical axis -> the name to print; other axes are printed as the layout names them.
    """
    if layout.as_annotated:
        return "the step's own constraints"

    def called(axes: Iterable[str]) -> str:
        return folded([(names or {}).get(axis, axis) for axis in axes], _MOST_NAMES)

    def over(table: Rules) -> list[str]:
        by_target: dict[tuple[str, ...], list[str]] = {}
        for axis, to in sorted(table, key=lambda rule: not rule[0].startswith("batch")):
            by_target.setdefault(to, []).append(axis)
        return [f"{called(axes)} over {'+'.join(to)}" for to, axes in by_target.items()]

    compute, storage = dict(layout.activation_rules), dict(layout.state_rules)
    parts = over(layout.activation_rules)
    if more := over(tuple(rule for rule in layout.state_rules if compute.get(rule[0]) != rule[1])):
        parts.append("store " + ", ".join(more))
    whole = [a for a in compute if a not in storage and not a.startswith("batch")]
    if whole:
        parts.append(f"store {called(whole)} whole")
    if layout.gather is not Gather.PER_USE:
        parts.append(_WHOLE[layout.gather])
    if layout.small_replicated:
        parts.append("small arrays replicated")
    if layout.gather_loop_inputs:
        parts.append("activations whole into loops")
    if layout.constraints is not Constraints.USUAL:
        parts.append(f"constraints: {_CONSTRAINTS[layout.constraints]}")
    if layout.conflict_losers:
        way = "give" if len(layout.conflict_losers) > 1 else "gives"
        parts.append(f"{called(layout.conflict_losers)} {way} way")
    return "; ".join(parts) or "everything replicated"


def folded(items: Sequence[str], most: int) -> str:
    """The first of a list, and how many more there are.

    >>> folded(["a", "b", "c"], 3), folded(["a", "b", "c", "d"], 2)
    ('a, b, c', 'a, b and 2 more')
    """
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"


def traffic_in_words(bytes_by_kind: Mapping[str, int], unit: Unit | None = None) -> str:
    """`all-gather 3.1 MiB, all-reduce 2.0 MiB`; "nothing" where nothing is sent.

    Args:
      unit: of all numbers, which then have no unit beside them.
    """
    found = sorted(((kind, n) for kind, n in bytes_by_kind.items() if n), key=lambda kv: -kv[1])
    said = [
        f"{kind.replace('_', '-')} {figure(n, unit) if unit else mebibytes(n)}" for kind, n in found
    ]
    return ", ".join(said) or "nothing"
