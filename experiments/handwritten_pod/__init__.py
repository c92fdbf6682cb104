"""The pods' baselines as people write them by hand: plain JAX, and no import of autoshard.

Each is a function of a mesh and a size; it allocates nothing, so the mesh may also be a
`jax.sharding.AbstractMesh` or one of a topology whose devices are not here.
"""
