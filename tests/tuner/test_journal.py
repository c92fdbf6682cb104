import dataclasses
import errno
import json
import os
import pathlib
import warnings
from typing import Any

import pytest

from autoshard.errors import JournalError
from autoshard.records.trial import (
    Collective,
    DeviceProfile,
    Estimate,
    Failure,
    Kind,
    Measurement,
    Rung,
    Stage,
)
from autoshard.tuner.journal import (
    SCHEMA,
    Journal,
    key_of,
    opened,
    outcome_from_json,
    outcome_to_json,
)

OLD = pathlib.Path(__file__).parents[1] / "data" / "journal-schema-2.jsonl"
HEADER = {"format": "autoshard-journal", "schema": SCHEMA}

ESTIMATE = Estimate(
    rung=Rung.PROPAGATE,
    time_s=0.5,
    compute_s=0.25,
    communication_s=0.25,
    peak_memory_bytes=10,
    state_bytes=4,
    flops=1e9,
    bytes_accessed=1e6,
    op_count=3,
    collectives=(
        Collective(
            kind="all_reduce", group_size=4, mesh_axes=("x", "y"), bytes=8, count=2, source="a.py:3"
        ),
        Collective(kind="all_gather", group_size=2, mesh_axes=(), bytes=8, count=1, members=(0, 3)),
    ),
    dropped=("a sentence",),
    unmodelled=(("custom call f", 0.25),),
    assumptions=("a loop runs once",),
    warnings=("a warning",),
    elapsed_s=0.125,
    exposed_s=0.0625,
)
MEASUREMENT = Measurement(
    samples_s=(0.1, 0.2, 0.15),
    rounds=(0, 1, 1),
    devices=(DeviceProfile(device="d", compute_s=1.0, communication_s=2.0, idle_s=3.0),),
    numerics="exact",
    numerics_error=1e-7,
    numerics_where="state['w']",
    numerics_allowed=1e-4,
    trace="here",
)
FAILURE = Failure(stage=Stage.COMPILE, kind=Kind.OOM, message="no\nroom", missing_bytes=7)
OUTCOMES = (ESTIMATE, MEASUREMENT, FAILURE)


def written(path, *, close=True):
    journal = Journal(path)
    for name, outcome in zip("abc", OUTCOMES, strict=True):
        journal.started(name, {"rung": "x"})
        journal.add(name, outcome, {"rung": "x"})
    if close:
        journal.close()
    return journal


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda o: type(o).__name__)
def test_outcomes_survive_json(outcome):
    assert outcome_from_json(json.loads(json.dumps(outcome_to_json(outcome)))) == outcome


def test_estimates_from_before_assumptions_were_kept_are_read():
    old: Any = outcome_to_json(ESTIMATE)
    del old["assumptions"], old["exposed_s"]
    for one in old["collectives"]:
        del one["members"]
    read = outcome_from_json(json.loads(json.dumps(old)))
    collectives = tuple(dataclasses.replace(c, members=()) for c in ESTIMATE.collectives)
    assert read == dataclasses.replace(
        ESTIMATE, assumptions=(), exposed_s=None, collectives=collectives
    )


def test_a_missing_field_or_an_unknown_kind_is_told():
    data = outcome_to_json(FAILURE)
    with pytest.raises(JournalError, match="stage"):
        outcome_from_json({k: v for k, v in data.items() if k != "stage"})
    with pytest.raises(JournalError, match="unknown kind 'guess'"):
        outcome_from_json({**data, "is": "guess"})
    with pytest.raises(JournalError, match="melted"):
        outcome_from_json({**data, "kind": "melted"})
    with pytest.raises(JournalError, match="surprise"):
        outcome_from_json({**data, "surprise": 1})


def test_records_are_found_again_by_key(tmp_path):
    path = tmp_path / "new" / "folder" / "j.jsonl"
    written(path)
    journal = Journal(path)
    assert [journal.find(k) for k in "abc"] == list(OUTCOMES)
    assert journal.note("a") == {"rung": "x"} and journal.note("d") == {}
    assert journal.find("d") is None
    assert len(journal) == 3 and journal.dropped == ""
    assert journal.attempts("a") == journal.attempts("d") == 0
    journal.close()


