"""Rung 2's own pool: what it leaves behind when a search is interrupted."""

import concurrent.futures
import dataclasses
import threading
import time

import pytest

import autoshard
from autoshard.compat.xla.executable import MemoryUse
from autoshard.plan.file import read_plan
from autoshard.records.layout import Candidate, Layout
from autoshard.records.module import Module
from autoshard.records.trial import Failure, Kind, Rung, Stage, Trial
from autoshard.rungs.compile import job as compile_job
from autoshard.rungs.compile.job import CompileResult
from autoshard.rungs.profile.runner_client import ChildRunner
from autoshard.rungs.worker.process import WorkerSettings, worker_here
from autoshard.space.baselines import baselines
from autoshard.tuner import compiling
from autoshard.tuner.compiling import Compiling
from autoshard.tuner.measuring import Measuring, opened_runner
from tests.analysed import COST, subject, target
from tests.tuner.test_selection import estimate
from tests.workloads import UNMEASURED, lines

RESULT = CompileResult(
    memory=MemoryUse(
        arguments_bytes=0, outputs_bytes=0, temporaries_bytes=0, aliased_bytes=0, peak_bytes=0
    ),
    hlo_text="",
    warnings=(),
    elapsed_s=0.0,
)
NOT_JUDGED = Failure(stage=Stage.PROPAGATE, kind=Kind.UNSUPPORTED, message="not asked")


class Interrupted:
    """As much of a ledger as opening the pool takes."""

    target = target()
    executables = None
    budget = autoshard.Budget()


def test_after_ctrl_c_no_thread_waits_for_a_compilation(tmp_path):
    settings = WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path))
    pool = Compiling(Interrupted(), None)
    begun = threading.Event()

    def compile_for_long() -> Failure:
        worker = worker_here(settings)
        worker.call(len, "start it", stage=Stage.COMPILE, time_limit_s=60.0)
        begun.set()
        return worker.call(time.sleep, 600.0, stage=Stage.COMPILE, time_limit_s=600.0)

    with pytest.raises(KeyboardInterrupt), pool.opened():
        future = pool._executor.submit(compile_for_long)
        assert begun.wait(60)
        raise KeyboardInterrupt
    failure = future.result(timeout=60)  # of 600 that it would have slept
    assert isinstance(failure, Failure) and failure.kind == Kind.CRASH


@pytest.mark.parametrize("own", [True, False])
def test_what_this_search_compiles_itself_waits_to_be_measured(quick, monkeypatch, own):
    """A user's executor may be another machine, whose programs are not for this one."""
    folders = set()
    compile_ = compiling.compile_in_process

    def noting(request):
        folders.add(request.executables)
        return compile_(request)

    monkeypatch.setattr(compiling, "compile_in_process", noting)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        quick(executor=None if own else executor)
    (folder,) = folders
    assert (folder is not None) == own
    assert folder is None or not folder.exists(), "gone with the search"


@pytest.mark.parametrize("own", [True, False])
def test_only_workers_here_are_told_of_a_folder_here(quick, monkeypatch, tmp_path, own):
    """On another machine nobody may be allowed to make /home/alice/p/workers."""
    folders = set()
    compile_ = compiling.compile_in_process

    def noting(request):
        folders.add(request.settings.folder)
        return compile_(request)

    monkeypatch.setattr(compiling, "compile_in_process", noting)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        quick(executor=None if own else executor, journal=tmp_path / "journal.jsonl")
    assert folders == {str(tmp_path / "workers" / "compile") if own else None}


def test_answers_are_kept_by_the_compilers_options(ledger, monkeypatch):
    of = subject("scanned_mlp")
    candidate = baselines(of.space)[0].candidate
    row = Trial(problem=0, candidate=candidate, baseline="", shardings=0, propagated=NOT_JUDGED)
    ledger.problems, ledger.cost = [of], COST
    row.digest = "program"

    def keys(options: str) -> tuple[str, str]:
        monkeypatch.setenv("XLA_FLAGS", options)
        compiling_ = Compiling(ledger, None)
        measuring = Measuring(ledger, compiling_.compiled_by())
        return compiling_.key(row), measuring._key(row, "first")

    plain, one, other = keys(""), keys("--xla_a=1"), keys("--xla_a=2")
    assert len({*plain, *one, *other}) == 6
    assert keys("--xla_a=1 --xla_b") == keys("--xla_b --xla_a=1")


def test_measurements_are_kept_by_the_number_of_threads(ledger, monkeypatch):
    """A layout that was stuck with as many threads as devices is tried again with more."""
    of = subject("scanned_mlp")
    candidate = baselines(of.space)[0].candidate
    row = Trial(problem=0, candidate=candidate, baseline="", shardings=0, propagated=NOT_JUDGED)
    ledger.problems, ledger.cost = [of], COST
    row.digest = "program"
    compiling_ = Compiling(ledger, None)
    measuring = Measuring(ledger, compiling_.compiled_by())

    def keys(threads: str) -> tuple[str, str]:
        monkeypatch.setenv("PJRT_NPROC", threads)
        return compiling_.key(row), measuring._key(row, "first")

    plain, more = keys(""), keys("16")
    assert plain[0] == more[0] and plain[1] != more[1]
    assert keys("") == plain


