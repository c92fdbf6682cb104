"""The progress of a search on a terminal: one bar for each rung."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

import autoshard


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.fields[stage]:>9}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]} {task.description}", markup=False),
        console=console,
    )


def show_on(progress: Progress) -> Callable[[autoshard.Event], None]:
    """A search callback: one bar for each rung that the search has reached."""
    bars: dict[str, TaskID] = {}

    def show(event: autoshard.Event) -> None:
        if event.stage not in bars:
            bars[event.stage] = progress.add_task("", stage=event.stage, best="")
        progress.update(
            bars[event.stage],
            completed=event.done,
            total=event.total,
            description=event.text,
            best="" if event.best_s is None else f"best {event.best_s:.3f} s",
        )

    return show