def test_what_was_begun_and_neither_ended_nor_withdrawn_is_counted(tmp_path):
    path = tmp_path / "j.jsonl"
    with opened(path) as journal:
        with pytest.raises(KeyboardInterrupt), journal.attempted({"ended": {}, "withdrawn": {}}):
            journal.add("ended", OUTCOMES[0], {})
            raise KeyboardInterrupt
        for key in ("ended", "dead", "dead", "again", "again"):
            journal.started(key, {})
        journal.add("ended", OUTCOMES[0], {})
        journal.add_all([("again", OUTCOMES[0], {})])
        journal.started("again", {})
        expected = {"ended": 0, "withdrawn": 0, "dead": 2, "again": 1}
        assert {key: journal.attempts(key) for key in expected} == expected
    with opened(path) as journal:
        assert {key: journal.attempts(key) for key in expected} == expected


def test_each_record_is_one_line_and_on_the_disk_at_once(tmp_path):
    path = tmp_path / "j.jsonl"
    journal = written(path, close=False)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0] == HEADER
    assert [r["record"] for r in records[1:]] == ["started", "outcome"] * 3
    journal.add("d", FAILURE, {}, sync=False)  # safe from a kill, if not from a power cut
    assert json.loads(path.read_text().splitlines()[-1])["key"] == "d"
    journal.add_all([("e", ESTIMATE, {"rung": "y"}), ("f", FAILURE, {})])
    assert [json.loads(x)["key"] for x in path.read_text().splitlines()[-2:]] == ["e", "f"]
    assert journal.find("e") == ESTIMATE
    journal.close()


def test_the_last_word_on_a_key_counts(tmp_path):
    path = tmp_path / "j.jsonl"
    journal = Journal(path)
    journal.add("a", FAILURE, {})
    journal.add("a", ESTIMATE, {})
    journal.close()
    again = Journal(path)
    assert again.find("a") == ESTIMATE
    again.close()


def test_a_file_cut_anywhere_keeps_every_whole_line(tmp_path):
    path = tmp_path / "j.jsonl"
    written(path)
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in sorted({0, 1, 5, *ends, *(e + d for e in ends for d in (-2, -1, 1, 9))}):
        if cut > len(data):
            continue
        path.write_bytes(data[:cut])
        journal = Journal(path)
        whole = [e for e in ends if e <= cut]
        records = [json.loads(x) for x in data[: max(whole, default=0)].splitlines()[1:]]
        outcomes = [r["key"] for r in records if r["record"] == "outcome"]
        assert [k for k in "abc" if journal.find(k)] == outcomes
        assert journal.dropped == data[max(whole, default=0) : cut].decode()
        journal.add("z", FAILURE, {})
        journal.close()
        again = Journal(path)  # what follows the cut is no part of the next line
        assert again.find("z") == FAILURE and len(again) == len(outcomes) + 1
        again.close()


def test_a_torn_line_that_ends_in_a_newline_is_dropped_at_the_end_only(tmp_path):
    path = tmp_path / "j.jsonl"
    written(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"record":"outc\n')
    journal = Journal(path)
    assert journal.dropped == '{"record":"outc' and len(journal) == 3
    journal.close()
    assert path.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b'{"record":"outc\n', *lines[3:]]))
    with pytest.raises(JournalError, match=r"j.jsonl:4 is damaged.*head -n 3"):
        Journal(path)


