"""Hypothesis strategies for layouts."""

from hypothesis import strategies as st

from autoshard.records.layout import Layout, Whole, Wording, rules

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
    giving_way = st.lists(st.sampled_from(axes), unique=True)
    return Layout(
        mesh=mesh,
        compute=rules(draw(table)),
        storage=rules(draw(table)),
        giving_way=tuple(draw(giving_way)),
        whole=draw(st.sampled_from(Whole)),
        small_replicated=draw(st.booleans()),
        whole_into_loops=draw(st.booleans()),
        wording=draw(st.sampled_from(Wording)),
    )
