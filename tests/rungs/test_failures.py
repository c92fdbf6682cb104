import jax
import pytest

from autoshard.rungs.failures import failure_of, missing_bytes
from autoshard.trial import Kind, Stage

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (
            "Ran out of memory in memory space hbm. Used 65.97G of 15.75G hbm. "
            "Exceeded hbm capacity by 50.22G.",
            round(50.22 * GIB),
        ),
        ("Used 1.5M of 1M hbm.", 2**19),
        ("Program needs 65.97G which exceeds available HBM (15.75G)", round(50.22 * GIB)),
        ("Out of memory allocating 1000 bytes.", None),
        ("", None),
    ],
)
def test_missing_bytes(text, missing):
    got = missing_bytes(text)
    assert got == missing or abs(got - missing) < 16


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RESOURCE_EXHAUSTED: Used 2G of 1G hbm.", Kind.OOM),
        ("UNIMPLEMENTED: no such thing", Kind.UNSUPPORTED),
        ("INVALID_ARGUMENT: bad sharding", Kind.UNSUPPORTED),
        ("DEADLINE_EXCEEDED: too slow", Kind.TIMEOUT),
        ("INTERNAL: RET_CHECK failure", Kind.CRASH),
    ],
)
def test_kinds_of_xla_errors(text, kind):
    failure = failure_of(jax.errors.JaxRuntimeError(text), Stage.COMPILE, 1.5)
    assert (failure.stage, failure.kind, failure.elapsed_s) == (Stage.COMPILE, kind, 1.5)
    assert failure.message == text
    assert failure.missing_bytes == (GIB if kind is Kind.OOM else None)


def test_other_exceptions_name_their_type():
    assert failure_of(KeyError("x"), Stage.PROFILE, 0.0).message == "KeyError: 'x'"
    assert failure_of(NotImplementedError(), Stage.PROFILE, 0.0).kind is Kind.UNSUPPORTED
    assert failure_of(MemoryError(), Stage.PROFILE, 0.0).kind is Kind.OOM
