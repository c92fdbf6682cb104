"""Files that several threads write at once."""

import concurrent.futures
import os
import pathlib
import stat

import pytest

from autoshard.records.atomic_files import write_atomically


def test_threads_that_write_one_file_at_once_write_it_whole(tmp_path: pathlib.Path) -> None:
    """Names by the process's id collide: one thread moves away what the other still writes."""
    path = tmp_path / "file"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: write_atomically(path, bytes([i]) * 200_000), range(64)))
    data = path.read_bytes()
    assert len(data) == 200_000 and len(set(data)) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("sync", [False, True])
def test_what_cannot_be_written_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync" if sync else "replace", full)
    monkeypatch.setattr(pathlib.Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"after", sync=sync)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"before"


def test_a_file_may_be_read_by_whom_the_user_allows(tmp_path: pathlib.Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", b"plan")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
