"""Journal: the append-only record of trials. One JSON object a line; a torn last line is dropped.

A record's key says everything its answer depends on, so that an answer is used again exactly when
it would come out the same. Before each compile or measurement a `started` line is written, and
`withdrawn` where it was left in good order without an answer. What is neither is tried once more on
resume, and then counts as a crash.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from autoshard.errors import JournalError
from autoshard.records.trial import (
    Collective,
    DeviceProfile,
    Estimate,
    Failure,
    Kind,
    Measurement,
    Outcome,
    Rung,
    Stage,
)

SCHEMA = 2
_FORMAT = "autoshard-journal"
_HEADER: dict[str, object] = {"format": _FORMAT, "schema": SCHEMA}


def outcome_to_json(outcome: Outcome) -> dict[str, object]:
    """A record as JSON; `is` tells which kind it is."""
    kind = {Estimate: "estimate", Measurement: "measurement", Failure: "failure"}[type(outcome)]
    return {"is": kind, **dataclasses.asdict(outcome)}


def outcome_from_json(data: dict[str, object]) -> Outcome:
    """Reads what `outcome_to_json` wrote.

    Raises:
      JournalError: a field is missing or of the wrong kind.
    """
    try:
        rest = {k: v for k, v in data.items() if k != "is"}
        if data["is"] == "estimate":
            rest["rung"] = Rung(str(rest["rung"]))
            rest["collectives"] = tuple(
                Collective(
                    **{
                        **c,
                        "mesh_axes": tuple(c["mesh_axes"]),
                        "members": tuple(c.get("members", ())),
                    }
                )
                for c in rest["collectives"]  # type: ignore[attr-defined]
            )
            rest["unmodelled"] = tuple((w, s) for w, s in rest["unmodelled"])  # type: ignore[attr-defined]
            rest.setdefault("assumptions", ())  # not in files from before there were any
            for name in ("dropped", "warnings", "assumptions"):
                rest[name] = tuple(rest[name])  # type: ignore[arg-type]
            return Estimate(**rest)  # type: ignore[arg-type]
        if data["is"] == "measurement":
            rest["devices"] = tuple(DeviceProfile(**d) for d in rest["devices"])  # type: ignore[attr-defined]
            for name in ("samples_s", "rounds"):
                rest[name] = tuple(rest[name])  # type: ignore[arg-type]
            return Measurement(**rest)  # type: ignore[arg-type]
        if data["is"] == "failure":
            rest["stage"], rest["kind"] = Stage(str(rest["stage"])), Kind(str(rest["kind"]))
            return Failure(**rest)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"not an outcome: {error!r} in {str(data)[:200]}") from error
    raise JournalError(f"not an outcome: unknown kind {data['is']!r}")


def key_of(**parts: object) -> str:
    """Hex digest of everything a record's answer depends on, which must be JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _line(record: dict[str, object]) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=True) + "\n"


