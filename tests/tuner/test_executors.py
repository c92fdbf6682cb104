"""Compiling on somebody else's executor: Dask, one of whose two worker processes dies."""

import os
import pathlib
import signal

import jax
import pytest

import autoshard
from autoshard.records.trial import Estimate, Stage
from autoshard.tuner.budget import Event
from tests import workloads

distributed = pytest.importorskip("distributed")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # dask's own, of sockets and event loops
def test_a_dask_worker_killed_in_mid_search_costs_nothing_but_time(
    tmp_path: pathlib.Path, calibration: pathlib.Path
) -> None:
    killed: list[int] = []
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=str(tmp_path),
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        pids = sorted(client.run(os.getpid).values())

        def kill_one(event: Event) -> None:
            if event.stage is Stage.COMPILE and event.done >= 1 and not killed:
                killed.append(pids[0])
                os.kill(pids[0], signal.SIGKILL)

        plan = autoshard.search(
            workloads.mlp,
            jax.devices()[:8],
            budget=autoshard.Budget(candidates=40, compiles=6, profiles=0),
            executor=client.get_executor(),
            journal=tmp_path / "journal.jsonl",
            calibration=calibration,
            callbacks=[kill_one],
        )
    compiled = [t.compiled for t in plan.evidence.trials if t.compiled is not None]
    assert killed and len(compiled) == 6
    assert all(isinstance(outcome, Estimate) for outcome in compiled)
