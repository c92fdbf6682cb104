"""Every use of jaxlib, jax.extend, jax.experimental and version-dependent JAX names."""
