"""Which executables stay in a process that measures: as many as mappings and memory hold."""

from collections.abc import Callable

from autoshard import host
from autoshard.compat.executable import Executable
from autoshard.module import Module

_FULL = 0.75
"""Of the mappings that a process may have, those that executables may bring it to.

What is left is for the next one, of which nobody knows how many it takes, and for arrays.
"""
_SHORT = 0.1
"""Of the memory that a process may use: with less left than that it is short.

An executable of 1800 mappings took 0.24 GB of a host of 24; what is left is for arrays and
temporaries too.
"""


class Residents:
    """Executables by the digest of their modules; where they get too many, the oldest go.

    XLA:CPU maps every kernel of a program into the process by itself: one step took 1140 mappings,
    and a process that loaded 70 of it ended (Linux allows 65530) with "LLVM ERROR: Unable to
    allocate section memory!". What has gone is loaded again when it is wanted.

    Where memory is short, one goes for each that comes: what it leaves returns to the allocator,
    not to the system, so that no more is seen to be left, but the next one finds it.

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
            if _counts(module):
                if _is_short():
                    self._let_go()
                while self._held and _is_full():
                    self._let_go()
            found = self._load(module)
        self._held[digest] = found
        return found

    def has_room(self, module: Module) -> bool:
        """Whether the executable of a module would drive none out."""
        return not self._held or not _counts(module) or not (_is_short() or _is_full())

    def drop(self, digest: str) -> None:
        self._held.pop(digest, None)

    def _let_go(self) -> None:
        if self._held:
            del self._held[next(iter(self._held))]


def _counts(module: Module) -> bool:
    """Whether executables are many for this process: what accelerators hold is not in the count."""
    return module.platform == "cpu"


def _is_full() -> bool:
    said = host.mappings()
    return said is not None and said[0] > _FULL * said[1]


def _is_short() -> bool:
    left = host.available_bytes()
    return left is not None and left < _SHORT * host.memory_bytes()
