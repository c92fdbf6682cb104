"""Errors of XLA as typed failures: what its text says about kind and missing memory."""

import re

import jax

from autoshard.records.trial import Failure, Kind, Stage

_SIZE = r"([0-9.]+) ?([KMGTP]?)(?:i?B)?"
_UNIT = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_EXCEEDED_BY = re.compile(rf"[Ee]xceeded \w+ capacity by {_SIZE}")
_USED_OF = re.compile(rf"[Uu]sed {_SIZE} of {_SIZE} ")
_EXCEEDS = re.compile(
    rf"{_SIZE}[^0-9]*?exceeds (?:the )?(?:available )?\w*(?: capacity)? \({_SIZE}\)"
)
_SPACE = re.compile(
    r"in memory space (\w+)|\bspace=(\w+)|[Ee]xceeded (?:scoped )?(\w+) (?:capacity|limit) by"
    r"|([Ss]hared) memory"
)
"""Where memory ran out; of what a message names, the first."""
_UNSUPPORTED = ("UNIMPLEMENTED", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND")


def failure_of(error: Exception, stage: Stage, elapsed_s: float) -> Failure:
    """What an exception of the compiler or the runtime means for the candidate.

    RESOURCE_EXHAUSTED is OOM, DEADLINE_EXCEEDED a timeout; a program that XLA declines is
    unsupported; all else, its internal errors included, is a crash. The message is XLA's own.
    Declined is also a kernel that asks for more of the memory beside a core (vmem and smem of a
    TPU, shared memory of a GPU) than there is: how much of the device's memory the program needs
    does not matter there, nor how much there is.
    """
    text = str(error)
    missing = None
    if isinstance(error, MemoryError):
        text, kind = f"the host is out of memory: {text}", Kind.OOM
    elif not isinstance(error, jax.errors.JaxRuntimeError):
        text = f"{type(error).__name__}: {text}"
        kind = Kind.UNSUPPORTED if isinstance(error, NotImplementedError) else Kind.CRASH
    elif text.startswith("RESOURCE_EXHAUSTED") and not _on_chip(text):
        kind, missing = Kind.OOM, missing_bytes(text)
    elif text.startswith((*_UNSUPPORTED, "RESOURCE_EXHAUSTED")):
        kind = Kind.UNSUPPORTED
    elif text.startswith("DEADLINE_EXCEEDED"):
        kind = Kind.TIMEOUT
    else:
        kind = Kind.CRASH
    return Failure(stage=stage, kind=kind, message=text, elapsed_s=elapsed_s, missing_bytes=missing)


def declined(error: Exception, elapsed_s: float) -> Failure:
    """What an exception of rung 1 means: this is no layout, or not one for the partitioner."""
    return Failure(
        stage=Stage.PROPAGATE,
        kind=Kind.UNSUPPORTED,
        message=str(error),
        elapsed_s=elapsed_s,
    )


def missing_bytes(text: str) -> int | None:
    """By how many bytes an out-of-memory message says the device's memory is exceeded.

    None where it does not say so, or speaks of another memory.

    >>> missing_bytes("Used 65.97G of 15.75G hbm. Exceeded hbm capacity by 50.22G.") // 2**30
    50
    >>> missing_bytes("Out of memory allocating 1000 bytes.") is None
    True
    >>> missing_bytes("Used 60M of 16M vmem. Exceeded vmem capacity by 44M.") is None
    True
    """
    if _on_chip(text):
        return None
    if match := _EXCEEDED_BY.search(text):
        return _bytes(*match.groups())
    if match := _USED_OF.search(text) or _EXCEEDS.search(text):
        used, used_unit, limit, limit_unit = match.groups()
        return max(0, _bytes(used, used_unit) - _bytes(limit, limit_unit))
    return None


def _on_chip(text: str) -> bool:
    """Whether an out-of-memory message is about another memory than the device's (HBM).

    >>> _on_chip("Ran out of memory in memory space vmem."), _on_chip("Used 2G of 1G hbm.")
    (True, False)
    """
    found = _SPACE.search(text)
    return found is not None and next(filter(None, found.groups())).lower() != "hbm"


def _bytes(number: str, unit: str) -> int:
    """XLA writes binary units: G is 2**30 bytes."""
    return round(float(number) * 1024 ** _UNIT[unit])
