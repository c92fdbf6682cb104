"""The compilers' noise on standard error, kept from the user's terminal.

XLA writes its warnings straight to file descriptor 2, past Python. While a program compiles in
this process the descriptor points to a file; afterwards lines that are XLA's go to the log, all
others to where they belong.
"""

import contextlib
import importlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_log = logging.getLogger("autoshard")
_XLA_LINE = re.compile(
    rb"^(?:[WEIF]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+\.cc:\d+\]"
    rb"|WARNING: All log messages before absl::InitializeLog)"
)


def import_jax() -> None:
    """Imports JAX, if nothing has: where CUDA's plugin is installed it writes even then."""
    with quiet():
        importlib.import_module("jax")


def start_jax() -> None:
    """Starts JAX's backends, if they are not: compilers that are plugins write when they load."""
    with quiet():
        importlib.import_module("jax").local_devices()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Holds back what is written to descriptor 2 inside, then sorts it as above."""
    with contextlib.ExitStack() as stack:
        try:
            sys.stderr.flush()
            held = stack.enter_context(tempfile.TemporaryFile())
            kept = os.dup(2)
        except (OSError, ValueError, AttributeError):
            # No descriptor 2, a closed stream, or no folder to write to.
            yield
            return
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held.read().splitlines(keepends=True):
                if _XLA_LINE.match(line):
                    _log.debug("%s", line.decode("utf-8", "replace").rstrip())
                else:
                    os.write(2, line)
