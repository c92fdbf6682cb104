"""Numbers and layouts in words."""

from autoshard.records.layout import Layout, Whole, Wording

_WHOLE = {
    Whole.SMALL: "small arrays as computed",
    Whole.ONCE: "parameters gathered once",
    Whole.USED: "parameters as computed",
}


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


def mesh_in_words(layout: Layout) -> str:
    if not layout.mesh:
        return "1 device"
    return " ".join(f"{name}={size}" for name, size in layout.mesh)


def rules_in_words(layout: Layout) -> str:
    """`batch over x; store embed over x`: compute rules, then what storage adds or takes away."""
    if layout.as_written:
        return "the step's own constraints"
    compute, storage = dict(layout.compute), dict(layout.storage)
    parts = [f"{axis} over {'+'.join(to)}" for axis, to in layout.compute]
    more = [f"{axis} over {'+'.join(to)}" for axis, to in layout.storage if compute.get(axis) != to]
    if more:
        parts.append("store " + ", ".join(more))
    whole = [a for a in compute if a not in storage and not a.startswith("batch")]
    if whole:
        parts.append("store " + ", ".join(whole) + " whole")
    if layout.whole is not Whole.NOTHING:
        parts.append(_WHOLE[layout.whole])
    if layout.small_replicated:
        parts.append("small arrays replicated")
    if layout.whole_into_loops:
        parts.append("activations whole into loops")
    if layout.wording is not Wording.LEAN:
        parts.append(f"wording: {layout.wording}")
    parts += [f"{axis} gives way" for axis in layout.giving_way]
    return "; ".join(parts) or "everything replicated"


def traffic_in_words(bytes_by_kind: dict[str, int]) -> str:
    """`all-gather 3.1 MiB, all-reduce 2.0 MiB`; "nothing" where nothing is sent."""
    found = sorted(bytes_by_kind.items(), key=lambda kv: -kv[1])
    return (
        ", ".join(f"{kind.replace('_', '-')} {mebibytes(n)}" for kind, n in found if n) or "nothing"
    )
