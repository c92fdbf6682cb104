"""The baselines as people write them by hand: plain JAX, and no import of autoshard."""
