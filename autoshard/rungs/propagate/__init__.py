"""Rung 1: ask the partitioner about a layout, count what it says, estimate time and memory."""

from autoshard.rungs.propagate.propagator import Propagator as Propagator
