"""Rung 2: ask the target's own XLA, and read its program."""
