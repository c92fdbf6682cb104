"""Why no plan can be returned, and what would help, in words."""

from collections.abc import Sequence

from autoshard.driver import Found, Subject
from autoshard.report.words import mebibytes, mesh_in_words, rules_in_words
from autoshard.target import Target
from autoshard.trial import Estimate, Failure, Kind, Rung, Trial


def why_no_plan(found: Found, subjects: Sequence[Subject], target: Target, limit_bytes: int) -> str:
    """The message of the error: how far the closest candidate is, what would make it fit."""
    if not found.trials and found.ended == "interrupted":
        return "interrupted before a layout was judged"
    if not found.trials:
        return "there is no layout to judge: fix, mesh_shape and divisibility leave none"
    failures = [t.profiled for t in found.trials if isinstance(t.profiled, Failure)]
    if failures and all(f.kind is Kind.NUMERICS for f in failures):
        return (
            "no candidate computes what the unsharded step computes:"
            + "".join(f"\n  {f.message.splitlines()[0]}" for f in failures[:4])
            + "\nCheck the step on one device first: non-finite values there stay non-finite."
        )
    judged = [(t, i, e) for i, t in enumerate(found.trials) if (e := _known(t)) is not None]
    too_large = [x for x in judged if x[2].peak_memory_bytes > limit_bytes]
    if not judged or not too_large:
        kinds: dict[str, int] = {}
        example = ""
        for trial in found.trials:
            if trial.failure is not None:
                kinds[trial.failure.kind] = kinds.get(trial.failure.kind, 0) + 1
                example = example or trial.failure.message
        told = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        return f"every candidate failed ({told or 'none was judged'}); the first: {example[:500]}"
    trial, index, estimate = min(
        too_large, key=lambda x: (x[2].rung is not Rung.COMPILE, x[2].peak_memory_bytes)
    )
    missing = estimate.peak_memory_bytes - limit_bytes
    layout = trial.candidate.layout
    lines = [
        f"no layout fits {mebibytes(limit_bytes)} a device on {target.describe()}"
        f" ({target.memory_source}, headroom taken off).",
        f"The closest needs {mebibytes(estimate.peak_memory_bytes)}, {mebibytes(missing)} too much"
        f" (state {mebibytes(estimate.state_bytes)}): mesh {mesh_in_words(layout)},"
        f" {rules_in_words(layout)}, knobs {dict(trial.candidate.knobs)}.",
        "It would fit with:",
    ]
    program = subjects[found.subject[index]].analysis.program
    working = estimate.peak_memory_bytes - estimate.state_bytes
    room = limit_bytes - estimate.state_bytes
    if room > 0:
        lines.append(
            f"  - a batch of about {max(room / working, 0.0):.2f} of this one"
            " (if what is not state grows with it),"
        )
    factor = estimate.peak_memory_bytes / limit_bytes
    lines.append(
        f"  - about {int(target.device_count * factor) + 1} devices instead of"
        f" {target.device_count} (if everything divides),"
    )
    lines.append(f"  - memory_bytes of at least {_ceil(estimate, limit_bytes, target)},")
    if len(subjects) == 1 and not program.knobs:
        lines.append(
            "  - or a knob that saves memory (remat, gradient accumulation): none was given."
        )
    else:
        lines.append("  - or other knob values than those tried.")
    return "\n".join(lines)


def _known(trial: Trial) -> Estimate | None:
    if isinstance(trial.compiled, Estimate):
        return trial.compiled
    return trial.propagated if isinstance(trial.propagated, Estimate) else None


def _ceil(estimate: Estimate, limit_bytes: int, target: Target) -> int:
    """The device memory whose limit, headroom taken off as here, is the candidate's peak."""
    return 1 - (-estimate.peak_memory_bytes * target.memory_bytes // max(limit_bytes, 1))
