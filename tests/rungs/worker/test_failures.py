import jax
import pytest

from autoshard.records.trial import Kind, Stage
from autoshard.rungs.worker.failures import failure_of, missing_bytes

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
        (
            "Ran out of memory in memory space vmem. Used 59.79M of 16.00M vmem. Exceeded vmem"
            " capacity by 43.79M.",
            None,
        ),
        ("Used 1.00M of 1.00M smem. Exceeded smem capacity by 1.7K.", None),
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


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
        " vmem. Used 59.79M of 16.00M vmem. Exceeded vmem capacity by 43.79M.",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space smem. Used 1.00M of 1.00M smem."
        " Exceeded smem capacity by 1.7K.",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for"
        " %reduce-window.1 = (u32[16,8,128]{2,1,0}) reduce-window(...). Scoped allocation with size"
        " 31.07M and limit 16.00M exceeded scoped vmem limit by 15.07M.",
        "RESOURCE_EXHAUSTED: Scoped allocation with size 31.07M and limit 16.00M exceeded scoped"
        " vmem limit by 15.07M.",
        # So says libtpu 0.0.42.
        "RESOURCE_EXHAUSTED: Allocation (size=16777216) would exceed memory (size=1048576) ::"
        " #allocation2 [shape = 'f32[1024,4096]{1,0:T(8,128)}', space=smem, size = 0x1000000,"
        " scoped, tag = 'scratch operand'] :: _lambda_.1",
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 4194304, available:"
        " 101376",
    ],
)
def test_memory_on_the_chip_is_not_the_devices_memory(text):
    """A smaller batch would not help: a kernel asks for more than there is beside a core."""
    failure = failure_of(jax.errors.JaxRuntimeError(text), Stage.COMPILE, 1.5)
    assert failure.kind is Kind.UNSUPPORTED and failure.missing_bytes is None
    assert failure.message == text


def test_what_a_full_memory_holds_says_nothing_of_which_one_it_is():
    text = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 2.00G of 1.00G hbm."
        " Exceeded hbm capacity by 1.00G. Total vmem usage: in memory space vmem 1M."
    )
    failure = failure_of(jax.errors.JaxRuntimeError(text), Stage.COMPILE, 1.5)
    assert (failure.kind, failure.missing_bytes) == (Kind.OOM, GIB)


def test_other_exceptions_name_their_type():
    assert failure_of(KeyError("x"), Stage.PROFILE, 0.0).message == "KeyError: 'x'"
    assert failure_of(NotImplementedError(), Stage.PROFILE, 0.0).kind is Kind.UNSUPPORTED
    assert failure_of(MemoryError(), Stage.PROFILE, 0.0).kind is Kind.OOM
