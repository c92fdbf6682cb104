"""The public functions: `search` and `load_plan`."""

import concurrent.futures
import dataclasses
import datetime
import functools
import operator
import os
import pathlib
import time
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

from autoshard.compat.xla.stderr_capture import start_jax
from autoshard.errors import NoPlanError, TargetError
from autoshard.lowering.problem import (
    KnobValue,
    ModelFn,
    SearchProblem,
    all_subjects,
    check_samples,
    make_problem,
    trace_all,
)
from autoshard.plan.load import checked_plan
from autoshard.plan.plan import Plan
from autoshard.records.evidence import Evidence
from autoshard.records.trial import Measurement, Stage
from autoshard.report.progress import shown_progress
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.target.target import Target, find_target, require_own_devices
from autoshard.tuner import Found, run_search
from autoshard.tuner.budget import Budget, Callback, Event, harmless
from autoshard.tuner.diagnosis import why_no_plan
from autoshard.tuner.journal import Journal, opened
from autoshard.tuner.strategy import Strategy


def search(
    model_fn: ModelFn,
    mesh: Mesh | Sequence[jax.Device] | str,
    *,
    knobs: Mapping[str, Sequence[KnobValue]] | None = None,
    mesh_shape: str = "free",
    fix: Mapping[str, object] | None = None,
    keep_constraints: bool = False,
    memory_bytes: int | None = None,
    memory_headroom: float = 0.05,
    budget: Budget = Budget(),
    journal: Journal | str | os.PathLike[str] | None = None,
    executor: concurrent.futures.Executor | None = None,
    strategy: Strategy | None = None,
    calibration: str | os.PathLike[str] | None = None,
    hardware: str | os.PathLike[str] | None = None,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Plan:
    """Finds the fastest sharding of a train step that fits the devices.

    Args:
      model_fn: called with one value for each knob; returns a `Workload`.
      mesh: a `jax.sharding.Mesh` (its devices count; its shape is the first candidate), devices, or
        the name of hardware that is not here: chip and shape, such as "v5p:4x4x4", "v5e:16x16*2"
        for two slices, "h100:4x8" for 4 hosts of 8. `autoshard.targets()` lists the chips.
      knobs: name -> values to try; every combination is searched.
      mesh_shape: "free", or "fixed" to keep the given mesh's shape.
      fix: logical axis -> mesh axes, or the path of a state leaf -> PartitionSpec, to pin.
      keep_constraints: keep the sharding constraints the step already has.
      memory_bytes: what one device holds. Default: what the device says; on a fake mesh the memory
        that this process may use, divided by the devices.
      memory_headroom: the part of it that no plan uses.
      budget: how much the search may spend.
      journal: a file that records every trial; an interrupted search resumes from it.
      executor: where programs are compiled. Default: worker processes on this machine, as many as
        cores and free memory allow, at most 16. Not for live accelerators: only the process that
        holds them can compile for them.
      strategy: who chooses candidates; default exhaustive in small spaces, else beam search.
      calibration: folder that keeps calibrations of live targets; default in the user's cache.
      hardware: a catalogue file with your own chips, links or figures; for named hardware only.
      seed: the seed of every random choice.
      callbacks: called with an `Event` as the search proceeds. One that raises is logged and not
        called again. KeyboardInterrupt counts as Ctrl-C.

    Returns:
      The plan. Ctrl-C, or the end of the budget, returns the best so far and says so.

    Raises:
      WorkloadError: model_fn, step, init or batch cannot be searched; a knob or `mesh_shape` is
        unknown.
      TargetError: `mesh` names no usable devices, devices of several processes, or hardware whose
        compiler is not installed; an executor or `hardware` is given for live devices that take
        none; `memory_bytes` is not positive, or more than named hardware has.
      CatalogueError: `hardware` cannot be read.
      LayoutError: `fix` names no logical axis and no state leaf, or an unknown mesh axis.
      JournalError: the file is no journal, is damaged, has another schema, or is in use.
      NoPlanError: nothing fits, or every candidate failed. The message says what would help.
      ValueError: `memory_headroom` is outside [0, 1), or `seed` is no whole number of 0 or more.
    """
    start_s = time.perf_counter()
    if not 0 <= memory_headroom < 1:
        raise ValueError(f"memory_headroom must be in [0, 1), got {memory_headroom}")
    try:
        seed = operator.index(seed)  # also NumPy's: random.Random takes none of them
    except TypeError as error:
        raise ValueError(f"seed must be a whole number, got {seed!r}") from error
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}: batches are drawn from it")
    with shown_progress(progress) as shown:
        target = find_target(mesh, memory_bytes, hardware)
        require_own_devices(target)
        if executor is not None and target.is_here and target.platform != "cpu":
            raise TargetError(
                f"got an executor for {target.describe()} that are here, expected none: its"
                " processes do not hold these devices and would compile for their CPUs; leave"
                " executor out, or name the hardware (autoshard.targets()) to compile for it"
                " anywhere"
            )
        if not target.is_here:
            start_jax()
            budget = dataclasses.replace(budget, profiles=0)
        callbacks = [harmless(shown), *map(harmless, callbacks)]
        limit = max(1, int(target.memory_bytes * (1 - memory_headroom)))

        def tell(done: int, text: str) -> None:
            for callback in callbacks:
                callback(Event(stage=Stage.TRACE, done=done, total=3, text=text))

        with opened(journal) as log:
            tell(0, "tracing the step")
            programs, notes = trace_all(model_fn, knobs, keep_constraints)
            if shows := dict.fromkeys(line for program in programs for line in program.shows):
                notes.append(f"the plan shows no values, as your code does at {', '.join(shows)}")
            if target.is_here and budget.profiles:
                check_samples(programs, seed)
            as_subject = functools.partial(
                make_problem, target=target, mesh_shape=mesh_shape, fix=fix
            )
            tell(1, "reading the program")
            problems, unread = all_subjects(programs, as_subject)
            notes += unread
            cost = cost_model(
                target, calibration, lambda: tell(2, "calibrating: once for a machine")
            )
            tell(3, "ready for layouts")
            folder = log.path.parent if log.path is not None else None
            found = run_search(
                problems,
                target,
                cost,
                budget=budget,
                journal=log,
                executor=executor,
                strategy=strategy,
                seed=seed,
                callbacks=callbacks,
                limit_bytes=limit,
                folder=pathlib.Path(folder).absolute() if folder is not None else None,
                start_s=start_s,
            )
        if not found.ranking:
            raise NoPlanError(
                why_no_plan(found, problems, target, cost, limit, model_fn, as_subject)
            )
        notes += found.notes
        return _plan(found, problems, target, limit, tuple(notes), cost.constants.digest)


