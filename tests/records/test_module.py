"""A lowered program as data."""

import dataclasses

import jax

from autoshard.compat.xla.executable import compile_module
from tests import lowered


def test_what_a_program_holds_is_what_its_compiler_says_of_its_arguments():
    module = lowered.train_module()
    executable = compile_module(module, jax.devices())
    assert module.held_bytes(1) == executable.memory.arguments_bytes
    whole = dataclasses.replace(module, inputs=module.inputs[: module.state_count])
    batch = module.held_bytes(1) - whole.held_bytes(1)
    assert batch > 0
    assert module.held_bytes(3) == module.held_bytes(1) + 2 * batch
