"""Jaxprs and tracers: private and version-dependent names."""
