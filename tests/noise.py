"""What JAX itself writes on stderr where its CUDA plugin is installed and no GPU is there."""

import re

_OF_JAX = re.compile(r"\S+ .*cudart_stub\.cc:|WARNING: All log messages before absl::InitializeLog")


def others(said: str) -> list[str]:
    """The lines that JAX did not write as a program imported it, before autoshard was there."""
    return [line for line in said.splitlines() if not _OF_JAX.match(line)]