@pytest.mark.parametrize("answered", [True, False], ids=["priced", "failed"])
@pytest.mark.parametrize("kind", ["worker", "here"])
def test_of_rows_that_come_to_one_program_one_is_compiled(ledger, monkeypatch, answered, kind):
    of = subject("scanned_mlp")
    ledger.problems, ledger.cost = [of], COST
    failed = Failure(stage=Stage.COMPILE, kind=Kind.UNSUPPORTED, message="no")
    judged = estimate(rung=Rung.COMPILE) if answered else failed
    monkeypatch.setattr(compiling, "estimate_of", lambda *_: judged)
    compiled = []

    def compile_(module, *_):
        compiled.append(module)
        return object() if answered else failed

    monkeypatch.setattr(compiling, "compile_in_process", lambda request: compile_(request.module))
    monkeypatch.setattr(compiling, "compile_on", compile_)

    def rows(count):
        same, other = (
            Module(
                stablehlo=code,
                mesh=(("x", 8),),
                platform="cpu",
                inputs=(),
                outputs=(),
                state_count=0,
            )
            for code in (b"same", b"other")
        )
        return [
            Trial(
                problem=0,
                candidate=b.candidate,
                baseline="",
                shardings=i,
                propagated=dataclasses.replace(estimate(), dropped=(f"of row {i}",)),
                module=module,
                digest=module.digest,
            )
            for i, (b, module) in enumerate(
                zip(baselines(of.space)[:count], [same, other, same, same], strict=False)
            )
        ]

    def asked(rows, indices):
        ledger.trials = rows
        rung2 = Compiling(ledger, Silent(answers=9) if kind == "worker" else None)
        for some in indices:
            rung2.begin(some, 1.0)
        rung2.finish()
        return rung2

    rung2 = asked(rows(4), [[0, 1, 2, 2], [0, 2], [3]])
    assert [module.stablehlo for module in compiled] == [b"same", b"other"]
    assert rung2.count == 2
    for i, row in enumerate(ledger.trials):
        wanted = dataclasses.replace(judged, dropped=(f"of row {i}",)) if answered else failed
        assert row.compiled == wanted
    # The journal answers for all of them, and they are still of one program.
    again = [dataclasses.replace(row, module=None, digest="") for row in rows(4)]
    rung2 = asked(again, [[0, 1, 2, 3]])
    assert len(compiled) == 2 and rung2.count == 2
    assert ledger.representatives(range(4)) == [0, 1]


