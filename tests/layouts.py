"""Hypothesis strategies for layouts."""

from hypothesis import strategies as st

from autoshard.records.layout import Constraints, Gather, Layout, rules

AXES = ("batch", "embed", "mlp", "heads")
NAMES = ("x", "y", "z", "w")


@st.composite
def layouts(
    draw: st.DrawFn, axes: tuple[str, ...] = AXES, sizes_of: tuple[int, ...] = (1, 2, 3, 4)
) -> Layout:
    """Any layout on meshes of up to four axes, canonical or not."""
    sizes = draw(st.lists(st.sampled_from(sizes_of), max_size=4))
    mesh = tuple(zip(NAMES, sizes, strict=False))
    names = [name for name, _ in mesh]
    to = st.lists(st.sampled_from(names), unique=True, max_size=3) if names else st.just([])
    table = st.dictionaries(st.sampled_from(axes), to)
    conflict_losers = st.lists(st.sampled_from(axes), unique=True)
    return Layout(
        mesh=mesh,
        activation_rules=rules(draw(table)),
        state_rules=rules(draw(table)),
        conflict_losers=tuple(draw(conflict_losers)),
        gather=draw(st.sampled_from(Gather)),
        small_replicated=draw(st.booleans()),
        gather_loop_inputs=draw(st.booleans()),
        constraints=draw(st.sampled_from(Constraints)),
    )
