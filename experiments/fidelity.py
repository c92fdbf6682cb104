"""Does autoshard pick the fastest layout, for every model, and do its rungs rank as clocks do?

Question: on each case of the zoo, at its shrunk scale, on 4 and on 8 fake CPU devices: does the
  search complete; is the plan as fast as what people write by hand; how much slower is it than the
  best of at least 48 programs; how well do rung 1 and rung 2 rank and predict measured times?
Command: python -m experiments.fidelity
         or one part: python -m experiments.fidelity --part=sample --case=vit --devices=8
         the tables again: python -m experiments.fidelity --part=report
Cost: on 2 quiet cores, for all three parts of a case on 4 devices with --limit=60: 19 minutes for
  the recurrent network, 29 for the decoder without its part by hand (about 60 programs are compiled
  and run in --rounds rounds; a comparison takes up to --limit seconds in its first process, and a
  quarter of that in each further one, of up to 24).
Expected: the goals that docs/fidelity.md states; what misses one is red.

Each part of each case runs in a process of its own and leaves results/fidelity/<case>-<devices>/
<part>.json, whole or not at all, with machine, versions, date and seeds; delete a file to have it
made anew; --retry runs again what failed and asks on what is undecided. --short, --scale=small,
other --rounds and another --seed have folders of their own, under runs/, and leave the page as it
is, as another --out does. Stop it at will: what is there is not run again, and a journal under
runs/fidelity lets an interrupted search go on; an interrupted sample begins anew, goes on with the
rounds that are left, or, once these are over, with --retry. `search` has the default budget of
`autoshard.search` and saves its plan; `sample` draws, compiles and measures programs and pairs the
plan with the best of them anew; `hand` pairs the plan with hand-written layouts; `report` prints,
and writes summary.json, the plots and the page, always over all cases.
After a change to the model of cost, `predict` asks both rungs anew for the programs of samples that
are there, or rung 1 alone, which compiles nothing; their measured times stay.
"""

import pathlib
import sys
from typing import Any

from absl import app, flags
from rich.console import Console

from experiments.fidelity_parts import running
from experiments.fidelity_parts.store import PARTS, Store, Task, missing

MESHES = (4, 8)
"""Numbers of fake devices that the report is over."""

_PART = flags.DEFINE_enum("part", "all", ["all", *PARTS, "predict", "report"], "What to run.")
_CASE = flags.DEFINE_list("case", [], "Cases; all of the zoo where none is named.")
_DEVICES = flags.DEFINE_list("devices", [str(n) for n in MESHES], "Numbers of fake CPU devices.")
_SCALE = flags.DEFINE_enum("scale", "shrunk", ["small", "shrunk"], "small: to try the machinery.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the search, the sample and the order of rounds.")
_ROUNDS = flags.DEFINE_integer("rounds", 16, "Rounds in which every program of a sample runs.")
_LIMIT = flags.DEFINE_float("limit", 240.0, "Seconds of pairs for each comparison.")
_SHORT = flags.DEFINE_bool("short", False, "Tiny budget and sample, to try the machinery.")
_RETRY = flags.DEFINE_bool(
    "retry", False, "Run parts again that failed, and ask on comparisons that are undecided."
)
_OUT = flags.DEFINE_string("out", "results/fidelity", "Folder of the results.")
_RUN = flags.DEFINE_string("run", "runs/fidelity", "Folder of journals.")
_PAGE = flags.DEFINE_string("page", "docs/fidelity.md", 'Page with the tables; "" for none.')
_RUNG1 = flags.DEFINE_bool("rung1", False, "With --part=predict: rung 1 alone; rung 2's stay.")
_HERE = flags.DEFINE_bool("here", False, "Run one part in this process; what the others are.")
_LAYOUT = flags.DEFINE_string("layout", "", "With --part=hand --here: this layout alone.")


def main(argv: list[str]) -> None:
    del argv
    if any(flag.value != flag.default for flag in (_SHORT, _SCALE, _ROUNDS, _SEED)):
        _keep_apart()
    if _OUT.value != _OUT.default and not _PAGE.present:
        flags.FLAGS[_PAGE.name].value = ""  # the page is of the published results
    store = Store(results=pathlib.Path(_OUT.value), runs=pathlib.Path(_RUN.value))
    cases, devices = _cases(), [int(count) for count in _DEVICES.value]
    if _HERE.value:
        if _PART.value not in (*PARTS, "predict"):
            raise app.UsageError(f"--here runs one part, got --part={_PART.value}")
        (case,), (count,) = cases, devices
        _run_here(Task(part=_PART.value, case=case, devices=count), store)
        return
    lost: list[Task] = []
    console = Console(width=None if sys.stdout.isatty() else 200)  # a file has room for the tables
    if _PART.value != "report":

        def start(task: Task) -> str:
            return running.in_process("experiments.fidelity", _flags(task), None)

        def tell(text: str) -> None:
            console.print(text, highlight=False, markup=False)

        if _PART.value == "predict":
            lost = running.predict_again(store, cases, devices, start=start, tell=tell)
        else:
            parts = PARTS if _PART.value == "all" else [_PART.value]
            tasks = missing(store, cases, devices, parts, _RETRY.value, _layouts)
            lost = running.run_each(store, tasks, start=start, tell=tell)
        if lost:
            console.print(f"[red]{len(lost)} parts left no result; run the command again[/red]")
    if _PART.value in ("all", "report"):
        _report(store, console)
    if lost:
        sys.exit(1)


