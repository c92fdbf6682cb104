"""Whether a recorded plan may run here: model, target, versions, memory, collectives."""

import concurrent.futures
import contextlib
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax

from autoshard.compat.jaxpr.contexts import without_mesh
from autoshard.compat.xla.device_order import known_kind
from autoshard.compat.xla.executable import MemoryUse, memory_use
from autoshard.compat.xla.stderr_capture import quiet
from autoshard.compat.xla.versions import versions
from autoshard.errors import LoweringError, PlanError, TargetError, WorkloadError
from autoshard.lowering.lower import compilable_step, lower_step
from autoshard.lowering.problem import ModelFn, SearchProblem, knob_values, make_problem
from autoshard.plan.file import PlanRecord, describe_target, differences, read_plan
from autoshard.plan.plan import Plan
from autoshard.program.analysis import analyse
from autoshard.program.program import trace
from autoshard.records.layout import MeshShape
from autoshard.records.module import Module
from autoshard.records.trial import Collective, Estimate, Failure, Kind, Stage
from autoshard.records.words import mebibytes
from autoshard.rungs.compile import hlo
from autoshard.rungs.compile.job import compile_in_process, request_for
from autoshard.rungs.propagate.constraints import minimal_constraints
from autoshard.rungs.worker.failures import failure_of
from autoshard.rungs.worker.process import close_worker_here
from autoshard.space.annotated import analyse_annotated
from autoshard.target.catalogue import catalogue
from autoshard.target.target import Target
from autoshard.target.topology import arrangement, parse_topology

T = TypeVar("T")


