"""Processors by name and generation."""

import os
import platform

import pytest

from autoshard.host import cores, described, machine, processor

X86 = "processor\t: 0\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n"


def test_two_generations_of_one_name_are_told_apart() -> None:
    older, newer = (described(X86.format(*both)) for both in ((25, 17), (26, 2)))
    assert older == "AMD EPYC (cpu family 25, model 17)" != newer
    assert described(X86.format(25, 17) + "\n" + X86.format(26, 2)) == older


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", ""),
        ("model name\t: Some Processor\n", "Some Processor"),
        (
            "CPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n",
            "(CPU implementer 0x41, CPU part 0xd0c, CPU variant 0x3)",
        ),
    ],
)
def test_what_is_not_told_is_left_out(text: str, name: str) -> None:
    assert described(text) == name


def test_this_host_has_one() -> None:
    assert processor() and "\n" not in processor()


def test_a_machine_is_its_architecture_and_its_processor() -> None:
    architecture, _, rest = machine().partition(" ")
    assert architecture == platform.machine() and rest == processor()


def test_only_the_cores_of_this_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == (os.cpu_count() or 1)
