"""Tables on a terminal and on a page of the docs; what misses its goal is red."""

import dataclasses
import pathlib
from collections.abc import Sequence

import rich.table
import rich.text

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
"""What stands between these lines of a page is written by an experiment."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """Text, red where it misses a goal."""

    text: str
    red: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table before anybody knows where it is printed."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def as_rich(table: Table) -> rich.table.Table:
    """For a terminal."""
    found = rich.table.Table(*table.heads, title=table.title)
    for row in table.rows:
        found.add_row(*(rich.text.Text(c.text, style="red" if c.red else "") for c in row))
    return found


def as_markdown(tables: Sequence[Table]) -> str:
    """For a page; a red cell begins with a red disc."""
    parts = []
    for table in tables:
        lines = [f"### {table.title}", "", _line(table.heads), _line(["---"] * len(table.heads))]
        lines += [
            _line([f"\N{LARGE RED CIRCLE} {c.text}" if c.red and c.text else c.text for c in row])
            for row in table.rows
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def put_into(page: pathlib.Path, markdown: str) -> None:
    """Writes tables between the two markers of a page.

    Raises:
      ValueError: the page has no such markers, or not in this order.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"got a page {page} without the lines {BEGIN!r} and {END!r} in this order")
    page.write_text(f"{before}{BEGIN}\n\n{markdown}\n{END}{after}", encoding="utf-8")
