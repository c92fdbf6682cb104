"""What a search tells the race of its finalists."""

import jax

from autoshard.compat.xla.executable import compile_module
from autoshard.tuner.measuring import footprint
from tests import lowered


def test_a_finalist_holds_its_state_and_batches_and_needs_its_temporaries_while_it_runs():
    module = lowered.train_module()
    memory = compile_module(module, jax.devices()).memory
    taken = footprint(module, memory.peak_bytes)
    assert memory.temporaries_bytes > 0
    assert memory.temporaries_bytes <= taken.running == memory.peak_bytes - memory.arguments_bytes
    assert taken.held == module.held_bytes(2)