def test_the_bench_looks_where_the_compiler_wrote(ledger, tmp_path):
    ledger.executables = tmp_path
    with opened_runner(ledger) as bench:
        assert isinstance(bench, ChildRunner)
        assert bench._executables == tmp_path


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many cores and so many GiB of free memory."""

    def of(cores: int, free_gib: float) -> None:
        monkeypatch.setattr(compile_job, "cores", lambda: cores)
        monkeypatch.setattr(compiling, "available_bytes", lambda: int(free_gib * 2**30))

    return of


@pytest.mark.parametrize(
    ("cores", "free_gib", "most"),
    [(1, 100, 10), (2, 100, 10), (8, 100, 22), (8, 10, 12), (8, 1, 10), (64, 500, 38)],
)
def test_a_larger_machine_compiles_more_where_the_budget_leaves_it_open(
    ledger, machine, cores, free_gib, most
):
    machine(cores, free_gib)
    assert Compiling(ledger, None).most == most
    assert Compiling(ledger, Silent()).most == 10, "how many workers an executor has is unknown"
    ledger.budget = autoshard.Budget(compiles=7)
    assert Compiling(ledger, None).most == 7


def test_accelerators_that_are_here_have_one_compiler(ledger, machine):
    machine(64, 500)
    ledger.target = dataclasses.replace(ledger.target, platform="gpu")
    assert (Compiling(ledger, None).workers(), Compiling(ledger, None).most) == (1, 10)


def test_workers_are_as_many_as_the_largest_peak_seen_allows(ledger, machine, monkeypatch):
    machine(8, 12)
    peaks = iter([1, 6, 2, 100])
    monkeypatch.setattr(
        compiling,
        "compile_in_process",
        lambda request: dataclasses.replace(RESULT, peak_bytes=next(peaks) << 30),
    )
    rung2 = Compiling(ledger, None)
    seen = [rung2.workers()]
    for _ in range(4):
        rung2._compile(None)
        seen.append(rung2.workers())
    assert seen == [4, 8, 2, 2, 1]


def test_plan_and_journal_say_how_many_programs_could_be_compiled(quick, machine, tmp_path):
    machine(3, 100)
    journal = tmp_path / "journal.jsonl"
    plan = quick(budget=autoshard.Budget(candidates=4, profiles=0), journal=journal, executor=None)
    assert plan.evidence.compiles == 12
    assert sum(t.was_compiled for t in plan.evidence.trials) <= 12
    plan.save(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").evidence.compiles == 12
    records = [r for r in lines(journal) if r.get("rung") == "compile" and "outcome" in r]
    assert records and {r["most"] for r in records} == {12}


class Silent(concurrent.futures.Executor):
    """A cluster all of whose workers are gone: it takes everything and answers `answers` jobs."""

    def __init__(self, answers: int = 0):
        self.answers = answers
        self.given: list[concurrent.futures.Future] = []

    def submit(self, fn, /, *args, **kwargs):
        future = concurrent.futures.Future()
        self.given.append(future)
        if len(self.given) <= self.answers:
            future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(compiling, "_GRACE_S", 0.1)
    # In all a tenth of a second, though a compilation may take its time.
    monkeypatch.setattr(compiling, "_SILENT_S", 0.1 - 2 * UNMEASURED.compile_seconds)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, r"timeout.*Silent has answered nothing for .* s: see whether its workers"),
        (1.0, r"timeout.*Silent.*Budget\(seconds=1\) is spent: .* more seconds"),
    ],
)
def test_an_executor_whose_workers_are_gone_ends_the_search(
    quick, impatient, monkeypatch, seconds, said
):
    if seconds:
        monkeypatch.setattr(compiling, "_SILENT_S", 600.0)
    executor = Silent()
    with pytest.raises(autoshard.NoPlanError, match=said):
        quick(executor=executor, budget=dataclasses.replace(UNMEASURED, seconds=seconds))
    assert executor.given and all(future.cancelled() for future in executor.given)
    first = UNMEASURED.compiles
    assert len(executor.given) <= first, "nothing is given to an executor that answers nothing"


def test_what_an_executor_answered_before_it_fell_silent_is_planned(quick, impatient, tmp_path):
    executor, journal = Silent(answers=2), tmp_path / "journal.jsonl"
    budget = dataclasses.replace(UNMEASURED, compiles=6)
    plan = quick(executor=executor, budget=budget, journal=journal)
    failures = [t.failure for t in plan.evidence.trials if isinstance(t.compiled, Failure)]
    assert failures and {f.kind for f in failures} == {Kind.TIMEOUT}
    assert all(f.elapsed_s > 0 for f in failures)
    assert journal.read_text().count("timeout") == 0, "it says nothing of the candidates"
    assert all(future.cancelled() for future in executor.given[2:])


class Counting(concurrent.futures.ThreadPoolExecutor):
    given = 0

    def submit(self, fn, /, *args, **kwargs):
        self.given += 1
        return super().submit(fn, *args, **kwargs)


def test_after_ctrl_c_an_executor_may_still_finish_what_it_was_given(quick):
    pressed: list[autoshard.Event] = []
    held = threading.Event()

    def press(event: autoshard.Event) -> None:
        if event.stage is Stage.COMPILE and executor.given and not pressed:
            pressed.append(event)
            threading.Timer(0.5, held.set).start()
            raise KeyboardInterrupt

    with Counting(1) as executor:
        executor.submit(held.wait)  # the first answer comes after Ctrl-C
        executor.given = 0
        plan = quick(executor=executor, callbacks=[press])
    assert pressed and plan.evidence.ended == "interrupted"


def test_after_ctrl_c_nothing_stays_in_the_queue_of_a_users_executor(quick, monkeypatch):
    monkeypatch.setattr(compiling, "_GRACE_S", 0.1)
    executor = Silent()

    pressed: list[autoshard.Event] = []

    def press(event: autoshard.Event) -> None:
        if event.stage is Stage.COMPILE and executor.given and not pressed:
            pressed.append(event)
            raise KeyboardInterrupt

    with pytest.raises(autoshard.NoPlanError):
        quick(executor=executor, callbacks=[press])
    assert executor.given and all(future.cancelled() for future in executor.given)


@pytest.mark.parametrize(
    ("platform", "compiler"), [("tpu", "libtpu 1"), ("gpu", ""), ("cpu", "")], ids=str
)
def test_the_compiler_of_a_live_tpu_is_in_the_key(ledger, monkeypatch, platform, compiler):
    """It is a package of its own; jaxlib's version, which every key has, says no more of it."""
    monkeypatch.setattr(compiling, "compiler_version", lambda platform: "libtpu 1")
    kept = {}
    monkeypatch.setattr(type(ledger), "key", lambda self, *_, **more: kept.update(more))
    ledger.target = dataclasses.replace(ledger.target, platform=platform)
    ledger.problems = [subject("adamw")]
    candidate = Candidate(layout=Layout(mesh=()))
    Compiling(ledger, None).key(
        Trial(problem=0, candidate=candidate, baseline="", shardings=0, propagated=NOT_JUDGED)
    )
    assert kept["compiler"] == compiler
