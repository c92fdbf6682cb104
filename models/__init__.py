"""Flax NNX models and the data that the experiments train them on."""