def _keep_apart() -> None:
    """What only tries the machinery neither counts as run nor comes onto the page."""
    words = [_SCALE.value, *["short"] * _SHORT.value]
    if _ROUNDS.value != _ROUNDS.default:
        words.append(f"{_ROUNDS.value}-rounds")
    if _SEED.value != _SEED.default:
        words.append(f"seed-{_SEED.value}")
    trial = f"runs/fidelity-{'-'.join(words)}"
    for flag, apart in ((_OUT, f"{trial}/results"), (_RUN, trial), (_PAGE, "")):
        if not flag.present:
            flags.FLAGS[flag.name].value = apart


def _cases() -> list[str]:
    from experiments.zoo.cases import CASES

    unknown = sorted(set(_CASE.value) - set(CASES))
    if unknown:
        raise app.UsageError(f"got cases {unknown}, expected some of {list(CASES)}")
    return [name for name in CASES if name in _CASE.value] if _CASE.value else list(CASES)


def _layouts(name: str, devices: int) -> list[str]:
    from experiments.handwritten.steps import hand_steps
    from experiments.zoo.cases import case

    return list(hand_steps(case(name, _SCALE.value), devices))


def _flags(task: Task, layout: str = "") -> list[str]:
    """What a process needs to run one part by itself."""
    return [
        *(f"--{flag.name}={flag.value}" for flag in (_SCALE, _SEED, _ROUNDS, _LIMIT, _OUT, _RUN)),
        f"--short={_SHORT.value}",
        f"--rung1={_RUNG1.value}",
        f"--part={task.part}",
        f"--case={task.case}",
        f"--devices={task.devices}",
        "--here",
        f"--layout={layout}",
    ]


def _run_here(task: Task, store: Store) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", task.devices)

    import autoshard
    from experiments.fidelity_parts import hand, measuring, opening, predicting, sampling, searching
    from experiments.progress import progress_bar, show_on
    from experiments.zoo.cases import case as case_of

    scale, seed, limit_s = _SCALE.value, _SEED.value, _LIMIT.value
    case = case_of(task.case, scale)
    budget = autoshard.Budget()
    size = sampling.Size()
    if _SHORT.value:
        budget = autoshard.Budget(candidates=24, compiles=4, profiles=3, rounds=3)
        size = sampling.Size(fitting=4, top=2, total=8)
    if task.part == "hand":
        if _LAYOUT.value:
            hand.compare_one(task, case, store, _LAYOUT.value, seed=seed, limit_s=limit_s)
            return
        hand.run(
            task,
            case,
            store,
            scale=scale,
            seed=seed,
            limit_s=limit_s,
            # Beside the pairs: two compilations, and the last pairs of a slow layout.
            start=lambda layout: running.in_process(
                "experiments.fidelity", _flags(task, layout), 2 * limit_s + 900
            ),
        )
        return
    with progress_bar(Console()) as progress:
        show = show_on(progress)
        given: dict[str, Any] = {
            "scale": scale,
            "seed": seed,
            "budget": budget,
            "callbacks": (show,),
        }
        if task.part == "search":
            searching.run(task, case, store, **given)
        elif task.part == "predict":
            predicting.run(task, case, store, compiles=not _RUNG1.value, **given)
        else:
            settings = opening.Settings(rounds=_ROUNDS.value, pair_limit_s=limit_s, size=size)
            measuring.run(task, case, store, settings=settings, **given)


def _report(store: Store, console: Console) -> None:
    from experiments import pages
    from experiments.fidelity_parts import peers_page, plots, report, tables
    from experiments.fidelity_parts.store import read, write
    from experiments.zoo.cases import CASES

    results = report.load(store, CASES, MESHES, _layouts)
    summary = report.summarise(results)
    write(store.results / "summary.json", summary)
    made = tables.all_tables(summary)
    if peers := read(store.results / "peers.json"):
        made.append(peers_page.peers_table(peers, len(CASES)))
    if _PAGE.value:
        pages.put_into(pathlib.Path(_PAGE.value), pages.as_markdown(made))
    for table in made:
        console.print(pages.as_rich(table))
    try:
        plots.draw(results, summary, store.results)
    except ModuleNotFoundError as error:
        console.print(f"no plots: {error}; pip install -e .[plots]", style="red", markup=False)
    console.print(f"Figures in {store.results}.", highlight=False)


if __name__ == "__main__":
    app.run(main)
