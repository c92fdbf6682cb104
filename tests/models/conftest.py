"""These tests trace large models of Flax NNX by functions of JAX alone."""

import pytest

from autoshard.compat.jaxpr.tracers import origins_unsaid


@pytest.fixture(scope="module", autouse=True)
def cheap_tracer_errors():
    with origins_unsaid():
        yield
