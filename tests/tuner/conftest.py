"""What the tests of the driver share."""

import jax
import pytest

from autoshard.target.target import find_target
from autoshard.tuner.budget import Budget
from autoshard.tuner.journal import Journal
from autoshard.tuner.state import SearchState


@pytest.fixture
def ledger(tmp_path):
    """A ledger without rows."""
    return SearchState(
        problems=[],
        target=find_target(jax.devices()),
        cost=None,
        budget=Budget(),
        journal=Journal(),
        callbacks=(),
        seed=0,
        limit_bytes=1000,
        folder=tmp_path,
    )
