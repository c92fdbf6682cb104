"""Plan files: JSON with provenance and validity. AnnotatedStep whole or not at all."""

import dataclasses
import datetime
import json
import os
import pathlib

from autoshard.compat.xla.compilers import compiler_version
from autoshard.compat.xla.versions import versions
from autoshard.errors import AutoshardError, PlanError
from autoshard.program.program import Program
from autoshard.records.atomic_files import write_atomically
from autoshard.records.evidence import Evidence
from autoshard.records.layout import Candidate
from autoshard.records.trial import Estimate, Failure, Measurement, Trial
from autoshard.target.target import Target
from autoshard.target.topology import arrangement
from autoshard.tuner.journal import outcome_from_json, outcome_to_json

SCHEMA = 1
_FORMAT = "autoshard-plan"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What a plan file says."""

    candidate: Candidate
    program: dict[str, object]
    target: dict[str, object]
    versions: dict[str, str]
    fixed_leaves: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    fixed_axes: tuple[tuple[str, tuple[str, ...]], ...]
    evidence: Evidence
    keep_constraints: bool


def describe_program(program: Program, digest: str) -> dict[str, object]:
    """What a plan is valid for: every leaf of state and batch, and the program's digest."""
    return {
        "digest": digest,
        "state": {leaf.path: f"{leaf.dtype}{list(leaf.shape)}" for leaf in program.state},
        "batch": {leaf.path: f"{leaf.dtype}{list(leaf.shape)}" for leaf in program.batch},
        "metrics": {leaf.path: f"{leaf.dtype}{list(leaf.shape)}" for leaf in program.metrics},
    }


def describe_target(target: Target) -> dict[str, object]:
    """What a plan was made for; of a fake mesh there is no arrangement to compare."""
    platform = target.lowering_platform
    known = platform in ("tpu", "cuda")
    return {
        "platform": target.platform,
        "lowered_for": platform,
        "device_kind": target.device_kind,
        "device_count": target.device_count,
        "topology": target.topology.name if target.topology else "",
        "arrangement": {}
        if target.shared_host
        else arrangement(target.positions, target.platform == "tpu"),
        "compiler": compiler_version(platform) if known else f"jaxlib {versions()['jaxlib']}",
    }


def write_plan(record: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Writes a plan file."""
    evidence = record.evidence
    data = {
        "format": _FORMAT,
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "candidate": record.candidate.to_json(),
        "keep_constraints": record.keep_constraints,
        "fixed_leaves": {path: [list(axes) for axes in spec] for path, spec in record.fixed_leaves},
        "fixed_axes": {axis: list(to) for axis, to in record.fixed_axes},
        "program": record.program,
        "target": record.target,
        "versions": record.versions,
        "evidence": {
            **{
                f.name: getattr(evidence, f.name)
                for f in dataclasses.fields(evidence)
                if f.name not in ("trials", "elapsed_s")
            },
            "elapsed_s": dict(evidence.elapsed_s),
            "trials": [_trial_to_json(t) for t in evidence.trials],
        },
    }
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, (json.dumps(data, indent=1) + "\n").encode(), sync=True)


def read_plan(path: str | os.PathLike[str]) -> PlanRecord:
    """Reads a plan file.

    Raises:
      PlanError: not there, not JSON, not a plan, of another schema, or a field is damaged.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the plan {path}: {error}") from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PlanError(
            f"{path} is not a plan: it is not JSON ({error}); it may be cut off"
        ) from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise PlanError(f"{path} is not an autoshard plan: format is {got!r}, expected {_FORMAT!r}")
    if data.get("schema") != SCHEMA:
        raise PlanError(
            f"{path} has schema {data.get('schema')!r}, this version reads {SCHEMA}: search again,"
            " or use the autoshard that wrote it"
        )
    try:
        record = PlanRecord(
            candidate=Candidate.from_json(data["candidate"]),
            program=dict(data["program"]),
            target=dict(data["target"]),
            versions={str(k): str(v) for k, v in data["versions"].items()},
            fixed_leaves=tuple(
                (path, tuple(tuple(axes) for axes in spec))
                for path, spec in data["fixed_leaves"].items()
            ),
            # Not in files from before it was kept.
            fixed_axes=tuple((a, tuple(to)) for a, to in data.get("fixed_axes", {}).items()),
            evidence=_evidence_from_json(data["evidence"]),
            keep_constraints=bool(data["keep_constraints"]),
        )
        ranked = [record.evidence.trials[i].candidate for i in record.evidence.ranking]
        if ranked and ranked[0] != record.candidate:
            raise PlanError("the first trial of its ranking is not its candidate")
        return record
    except (LookupError, TypeError, ValueError, AttributeError, AutoshardError) as error:
        raise PlanError(f"{path} is damaged: {error!r}") from error


def differences(record: PlanRecord, program: Program, digest: str) -> tuple[str, ...]:
    """Field by field, how the recorded program differs from this one; the digest only if alone."""
    here = describe_program(program, digest)
    found: list[str] = []
    for field in ("state", "batch", "metrics"):
        old, new = record.program.get(field), here[field]
        if not isinstance(old, dict) or not isinstance(new, dict):
            found.append(f"{field}: recorded {old!r}")
            continue
        for path in (*old, *(p for p in new if p not in old)):
            if old.get(path) != new.get(path):
                found.append(
                    f"{path}: recorded {old.get(path, 'nothing')}, got {new.get(path, 'nothing')}"
                )
    return tuple(found)


def _trial_to_json(trial: Trial) -> dict[str, object]:
    return {
        "candidate": trial.candidate.to_json(),
        "baseline": trial.baseline,
        **{
            name: None if outcome is None else outcome_to_json(outcome)
            for name, outcome in (
                ("propagated", trial.propagated),
                ("compiled", trial.compiled),
                ("profiled", trial.profiled),
            )
        },
    }


def _trial_from_json(data: dict[str, dict[str, object]]) -> Trial:
    propagated = outcome_from_json(data["propagated"])
    compiled = outcome_from_json(data["compiled"]) if data["compiled"] else None
    profiled = outcome_from_json(data["profiled"]) if data["profiled"] else None
    if isinstance(propagated, Measurement) or isinstance(compiled, Measurement):
        raise PlanError("a measurement stands where an estimate belongs")
    if isinstance(profiled, Estimate):
        raise PlanError("an estimate stands where a measurement belongs")
    assert isinstance(propagated, (Estimate, Failure))
    return Trial(
        candidate=Candidate.from_json(data["candidate"]),
        propagated=propagated,
        compiled=compiled,
        profiled=profiled,
        baseline=str(data["baseline"]),
    )


def _evidence_from_json(data: dict[str, object]) -> Evidence:
    rest = dict(data)
    rest["trials"] = tuple(_trial_from_json(t) for t in rest["trials"])  # type: ignore[attr-defined]
    rest["ranking"] = tuple(rest["ranking"])  # type: ignore[arg-type]
    rest["correction"] = tuple(float(x) for x in rest["correction"])  # type: ignore[attr-defined]
    rest["notes"] = tuple(str(n) for n in rest["notes"])  # type: ignore[attr-defined]
    rest["axes"] = tuple((n, s, tuple(w)) for n, s, w in rest["axes"])  # type: ignore[attr-defined]
    spent = rest["elapsed_s"].items()  # type: ignore[attr-defined]
    rest["elapsed_s"] = {str(name): float(value) for name, value in spent}
    return Evidence(**rest)  # type: ignore[arg-type]
