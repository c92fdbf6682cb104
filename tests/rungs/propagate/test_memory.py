"""Which values share a buffer: loops by hand, as XLA assigns them."""

from autoshard.rungs.propagate.memory import Values, assign
from autoshard.rungs.propagate.operations import Loop


def values(count: int, touches: dict[int, list[int]], **given: object) -> Values:
    """`count` written values, each made at the position of its number."""
    fields: dict[str, object] = {
        "position": list(range(count)),
        "written": [True] * count,
        "argument": [False] * count,
        "constraint": [False] * count,
        "source": [-1] * count,
        "elementwise": [False] * count,
        "touches": [touches.get(v, []) for v in range(count)],
        **given,
    }
    return Values(**fields)  # type: ignore[arg-type]


def loop(initial: int, carry: int, returned: int, end: int) -> Loop:
    return Loop(
        start=carry,
        end=end,
        carries=(carry,),
        initial=(initial,),
        returned=(returned,),
    )


def test_a_value_that_only_a_loop_uses_gives_its_buffer_to_it() -> None:
    buffer, last = assign(values(3, {0: [1], 1: [9]}), [loop(0, 1, 2, end=5)])
    assert buffer[1] == 0 and last[0] == 9


def test_a_value_that_is_used_after_the_loop_is_copied() -> None:
    buffer, last = assign(values(3, {0: [1, 8]}), [loop(0, 1, 2, end=5)])
    assert buffer[1] == 1 and last[1] == 5 and last[0] == 8


def test_what_a_loop_only_reads_is_never_copied() -> None:
    buffer, last = assign(values(3, {0: [1, 8]}), [loop(0, 1, 1, end=5)])
    assert buffer[1] == 0 and last[0] == 8


def test_a_value_cannot_be_given_twice() -> None:
    one = Loop(start=1, end=5, carries=(1, 2), initial=(0, 0), returned=(3, 4))
    buffer, _ = assign(values(5, {0: [1]}), [one])
    assert [buffer[v] for v in (1, 2)] == [0, 2]


def test_two_loops_in_a_row_hand_one_buffer_on() -> None:
    loops = [loop(0, 1, 2, end=2), loop(1, 3, 4, end=4)]
    buffer, last = assign(values(5, {0: [1], 1: [3], 3: [7]}), loops)
    assert buffer[1] == buffer[3] == 0 and last[0] == 7


def test_what_an_iteration_returns_is_written_over_what_it_was_given() -> None:
    elementwise = [False, False, True, False]
    read_by_itself = values(4, {0: [1], 1: [2]}, elementwise=elementwise)
    assert assign(read_by_itself, [loop(0, 1, 2, end=3)])[0][2] == 0
    read_by_a_product = values(4, {0: [1], 1: [2]})
    assert assign(read_by_a_product, [loop(0, 1, 2, end=3)])[0][2] == 2
    read_later = values(4, {0: [1], 1: [2, 3]}, elementwise=elementwise)
    buffer, last = assign(read_later, [loop(0, 1, 2, end=3)])
    assert buffer[2] == 2 and last[2] == 3


def test_an_update_in_place_lies_in_what_it_updates() -> None:
    buffer, _ = assign(values(4, {0: [1]}, source=[-1, -1, 1, -1]), [loop(0, 1, 2, end=3)])
    assert buffer[2] == 0


def test_a_constraint_has_needs_of_its_own() -> None:
    of = values(3, {0: [1], 1: [2]}, source=[-1, 0, -1], constraint=[False, True, False])
    buffer, last = assign(of, [])
    assert buffer[:2] == [0, 1] and last[:2] == [1, 2]