def _lock(file: IO[str], path: pathlib.Path) -> None:
    """Keeps a second search out of a journal until this one closes it, or its process ends."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalError(
            f"{path} is in use by another search: wait, or give this one its own"
        ) from None
    except OSError:
        pass  # a file system without locks


class Journal:
    """An open journal. Records are kept in memory too; appending writes through.

    Attributes:
      path: the file, None for one that only lives in memory.
      dropped: what a torn last line held, "" if it was whole.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self.path = pathlib.Path(path) if path is not None else None
        self.dropped = ""
        self._outcomes: dict[str, Outcome] = {}
        self._notes: dict[str, dict[str, object]] = {}
        self._starts: dict[str, int] = {}
        self._file: IO[str] | None = None
        if self.path is not None:
            self._open(self.path)

    def _open(self, path: pathlib.Path) -> None:
        if path.is_dir():
            raise JournalError(f"{path} is a folder, expected a journal file")
        there = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        try:
            _lock(self._file, path)
            whole = self._read(path) if there else 0
            if self._file.tell() > whole:
                self._file.truncate(whole)
            if whole == 0:
                self._write(_HEADER)
                self.sync()
        except BaseException:
            self.close()
            raise

    def _read(self, path: pathlib.Path) -> int:
        """Reads every whole record; returns the byte length of the whole lines, 0 if there is none.

        A last line that is cut off is kept in `dropped`. Lines that are whole JSON but no records
        were not cut off: they are damaged wherever they stand.
        """
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            self.dropped = data[end:].decode("utf-8", "replace")
        lines = data[:end].split(b"\n")[:-1]
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not an object")
            except ValueError as error:
                if number == 1:
                    raise JournalError(
                        f"{path} is not an autoshard journal: its first line is {line[:80]!r}"
                    ) from None
                if number == len(lines):  # a torn line that a newline happened to end
                    self.dropped = line.decode("utf-8", "replace")
                    return end - len(line) - 1
                raise self._damaged(path, number, error) from None
            if number == 1:
                self._check_header(path, record)
                continue
            try:
                if record["record"] == "started":
                    self._starts[record["key"]] = self._starts.get(record["key"], 0) + 1
                elif record["record"] == "withdrawn":
                    self._starts[record["key"]] = self._starts.get(record["key"], 1) - 1
                elif record["record"] == "outcome":
                    self._starts.pop(record["key"], None)
                    self._outcomes[record["key"]] = outcome_from_json(record["outcome"])
                    self._notes[record["key"]] = {
                        k: v for k, v in record.items() if k not in ("record", "key", "outcome")
                    }
                else:
                    raise JournalError(f"unknown record {record['record']!r}")
            except (JournalError, KeyError, TypeError, AttributeError) as error:
                raise self._damaged(path, number, error) from error
        if not lines and not _line(_HEADER).startswith(self.dropped):
            raise JournalError(f"{path} is not an autoshard journal: it has no whole line")
        return end

    def _damaged(self, path: pathlib.Path, number: int, error: Exception) -> JournalError:
        return JournalError(
            f"{path}:{number} is damaged ({error!r}); the lines before it are whole: copy them to a"
            f" new file (head -n {number - 1}) and go on with that"
        )

    def _check_header(self, path: pathlib.Path, record: dict[str, object]) -> None:
        if record.get("format") != _FORMAT:
            raise JournalError(
                f"{path} is not an autoshard journal: its first line has format"
                f" {record.get('format')!r}, expected {_FORMAT!r}"
            )
        schema = record.get("schema")
        if schema != SCHEMA:
            raise JournalError(
                f"{path} has schema {schema}, this version reads {SCHEMA}: "
                + (
                    "upgrade autoshard"
                    if isinstance(schema, int) and schema > SCHEMA
                    else "start a new one"
                )
            )

    def _write(self, record: dict[str, object]) -> None:
        if self._file is not None:
            with self._losing():
                self._file.write(_line(record))

    def sync(self) -> None:
        """Makes everything written so far survive a power cut."""
        if self._file is not None:
            with self._losing():
                self._file.flush()
                os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Goes on in memory alone, with a warning, where the file takes nothing more."""
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            warnings.warn(
                f"{self.path} cannot be written any more ({error}): the search goes on, but could"
                " not be gone on with from here",
                stacklevel=2,
            )
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()

    def find(self, key: str) -> Outcome | None:
        """The outcome recorded under a key."""
        return self._outcomes.get(key)

    def note(self, key: str) -> dict[str, object]:
        """The notes beside an outcome; {} if there are none."""
        return self._notes.get(key, {})

    def attempts(self, key: str) -> int:
        """How often work under a key was started since its last outcome, and not withdrawn."""
        return self._starts.get(key, 0)

    def started(self, key: str, note: dict[str, object]) -> None:
        """Records that work begins which may take the process down."""
        self._starts[key] = self._starts.get(key, 0) + 1
        self._write({"record": "started", "key": key, **note})
        self.sync()

    @contextlib.contextmanager
    def attempted(self, notes: Mapping[str, dict[str, object]]) -> Iterator[None]:
        """A block of work under some keys that may take the process down.

        Work without an outcome is withdrawn at the end. If the process lives on, the work was left
        in good order, and its start says nothing about the program.
        """
        for key, note in notes.items():
            self.started(key, note)
        try:
            yield
        finally:
            for key in notes:
                if self.attempts(key):
                    self._starts[key] -= 1
                    self._write({"record": "withdrawn", "key": key})
            self.sync()

    def add(self, key: str, outcome: Outcome, note: dict[str, object], sync: bool = True) -> None:
        """Records an outcome. With `sync=False` it may be lost to a power cut until `sync()`."""
        self._outcomes[key], self._notes[key] = outcome, note
        self._starts.pop(key, None)
        self._write({"record": "outcome", "key": key, **note, "outcome": outcome_to_json(outcome)})
        if sync:
            self.sync()
        elif self._file is not None:
            with self._losing():
                self._file.flush()

    def add_all(self, records: Sequence[tuple[str, Outcome, dict[str, object]]]) -> None:
        """Records outcomes that belong together, in one write: all are kept, or hardly any."""
        for key, outcome, note in records:
            self._outcomes[key], self._notes[key] = outcome, note
            self._starts.pop(key, None)
            self._write(
                {"record": "outcome", "key": key, **note, "outcome": outcome_to_json(outcome)}
            )
        self.sync()

    def __len__(self) -> int:
        return len(self._outcomes)

    def close(self) -> None:
        if self._file is not None:
            with self._losing():
                self._file.close()
            self._file = None


@contextlib.contextmanager
def opened(journal: Journal | str | os.PathLike[str] | None) -> Iterator[Journal]:
    """A journal from a path, closed at the end; one that is already open stays open."""
    if isinstance(journal, Journal):
        yield journal
        return
    own = Journal(journal)
    try:
        yield own
    finally:
        own.close()
