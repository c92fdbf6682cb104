"""What the environment says of XLA:CPU's threads."""

import pytest

from autoshard.compat.xla.threads import more_threads, threads_asked


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ({}, 0),
        ({"PJRT_NPROC": "12", "NPROC": "3"}, 12),
        ({"PJRT_NPROC": "many", "NPROC": "3"}, 3),  # XLA passes over what is no number
        ({"PJRT_NPROC": "", "NPROC": " 3 "}, 3),
    ],
)
def test_the_first_number_counts(monkeypatch, said, count):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert threads_asked() == count


def test_more_are_advised_than_there_are(monkeypatch):
    assert more_threads(8).startswith("PJRT_NPROC=12 ")
    monkeypatch.setenv("PJRT_NPROC", "16")
    assert more_threads(8).startswith("PJRT_NPROC=32 ")
