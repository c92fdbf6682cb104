"""Experiments: absl-flag scripts, one question each, and the training loop they share."""

import autoshard as autoshard  # before JAX: what its plugins write when they load is for the log
