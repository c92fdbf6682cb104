"""Layouts as people write them by hand: plain JAX, and no import of autoshard.

`experiments.compare` runs them on fake devices, `experiments.plan_pod` compiles them for hardware
that is not here.
"""
