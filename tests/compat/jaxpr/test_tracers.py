"""A tracer that is asked for its sharding says no at once."""

import concurrent.futures

import jax
import jax.numpy as jnp
import pytest
from jax._src import core
from jax._src.interpreters import partial_eval

from autoshard.compat.jaxpr.tracers import origins_unsaid

ASKED = core.Tracer.sharding


@pytest.fixture(scope="module", autouse=True)
def quickly_traced():
    """In place of all tests', inside of which every test is."""


@pytest.fixture
def searched(monkeypatch):
    """The searches for the origin of a tracer."""
    found = []
    monkeypatch.setattr(
        partial_eval.DynamicJaxprTracer, "_origin_msg", lambda self: found.append(self) or ""
    )
    return found


def asked():
    """Whether a tracer said at once that it has no sharding, and in which words."""
    said = []

    def f(x):
        assert getattr(x, "sharding", None) is None and not hasattr(x, "sharding")
        try:
            said.append(str(x.sharding))
        except AttributeError as error:
            said.append(str(error))
        return x

    jax.eval_shape(f, jnp.zeros(3))
    return said[0]


def test_nothing_is_searched_for_inside(searched):
    with origins_unsaid():
        text = asked()
        with origins_unsaid():
            asked()
        asked()
        assert jnp.zeros(3).sharding.device_set, "arrays have theirs"
    assert not searched
    assert "sharding" in text and "float32[3]" in text


def test_outside_jax_answers_as_before(searched):
    before, count = asked(), len(searched)
    with origins_unsaid(), pytest.raises(ZeroDivisionError), origins_unsaid():
        raise ZeroDivisionError
    assert asked() == before and len(searched) == 2 * count
    assert core.Tracer.sharding is ASKED


def test_two_threads_may_be_inside(searched):
    with origins_unsaid():
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            other.submit(origins_unsaid()(asked)).result()
        asked()
    assert not searched
