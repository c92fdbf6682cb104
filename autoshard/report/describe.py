"""The ranked table of a plan, as plain text."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from autoshard.records.evidence import PlanSummary
from autoshard.records.layout import Constraints
from autoshard.records.trial import Estimate, Failure, Measurement, Stage, Trial, relative_time
from autoshard.records.words import (
    Unit,
    figure,
    folded,
    mesh_in_words,
    rules_in_words,
    seconds,
    size_unit,
    time_unit,
    traffic_in_words,
)
from autoshard.report.explain import explain, numerics

_LONGEST = 12
_MOST_PATHS = 2
_UNFINISHED = {
    "interrupted": "The search was interrupted: this is the best so far.",
    "out of time": "The time limit ended the search: this is the best so far.",
    "cut short": "These parts had spent their share of the time limit: this is the best so far.",
}


def describe(plan: PlanSummary) -> str:
    """Everything a person wants to see of a plan: table, rules, reason, numerics, notes."""
    evidence = plan.evidence
    names = plan.labels
    shown = _shown(evidence.trials, evidence.ranking)
    lines = [f"Plan for {evidence.target or plan.target} ({evidence.ended})"]
    lines += [words for how, words in _UNFINISHED.items() if evidence.ended.startswith(how)]
    lines += [*_table(shown, evidence.memory_limit_bytes), "", "Rules:"]
    lost: dict[str, dict[str, list[int]]] = {}
    warned: dict[str, None] = {}
    for number, trial in enumerate(shown, 1):
        name, layout = trial.baseline or "found", trial.candidate.layout
        lines.append(f"  {number:>2} {name}: {rules_in_words(layout, names)}")
        for sentence in trial.estimate.dropped if trial.estimate else ():
            where, _, why = sentence.rpartition("]: ")
            lost.setdefault(why, {}).setdefault(f"{where}]" if where else "", []).append(number)
        for warning in trial.compiled.warnings if isinstance(trial.compiled, Estimate) else ():
            warned.setdefault(f"  {number:>2} {warning}")
        failure = trial.failure
        if failure is not None:
            lines.append(
                f"     failed in {failure.stage}: {failure.kind}, {_first(failure.message)}"
            )
    lines += _listed("Dropped for divisibility:", _lost(lost, names))
    lines += _listed("Bad reshards that the partitioner warned of:", list(warned))
    if plan.trial is not None and plan.trial.estimate is not None:
        lines += _told(plan.trial.estimate)
    lines += ["", explain(plan), numerics(plan)]
    winner = plan.trial
    if winner and isinstance(winner.profiled, Measurement) and winner.profiled.devices:
        devices = winner.profiled.devices
        n = len(devices)
        lines.append(
            "Where a device's step goes (mean of "
            f"{n}): compute {seconds(sum(d.compute_s for d in devices) / n)}, communication"
            f" {seconds(sum(d.communication_s for d in devices) / n)}, idle"
            f" {seconds(sum(d.idle_s for d in devices) / n)}."
        )
    lines += [f"Note: {note}" for note in evidence.notes]
    counts = [
        f"{evidence.candidates} candidates",
        f"{sum(t.was_compiled for t in evidence.trials)} compiled",
        f"{sum(isinstance(t.profiled, Measurement) for t in evidence.trials)} measured",
    ]
    if failed := sum(isinstance(t.profiled, Failure) for t in evidence.trials):
        counts.append(f"{failed} failed as they ran")
    spent = ", ".join(f"{name} {value:.1f} s" for name, value in evidence.elapsed_s.items())
    lines.append(f"Search: {', '.join(counts)}; {spent}.")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """What the rows of one table share.

    Attributes:
      fastest: the measurement that others are compared with, if the first row has one.
      knobs: whether any row has knobs.
    """

    time: Unit
    size: Unit
    limit_bytes: int
    fastest: Measurement | None
    knobs: bool

    @property
    def head(self) -> tuple[str, ...]:
        measured = (f"measured {self.time[1]} (25-75 %)", "x best") if self.fastest else ()
        return (
            *("#", "layout", "mesh"),
            *(("knobs",) if self.knobs else ()),
            *measured,
            f"predicted {self.time[1]}",
            f"memory {self.size[1]}",
            f"sent {self.size[1]} a step",
        )

    def row(self, number: int, trial: Trial) -> tuple[str, ...]:
        estimate = trial.estimate
        unsure = "" if isinstance(trial.compiled, Estimate) else "~"
        peak = estimate.peak_memory_bytes if estimate else 0
        return (
            str(number),
            trial.baseline or "found",
            mesh_in_words(trial.candidate.layout),
            *((" ".join(f"{k}={v}" for k, v in trial.candidate.knobs),) if self.knobs else ()),
            *(self._measured(trial) if self.fastest else ()),
            unsure + figure(estimate.time_s, self.time) if estimate else "-",
            (unsure + figure(peak, self.size) if estimate else "-")
            + (" !" if peak > self.limit_bytes else ""),
            unsure + traffic_in_words(estimate.bytes_by_kind(), self.size) if estimate else "-",
        )

    def _measured(self, trial: Trial) -> tuple[str, str]:
        """The step time by the rounds that the fastest ran too, its spread, and the ratio.

        The time is the fastest's median times the ratio. The spread is that of all samples about
        their own median: their rounds may have been slower or faster ones.
        """
        found, fastest = trial.profiled, self.fastest
        if not isinstance(found, Measurement) or fastest is None:
            return "-", "-"
        ratio = relative_time(fastest, found)
        quartiles = (found.quantile_s(q) / found.median_s for q in (0.25, 0.75))
        time_s = ratio * fastest.median_s
        spread = "-".join(figure(q * time_s, self.time) for q in quartiles)
        return f"{figure(time_s, self.time)} ({spread})", f"{ratio:.2f}"


def _table(shown: Sequence[Trial], limit_bytes: int) -> list[str]:
    """The memory limit, what the marks mean, and the table, best first."""
    estimates = [t.estimate for t in shown if t.estimate]
    measured = [t.profiled for t in shown if isinstance(t.profiled, Measurement)]
    first = shown[0].profiled if shown else None
    columns = _Columns(
        time=time_unit([*(e.time_s for e in estimates), *(m.median_s for m in measured)]),
        size=size_unit(e.peak_memory_bytes for e in estimates),
        limit_bytes=limit_bytes,
        fastest=first if isinstance(first, Measurement) else None,
        knobs=any(trial.candidate.knobs for trial in shown),
    )
    rows = [columns.row(number, trial) for number, trial in enumerate(shown, 1)]
    over = any(e.peak_memory_bytes > limit_bytes for e in estimates)
    lines = [
        f"Memory limit: {figure(limit_bytes, columns.size)} {columns.size[1]} a device"
        + (" (! is above it)" if over else "")
    ]
    if any(cell.startswith("~") for row in rows for cell in row):
        lines.append("~ is an estimate of rung 1 alone: that layout was not compiled")
    table = [columns.head, *rows]
    widths = [max(len(row[c]) for row in table) for c in range(len(columns.head))]
    return [
        *lines,
        "",
        *(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in table
        ),
    ]


def _told(estimate: Estimate) -> list[str]:
    """What a prediction leaves out, and what it takes for granted."""
    left_out = [
        f"     {what}" + (f": {share:.1%} of the predicted step" if share else "")
        for what, share in sorted(estimate.unmodelled, key=lambda pair: -pair[1])
    ]
    return [
        *_listed("Not modelled in the winner's prediction:", left_out),
        *_listed(
            "Assumed in the winner's prediction:",
            [f"     {sentence}" for sentence in estimate.assumptions],
        ),
    ]


def _lost(found: Mapping[str, Mapping[str, list[int]]], names: Mapping[str, str]) -> list[str]:
    """One line for each reason: the rows, the reason, and the first arrays.

    Args:
      found: reason -> array -> rows.
    """
    lines = []
    for why, arrays in found.items():
        numbers = sorted({number for rows in arrays.values() for number in rows})
        axis, _, rest = why.partition(" ")
        where = folded(list(filter(None, arrays)), _MOST_PATHS)
        said = f"{names.get(axis, axis)} {rest}" + (f": {where}" if where else "")
        lines.append(f"  {_ranges(numbers)} {said}")
    return lines


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, with those in a row as a range.

    >>> _ranges([1, 2, 3, 7])
    '1-3, 7'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found)


def _listed(head: str, lines: list[str]) -> list[str]:
    """A section of at most `_LONGEST` lines; nothing if there are none."""
    if not lines:
        return []
    more = [f"     and {len(lines) - _LONGEST} more"] if len(lines) > _LONGEST else []
    return ["", head, *lines[:_LONGEST], *more]


def _shown(trials: tuple[Trial, ...], ranking: tuple[int, ...]) -> list[Trial]:
    """The finalists, best first, then each baseline that is not among them once, then failures.

    A layout that was compiled with several sets of constraints has one row: the fastest.
    """
    chosen = [trials[i] for i in ranking]
    names = {t.baseline for t in chosen if t.baseline}
    judged = [t for t in trials if (t.compiled is not None or t.baseline) and t not in chosen]
    judged.sort(key=lambda t: (t.failure is not None, t.estimate.time_s if t.estimate else 0.0))
    for trial in judged:
        if trial.baseline and trial.baseline not in names:
            names.add(trial.baseline)
            chosen.append(trial)
        elif trial.failure is not None and trial.failure.stage is not Stage.PROPAGATE:
            chosen.append(trial)
    rows: dict[object, Trial] = {}
    for trial in chosen:
        rows.setdefault(trial.candidate.with_constraints(Constraints.USUAL), trial)
    return list(rows.values())


def _first(message: str) -> str:
    return message.strip().splitlines()[0][:160] if message.strip() else ""