def _plan(
    found: Found,
    problems: Sequence[SearchProblem],
    target: Target,
    limit_bytes: int,
    notes: tuple[str, ...],
    constants_digest: str,
) -> Plan:
    winner = found.ranking[0]
    problem = problems[found.trials[winner].problem]
    measured = any(isinstance(trial.profiled, Measurement) for trial in found.trials)
    if measured and problem.analysis.program.workload.sample is None:
        notes += ("measured with synthetic batches: floats normal, integers 0 or 1",)
    evidence = Evidence(
        trials=found.trials,
        ranking=found.ranking,
        ended=found.ended,
        target=target.describe(),
        memory_limit_bytes=limit_bytes,
        elapsed_s=found.elapsed_s,
        false_rejections=found.false_rejections,
        correction=(found.correction.compute, found.correction.communication),
        notes=notes,
        axes=tuple((a.name, a.size, a.where) for a in problem.analysis.axes.axes),
        constants_digest=constants_digest,
        compiles=found.compiles,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    layout = found.trials[winner].candidate.layout
    return Plan(problem.analysis_for(layout), problem.space, target, layout, evidence)


def load_plan(
    path: str | os.PathLike[str],
    model_fn: ModelFn,
    mesh: Mesh | Sequence[jax.Device] | str,
    *,
    check_target: bool = True,
    memory_bytes: int | None = None,
    hardware: str | os.PathLike[str] | None = None,
    compile_seconds: float | None = None,
) -> Plan:
    """Loads a plan for the same model, on live devices or for named hardware.

    The program is compiled once, before anything is allocated, and `plan.step` runs what was
    compiled. Its peak memory is checked, and its collectives are compared with the record by kind,
    bytes, group and mesh axes. `plan.evidence.notes` lists what differs, also the placement of the
    devices (hosts, slices, torus) and the version of the compiler.

    Args:
      check_target: False relaxes platform and kind of device, never the model or the device count.
      memory_bytes: overrides what one device holds.
      hardware: your own catalogue file, if `mesh` names hardware from it.
      compile_seconds: the longest that compiling may take; None for no limit. A compiler cannot be
        stopped in this process: past the limit it runs on in a thread until it has finished. For
        named hardware it runs in a process of its own, which is killed.

    Raises:
      ValueError: `compile_seconds` is not above 0.
      PlanError: the file cannot be read or is damaged; the model, a shape, the device count or
        jax's major version differs (`differences` lists them field by field); the step cannot be
        lowered for these devices, does not compile in the time, or does not fit.
      TargetError: as `search` raises it.
      WorkloadError: the workload cannot be traced, or not for these devices.
    """
    if compile_seconds is not None and not compile_seconds > 0:
        raise ValueError(f"compile_seconds must be above 0, got {compile_seconds}")
    target = find_target(mesh, memory_bytes, hardware)
    return checked_plan(path, model_fn, target, check_target, compile_seconds)