@pytest.mark.parametrize(
    "line",
    [
        b"[1, 2]",
        b"\xff\xfe\x00",
        b"{}",
        b'{"record":"started"}',
        b'{"record":"outcome","key":"a"}',
        b'{"record":"outcome","key":"a","outcome":null}',
        b'{"record":"outcome","key":"a","outcome":{"is":"estimate"}}',
        b'{"record":"outcome","key":["a"],"outcome":{"is":"failure"}}',
        b'{"record":"gossip"}',
    ],
)
def test_a_damaged_line_in_the_middle_is_named_and_the_file_left_alone(tmp_path, line):
    path = tmp_path / "j.jsonl"
    written(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[2:], b""]))
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"j.jsonl:3 is damaged"):
        Journal(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "data",
    [b"epoch,loss\n1,2\n", b"\x00\x01\x02\n", b'{"format":"autoshard-plan","schema":1}\n', b"junk"],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, data):
    path = tmp_path / "theirs"
    path.write_bytes(data)
    with pytest.raises(JournalError, match="is not an autoshard journal"):
        Journal(path)
    assert path.read_bytes() == data


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(JournalError, match="is a folder"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    ("schema", "advice"),
    [(SCHEMA + 1, "upgrade autoshard"), (0, "start a new one"), ("new", "start a new one")],
)
def test_another_schema_is_refused_with_advice(tmp_path, schema, advice):
    path = tmp_path / "j.jsonl"
    path.write_text(json.dumps({**HEADER, "schema": schema}) + "\n")
    with pytest.raises(JournalError, match=f"has schema {schema}.*{advice}"):
        Journal(path)


def test_an_old_journal_is_still_read(tmp_path):
    """An early version wrote the records; their form is that of schema 2. Never regenerate it."""
    copy = tmp_path / "old.jsonl"
    copy.write_bytes(OLD.read_bytes())
    journal = Journal(copy)
    journal.close()
    assert copy.read_bytes() == OLD.read_bytes()
    records = [json.loads(line) for line in OLD.read_text().splitlines()[1:]]
    keys = [r["key"] for r in records if r["record"] == "outcome"]
    found = [journal.find(k) for k in keys]
    assert {type(f) for f in found} == {Estimate, Measurement, Failure}
    assert {f.rung for f in found if isinstance(f, Estimate)} == {Rung.PROPAGATE, Rung.COMPILE}
    measured = next(f for f in found if isinstance(f, Measurement))
    assert len(measured.samples_s) == len(measured.rounds) > 0


def test_keys_are_of_everything_and_of_no_order():
    base = {"rung": "propagate", "candidate": {"a": 1, "b": [2]}, "versions": {"jax": "1"}}
    key = key_of(**base)
    assert key == key_of(**dict(reversed(base.items())))
    for name, other in (("rung", "compile"), ("candidate", {"a": 1}), ("versions", {"jax": "2"})):
        assert key != key_of(**{**base, name: other})


def test_a_journal_in_memory_remembers_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened(None) as journal:
        journal.started("a", {})
        journal.add("a", FAILURE, {})
        assert journal.find("a") == FAILURE and journal.attempts("a") == 0
    assert list(tmp_path.iterdir()) == []


def test_opened_closes_only_what_it_opened(tmp_path):
    mine = Journal(tmp_path / "j.jsonl")
    with opened(mine) as journal:
        assert journal is mine
    mine.add("a", FAILURE, {})  # still open
    mine.close()
    with opened(tmp_path / "j.jsonl") as journal:
        assert journal.find("a") == FAILURE
    assert journal._file is None


def test_a_journal_serves_one_search_at_a_time(tmp_path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    first.started("key", {})
    with pytest.raises(JournalError, match="in use by another search"):
        Journal(path)
    first.close()
    with opened(path) as second:
        assert second.attempts("key") == 1


@pytest.mark.parametrize("call", ["fsync", "write", "flush"])
def test_a_disk_that_is_full_costs_the_journal_and_no_search(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "j.jsonl"
    journal = Journal(path)
    journal.started("a", {})
    before = path.read_bytes()
    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(journal._file, call, full, raising=False)
    with pytest.warns(UserWarning, match=r"j\.jsonl cannot be written any more .*No space left"):
        if call == "flush":  # as rung 1 writes
            journal.add("other", FAILURE, {}, sync=False)
        journal.started("b", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        journal.started("c", {})
        journal.close()
    assert [journal.attempts(key) for key in "abc"] == [1, 1, 1]
    assert path.read_bytes().startswith(before)
    monkeypatch.undo()
    with opened(path) as again:
        assert again.attempts("a") == 1
