"""The ranked table of a plan, as plain text."""

from autoshard.records.evidence import PlanSummary
from autoshard.records.trial import Estimate, Failure, Measurement, Stage, Trial, paired_ratio
from autoshard.records.words import (
    mebibytes,
    mesh_in_words,
    rules_in_words,
    seconds,
    traffic_in_words,
)
from autoshard.report.explain import explain, numerics

_HEAD = (
    "#",
    "layout",
    "mesh",
    "knobs",
    "predicted",
    "measured (25-75 %)",
    "x winner",
    "memory",
    "sent a step",
)
_LONGEST = 12


def describe(plan: PlanSummary) -> str:
    """Everything a person wants to see of a plan: table, rules, reason, numerics, notes."""
    evidence = plan.evidence
    lines = [f"Plan for {evidence.target or plan.target} ({evidence.ended})", ""]
    shown = _shown(evidence.trials, evidence.ranking)
    rows: list[tuple[str, ...]] = [_HEAD]
    rules: list[str] = []
    dropped: dict[str, None] = {}
    warned: dict[str, None] = {}
    for number, trial in enumerate(shown, 1):
        rows.append(_row(number, trial, shown[0]))
        name = trial.baseline or "found"
        rules.append(f"  {number:>2} {name}: {rules_in_words(trial.candidate.layout)}")
        for sentence in trial.estimate.dropped if trial.estimate else ():
            dropped.setdefault(f"  {number:>2} {sentence}")
        for warning in trial.compiled.warnings if isinstance(trial.compiled, Estimate) else ():
            warned.setdefault(f"  {number:>2} {warning}")
        failure = trial.failure
        if failure is not None:
            rules.append(
                f"     failed in {failure.stage}: {failure.kind}, {_first(failure.message)}"
            )
    widths = [max(len(row[c]) for row in rows) for c in range(len(_HEAD))]
    for row in rows:
        lines.append("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    lines += ["", "Rules:", *rules]
    lines += _listed("Dropped for divisibility:", list(dropped))
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


def _listed(head: str, lines: list[str]) -> list[str]:
    """A section of at most `_LONGEST` lines; nothing if there are none."""
    if not lines:
        return []
    more = [f"     and {len(lines) - _LONGEST} more"] if len(lines) > _LONGEST else []
    return ["", head, *lines[:_LONGEST], *more]


def _shown(trials: tuple[Trial, ...], ranking: tuple[int, ...]) -> list[Trial]:
    """The finalists, best first, then each baseline that is not among them once, then failures."""
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
    return chosen


def _row(number: int, trial: Trial, winner: Trial) -> tuple[str, ...]:
    estimate = trial.estimate
    measured = trial.profiled if isinstance(trial.profiled, Measurement) else None
    spread = (
        f"{seconds(measured.median_s)} ({seconds(measured.quantile_s(0.25))} -"
        f" {seconds(measured.quantile_s(0.75))})"
        if measured
        else "-"
    )
    return (
        str(number),
        trial.baseline or "found",
        mesh_in_words(trial.candidate.layout),
        " ".join(f"{k}={v}" for k, v in trial.candidate.knobs) or "-",
        seconds(estimate.time_s if estimate else None),
        spread,
        _ratio(winner, measured),
        mebibytes(estimate.peak_memory_bytes if estimate else None),
        traffic_in_words(estimate.bytes_by_kind()) if estimate else "-",
    )


def _ratio(winner: Trial, measured: Measurement | None) -> str:
    """Step time over the winner's, from the rounds in which both ran."""
    if not isinstance(winner.profiled, Measurement) or measured is None:
        return "-"
    ratio = paired_ratio(winner.profiled, measured)
    return f"{ratio:.2f}" if ratio is not None else "-"


def _first(message: str) -> str:
    return message.strip().splitlines()[0][:160] if message.strip() else ""
