"""The plots of the benchmark, drawn from its JSON files."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.fidelity_parts import leave_out
from experiments.fidelity_parts.report import Key, Parts, observations

_COLUMNS = 6


def draw(results: Mapping[Key, Parts], summary: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Writes `predicted.png` and `regret.png`, where there is anything to draw."""
    import matplotlib

    matplotlib.use("Agg")
    measured = {
        key: sample
        for key, parts in results.items()
        if (sample := parts.get("sample")) and not sample["failed"]
    }
    if measured:
        _predicted(measured, folder / "predicted.png")
        _regrets(summary, folder / "regret.png")


def _predicted(measured: Mapping[Key, dict[str, Any]], path: pathlib.Path) -> None:
    """Rung 2's prediction against the measured time of every program, a pane for each case."""
    from matplotlib import pyplot, ticker

    columns = min(_COLUMNS, len(measured))
    lines = math.ceil(len(measured) / columns)
    figure, panes = pyplot.subplots(
        lines, columns, figsize=(2.6 * columns, 2.6 * lines), squeeze=False
    )
    factors = {}
    for count in {count for _, count in measured}:
        own = [s for (_, n), s in measured.items() if n == count]
        seen = [one for sample in own for one in observations(sample, "rung2")]
        factors[count] = leave_out.factors_without(seen) or dict.fromkeys(
            {one.family for one in seen}, leave_out.fit(seen)
        )
    for pane in panes.flat[len(measured) :]:
        pane.axis("off")
    for pane, ((case, count), sample) in zip(panes.flat, measured.items(), strict=False):
        seen = observations(sample, "rung2")
        real = [1e3 * one.measured_s for one in seen]
        said = [1e3 * one.predicted_s(factors[count][one.family]) for one in seen]
        pane.loglog(real, said, ".", markersize=4)
        ends = [min(real, default=1.0), max(real, default=1.0)]
        pane.loglog(ends, ends, ":", color="grey")
        plan = [i for i, one in enumerate(seen) if one.name == sample["plan"]]
        pane.loglog([real[i] for i in plan], [said[i] for i in plan], "r*", markersize=7)
        pane.set_title(f"{case}, {count} devices", fontsize=8)
        pane.tick_params(labelsize=6, which="both")
        for axis in (pane.xaxis, pane.yaxis):
            axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
            axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axis.set_minor_formatter(ticker.NullFormatter())
    figure.supxlabel("measured, milliseconds a step; the plan is red", fontsize=8)
    figure.supylabel("rung 2, calibrated on others", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _regrets(summary: Mapping[str, Any], path: pathlib.Path) -> None:
    """Regret of each case with its interval, and the goal for the worst."""
    from matplotlib import pyplot

    rows = [row for row in summary["rows"] if (row["sample"] or {}).get("regret") is not None]
    figure, pane = pyplot.subplots(figsize=(7, 1.5 + 0.25 * len(rows)))
    values = [100 * row["sample"]["regret"] for row in rows]
    ends = [(row["sample"]["low"], row["sample"]["high"]) for row in rows]
    below = [max(0.0, value - 100 * low) for value, (low, _) in zip(values, ends, strict=True)]
    above = [max(0.0, 100 * high - value) for value, (_, high) in zip(values, ends, strict=True)]
    if rows:
        pane.barh(range(len(rows)), values, xerr=[below, above], ecolor="black", capsize=2)
    pane.set_yticks(
        range(len(rows)), [f"{row['case']}, {row['devices']}" for row in rows], fontsize=7
    )
    pane.invert_yaxis()
    pane.axvline(5, linestyle=":", color="red")
    pane.set_xlabel("regret, % of the step time, fresh pairs; 95 % interval")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
