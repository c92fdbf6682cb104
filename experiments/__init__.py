"""Experiments: absl-flag scripts, one question each, and the training loop they share."""
