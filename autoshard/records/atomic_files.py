"""Files that are written whole or not at all, whoever else writes them at the same time."""

import contextlib
import os
import pathlib
import uuid


def write_atomically(path: pathlib.Path, data: bytes, sync: bool = False) -> None:
    """Writes a file beside its place, then moves it there.

    The name beside it is new for each call: threads and processes may write one file at once, and
    the last one wins.

    Args:
      sync: whether the file must survive a power cut.

    Raises:
      OSError: it cannot be written. Nothing is left beside it.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(data)
        if sync:
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
