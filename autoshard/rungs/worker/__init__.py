"""A process that may be killed."""