_NO_LIMIT_S = 7 * 86_400.0
"""What a worker takes for no limit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """What the compiler says of a step, and the program itself where it can run here."""

    memory: MemoryUse
    hlo_text: str
    program: jax.stages.Compiled | None


def checked_plan(
    path: str | os.PathLike[str],
    model_fn: ModelFn,
    target: Target,
    check_target: bool,
    compile_seconds: float | None,
) -> Plan:
    """Reads a plan and checks it against the model and the devices. See `autoshard.load_plan`."""
    record = read_plan(path)
    wrong = _target_differences(record, target, check_target)
    if wrong:
        raise PlanError(f"{path} is for another target:", wrong)
    knobs = dict(record.candidate.knobs)
    try:
        knob_values(model_fn, {name: (value,) for name, value in knobs.items()})
    except WorkloadError as error:
        raise PlanError(
            f"{path} is for another model:", (f"knobs: recorded {knobs}, got: {error}",)
        ) from error
    program = trace(model_fn(**knobs), record.candidate.knobs, record.keep_constraints)
    wrong = differences(record, program, "")
    if wrong:
        raise PlanError(f"{path} is for another model:", wrong)
    layout = record.candidate.layout
    with _lowering(path, target):
        problem = make_problem(
            program, target, "free", None, record.fixed_leaves, record.fixed_axes
        )
    space = dataclasses.replace(problem.space, meshes=(layout.mesh, *problem.space.meshes))
    problem = SearchProblem(analysis=problem.analysis, space=space)
    reason = space.contains(record.candidate)
    if reason is not None:
        raise PlanError(f"{path} does not fit this program:", (f"layout: {reason}",))
    notes = list(record.evidence.notes)
    lowered_for = str(record.target.get("lowered_for", target.lowering_platform))
    # Another platform lowers the same step to other operations: compare like with like.
    other = lowered_for != target.lowering_platform
    judged = analyse(program, lowered_for) if other else problem.analysis
    recorded = str(record.program.get("digest"))
    if layout.as_annotated and recorded != judged.digest:  # as files from before did not say it
        judged = (
            analyse_annotated(program, judged, layout.mesh, lowered_for).analysis
            if other
            else problem.analysis_for(layout)
        )
    if recorded != judged.digest and recorded != judged.digest_of_text():
        if record.versions.get("jax") == versions()["jax"]:
            if not recorded.startswith("step:"):
                raise PlanError(
                    f"{path} was made by an earlier autoshard:",
                    (
                        f"program digest: recorded {recorded}, which depends on where that version"
                        " put constraints; the model cannot be compared: search again",
                    ),
                )
            raise PlanError(
                f"{path} is for another model:",
                (
                    f"program digest: recorded {recorded}, got {judged.digest} (same leaves, other"
                    " computation)",
                ),
            )
        notes.append(
            f"the program lowers differently than with jax {record.versions.get('jax')}, where the"
            " plan was made"
        )
    notes += target_notes(record.target, target)
    analysis = problem.analysis_for(layout)
    specs = minimal_constraints(analysis, space.specs(layout))
    compiled: _Compiled | Failure
    if target.is_here:
        with _lowering(path, target):
            lowered = compilable_step(analysis, specs, target)
        compiled = _compile_here(lowered, compile_seconds)
    else:
        with _lowering(path, target):
            module = lower_step(analysis, specs, target)
        compiled = _compile_elsewhere(module, target, compile_seconds)
    if isinstance(compiled, Failure):
        raise PlanError(_why_not_compiled(compiled, target))
    notes += _compiled_differences(record, compiled, layout.mesh, target)
    evidence = dataclasses.replace(record.evidence, notes=tuple(dict.fromkeys(notes)))
    return Plan(analysis, space, target, layout, evidence, compiled.program)


def _target_differences(record: PlanRecord, target: Target, check: bool) -> tuple[str, ...]:
    here = describe_target(target)
    fields = ("platform", "device_kind", "device_count") if check else ("device_count",)
    wrong = [
        f"{field}: recorded {record.target.get(field)!r}, got {here[field]!r}"
        for field in fields
        if known_kind(str(record.target.get(field))) != known_kind(str(here[field]))
    ]
    major = record.versions.get("jax", "?").split(".")[0]
    if major != versions()["jax"].split(".")[0]:
        wrong.append(f"jax: recorded {record.versions.get('jax')}, got {versions()['jax']}")
    return tuple(wrong)


def target_notes(recorded: Mapping[str, object], target: Target) -> list[str]:
    """What is otherwise about the target and does not forbid the plan: links and the compiler.

    Args:
      recorded: as `plan_file.describe_target` wrote it; older files say no arrangement.
    """
    here = describe_target(target)
    notes = []
    then, now = _arrangement_of(recorded), here["arrangement"]
    if then and now and _apart(then, now, target):
        notes.append(
            f"the devices stand otherwise than recorded: {_in_words(then)}, here {_in_words(now)};"
            " mesh axes may run over other links than those the layout was chosen for"
        )
    compiler = recorded.get("compiler")
    same = recorded.get("lowered_for") == here["lowered_for"]
    if same and compiler and compiler != here["compiler"]:
        notes.append(
            f"recorded with another compiler: {compiler}, here {here['compiler'] or 'unknown'}"
        )
    return notes


def _apart(then: object, now: object, target: Target) -> bool:
    """Whether devices stand otherwise, as far as links depend on it.

    A live device says its process for its host: of TPUs no link depends on that, and of GPUs in a
    process each nothing is known.
    """
    if not (isinstance(then, Mapping) and isinstance(now, Mapping)):
        return then != now
    processes = target.is_here and now.get("hosts") == [target.device_count]
    if target.platform == "tpu" or processes:
        then, now = ({k: v for k, v in one.items() if k != "hosts"} for one in (then, now))
    return then != now


def _arrangement_of(recorded: Mapping[str, object]) -> object:
    """As it was written, or else as the topology's name says it, where that is known here."""
    if "arrangement" in recorded:
        return recorded["arrangement"]
    try:
        topology = parse_topology(str(recorded.get("topology")), catalogue())
    except TargetError:
        return {}
    return arrangement(topology.positions, topology.chip.platform == "tpu")


def _in_words(arranged: object) -> str:
    """`hosts 16, slices 1, torus 4x4x4`."""
    if not isinstance(arranged, Mapping):
        return repr(arranged)
    return ", ".join(
        f"{name} {'x'.join(map(str, n)) or 1 if isinstance(n, list) else n}"
        for name, n in arranged.items()
    )


@contextlib.contextmanager
def _lowering(path: str | os.PathLike[str], target: Target) -> Iterator[None]:
    """What JAX cannot lower for these devices (a kernel of another platform) is a PlanError."""
    try:
        yield
    except LoweringError as error:
        raise PlanError(
            f"the step of {path} cannot be lowered for {target.describe()}: {error}"
        ) from error


