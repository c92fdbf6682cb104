"""What the tests of the driver share."""

import jax
import pytest

from autoshard.budget import Budget
from autoshard.driver.ledger import Ledger
from autoshard.journal import Journal
from autoshard.target import find_target


@pytest.fixture
def ledger(tmp_path):
    """A ledger without rows."""
    return Ledger(
        subjects=[],
        target=find_target(jax.devices()),
        cost=None,
        budget=Budget(),
        journal=Journal(),
        callbacks=(),
        seed=0,
        limit_bytes=1000,
        folder=tmp_path,
    )
