"""Models in Flax NNX, Flax Linen and plain JAX, and the data that the experiments train them on."""