def _compile_here(lowered: jax.stages.Lowered, seconds: float | None) -> _Compiled | Failure:
    """Compiles the program that will run, in this process."""
    begin = time.perf_counter()
    try:
        with quiet(), without_mesh():
            program = lowered.compile() if seconds is None else _within(seconds, lowered.compile)
    except (RuntimeError, NotImplementedError, TimeoutError) as error:
        if isinstance(error, TimeoutError):
            message = f"it took longer than {seconds:g} s (compile_seconds)"
            return Failure(stage=Stage.COMPILE, kind=Kind.TIMEOUT, message=message)
        return failure_of(error, Stage.COMPILE, time.perf_counter() - begin)
    memory = memory_use(program.runtime_executable())
    return _Compiled(memory=memory, hlo_text=program.as_text() or "", program=program)


def _within(seconds: float, make: Callable[[], T]) -> T:
    """What a function returns in a thread of its own. Past the limit that thread runs on.

    Raises:
      TimeoutError: it takes longer.
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(make())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="autoshard-compile", daemon=True).start()
    return result.result(timeout=seconds)


def _compile_elsewhere(
    module: Module, target: Target, seconds: float | None
) -> _Compiled | Failure:
    """Compiles for hardware that is not here, in a worker."""
    with tempfile.TemporaryDirectory(prefix="autoshard-") as folder:
        request = request_for(module, target, folder, seconds or _NO_LIMIT_S)
        try:
            result = compile_in_process(request)
        finally:
            close_worker_here()
    if isinstance(result, Failure):
        return result
    return _Compiled(memory=result.memory, hlo_text=result.hlo_text, program=None)


def _compiled_differences(
    record: PlanRecord, result: _Compiled, mesh: MeshShape, target: Target
) -> list[str]:
    """How the collectives of the compiled step differ from the record.

    Raises:
      PlanError: the step does not fit.
    """
    if result.memory.peak_bytes > target.memory_bytes:
        raise PlanError(
            f"the plan needs {mebibytes(result.memory.peak_bytes)} a device, {target.describe()}"
            f" have {mebibytes(target.memory_bytes)} ({target.memory_source})"
        )
    try:
        now = hlo.count(hlo.parse(result.hlo_text), mesh).collectives
    except hlo.HloError as error:
        return [f"the collectives could not be compared with the record: {error}"]
    ranking = record.evidence.ranking
    then = record.evidence.trials[ranking[0]].compiled if ranking else None
    if not isinstance(then, Estimate):
        return []
    return collective_differences(then.collectives, now)


def _why_not_compiled(failure: Failure, target: Target) -> str:
    """Some compilers refuse what is too large for the device (TPU), and say by how much."""
    if failure.kind is not Kind.OOM:
        return f"the plan does not compile here: {failure.kind}: {failure.message}"
    missing = failure.missing_bytes
    excess = f"{mebibytes(missing)} more than" if missing else "more memory than"
    return (
        f"the plan needs {excess} {target.describe()} have, their compiler says: search again on"
        f" these devices, or load it on larger ones: {failure.message}"
    )


_Group = tuple[str, int, tuple[str, ...]]
"""Kind of a collective, devices of a group, the mesh axes it runs over; () where none are known."""


def collective_differences(then: Sequence[Collective], now: Sequence[Collective]) -> list[str]:
    """How the collectives of a program differ from those recorded: by kind, group and mesh axes.

    Groups that are no product of mesh axes on one side may be any on the other: of those that
    differ only the sums over all axes are compared.
    """
    old, new = _bytes(then), _bytes(now)
    differ = {key for key in {*old, *new} if old.get(key, 0) != new.get(key, 0)}
    unknown = {(kind, group) for kind, group, axes in differ if not axes}

    def merged(found: Mapping[_Group, int]) -> dict[_Group, int]:
        sums: dict[_Group, int] = {}
        for kind, group, axes in differ:
            key = (kind, group, () if (kind, group) in unknown else axes)
            sums[key] = sums.get(key, 0) + found.get((kind, group, axes), 0)
        return sums

    new = merged(new)
    return [
        f"collectives differ from the record: {kind} in groups of {group}"
        f"{' over ' + '+'.join(axes) if axes else ''}: recorded {mebibytes(recorded)} a step,"
        f" now {mebibytes(new[kind, group, axes])}"
        for (kind, group, axes), recorded in sorted(merged(old).items())
        if recorded != new[kind, group, axes]
    ]


def _bytes(collectives: Sequence[Collective]) -> dict[_Group, int]:
    """Bytes a step by kind, group size and mesh axes."""
    found: dict[_Group, int] = {}
    for c in collectives:
        key = (c.kind, c.group_size, c.mesh_axes)
        found[key] = found.get(key, 0) + c.total_bytes
    return found
