"""Which executables stay in a process that measures: as many as its memory mappings hold."""

from collections.abc import Callable

from autoshard import host
from autoshard.compat.executable import Executable
from autoshard.module import Module

_FULL = 0.75
"""Of the mappings that a process may have, those that executables may bring it to.

What is left is for the next one, of which nobody knows how many it takes, and for arrays.
"""


class Residents:
    """Executables by the digest of their modules; where they get too many, the oldest go.

    XLA:CPU maps every kernel of a program into the process by itself: a ResNet-152's step took 1140
    mappings, and a process that loaded 70 ended (Linux allows 65530) with "LLVM ERROR: Unable to
    allocate section memory!". What has gone is loaded again when it is wanted.

    Args:
      load: makes the executable of a module.
    """

    def __init__(self, load: Callable[[Module], Executable]):
        self._load = load
        self._held: dict[str, Executable] = {}  # the one used last comes last

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    def get(self, digest: str, module: Module) -> Executable:
        """The executable of a module, loaded where it is not here; quick where it is.

        Args:
          digest: of the module.
        """
        found = self._held.pop(digest, None)
        if found is None:
            while self._held and module.platform == "cpu" and _is_full():
                del self._held[next(iter(self._held))]
            found = self._load(module)
        self._held[digest] = found
        return found

    def drop(self, digest: str) -> None:
        self._held.pop(digest, None)


def _is_full() -> bool:
    said = host.mappings()
    return said is not None and said[0] > _FULL * said[1]
