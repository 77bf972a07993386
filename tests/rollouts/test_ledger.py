"""Statuses and the journal: each prompt once, of bounded size, whatever a kill or a full disk leaves."""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.rollouts.journal import Journal, identity, record_of, trajectories_in
from agentrl.rollouts.ledger import Ledger, LedgerFile, RecordedBatch
from agentrl.rollouts.record import Record
from agentrl.rollouts.staleness_scheduler import GroupStatus, PromptStatus, Settings, StalenessScheduler
from agentrl.system.call_journal import Entry, Kind
from agentrl.system.json_value import as_mapping
from agentrl.trajectory import Status, Trajectory, Transcript, Turn, VersionSpan
from agentrl.trajectory.sample import Sample
from tests.naming import Names, naming

SAMPLE = Sample([{"role": "user", "content": "What is 1 + 2?"}], "x", "single_turn", ground_truth="3")


def test_a_prompt_has_one_fate() -> None:
    ledger = Ledger()
    ledger.settle({1: PromptStatus.TRAINED})
    for again in (1, 0):
        ledger.settle({0: PromptStatus.FAILED}) if again == 0 else None
        with naming(RuntimeError, f"prompts {again}", "status already"):
            ledger.settle({again: PromptStatus.TRAINED, 5: PromptStatus.TRAINED})
    assert (ledger.before, ledger.later) == (2, {})
    assert ledger.text() == "2 prompts, each once: 1 trained, 1 failed"


@given(st.permutations(range(40)), st.integers(0, 40))
def test_it_is_bounded_and_comes_back_as_it_was(order: list[int], ended: int) -> None:
    ledger = Ledger(1000, 1000)
    for one in order[:ended]:
        ledger.settle({1000 + one: PromptStatus.FAILED if one % 7 == 0 else PromptStatus.TRAINED})
    begun = [1000 + one for one in order[ended:]]
    assert min([*ledger.later, *begun], default=1040) >= min(begun, default=1040)
    again = Ledger.load(as_mapping(json.loads(json.dumps(ledger.state()))))
    assert again == ledger
    again.check(begun, 1040)
    if begun:
        with naming(DataError, f"prompts {begun[0]}"):
            again.check(begun[1:], 1040)
        with naming(DataError, "never drawn"):
            again.check(begun, max(begun))
    if ended:
        with naming(DataError, f"prompts {1000 + order[0]}"):
            again.check([*begun, 1000 + order[0]], 1040)


def test_what_a_checkpoint_holds_does_not_grow() -> None:
    ledger, sizes = Ledger(), []
    for step in range(1000):
        ledger.settle({8 * step + one: PromptStatus.FAILED if one == 3 else PromptStatus.TRAINED for one in range(8)})
        sizes.append(len(json.dumps(ledger.state())))
    assert max(sizes) < sizes[0] + 12


def test_lines_of_the_ledger(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path)
    assert file.read() == []
    batches = [
        RecordedBatch(1, 0, {0: PromptStatus.TRAINED, 1: PromptStatus.FAILED, 2: PromptStatus.TRAINED}),
        RecordedBatch(2, 1, {3: PromptStatus.TRAINED, 4: PromptStatus.TRAINED}),
    ]
    for batch in batches:
        file.add(batch)
    assert (
        file.path.read_text().splitlines()[0]
        == '{"step": 1, "version": 0, "trained": [[0, 1], [2, 3]], "failed": [[1, 2]]}'
    )
    whole = file.path.read_bytes()
    for cut in range(1, 40):
        file.path.write_bytes(whole[:-cut])
        assert file.read() == batches[: 2 if cut == 1 else 1]
    file.keep_to(2)
    file.add(batches[1])
    assert file.read() == batches
    for cut in (1, 10):  # the next line must not lengthen one that was cut off
        file.path.write_bytes(whole[:-cut])
        file.keep_to(2)
        assert file.path.read_bytes() == (whole if cut == 1 else whole.splitlines(keepends=True)[0])
    file.path.write_bytes(b"{}\n" + whole)
    with naming(DataError, "ledger.jsonl", "line 1", "found b'{}'"):
        file.read()


def test_spans_of_any_length_are_bounded(tmp_path: Path) -> None:
    for spans in ([[0, 10**12]], [[0, 1 << 19], [1 << 19, 10**6], [10**6, 2 * 10**6]]):
        line = json.dumps({"step": 1, "version": 0, "trained": spans})
        LedgerFile(tmp_path).path.write_text(line + "\n")
        with naming(DataError, "ledger.jsonl", "line 1", "1,048,576 prompts"):
            LedgerFile(tmp_path).read()
        with pytest.raises(ValueError, match="at most 1,048,576 prompts"):
            Ledger.load({"first": 0, "before": 0, "counts": {}, "later": {"trained": spans}})
    with naming(DataError, "prompts 0"):
        Ledger().check([], 10**12)


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([{2: PromptStatus.TRAINED}], ("step 4", "prompts 2")),
        ([{3: PromptStatus.TRAINED}, {3: PromptStatus.FAILED}], ("step 5", "prompts 3")),
        ([{3: PromptStatus.TRAINED}, {-1: PromptStatus.TRAINED}], ("step 5", "prompts -1")),
        (
            [{3: PromptStatus.TRAINED, 10**12: PromptStatus.TRAINED}],
            ("4", "3", "prompts 1000000000000"),
        ),
    ],
)
def test_batches_that_no_run_took_are_refused(
    tmp_path: Path, batches: list[dict[int, PromptStatus]], said: Names
) -> None:
    schedule = StalenessScheduler(Settings(1, 9, max_staleness=1, depth=1), step=3, version=3, served=3, next_ordinal=3)
    ledger = Ledger()
    ledger.settle(dict.fromkeys(range(3), PromptStatus.TRAINED))
    for step, statuses in enumerate(batches, start=4):
        LedgerFile(tmp_path).add(RecordedBatch(step, step - 1, statuses))
    with naming(DataError, "ledger.jsonl", said):
        Record(tmp_path, "key", pytest.fail).load({"ledger": ledger.state()}, schedule)


def test_a_batch_that_the_groups_cannot_make_up_is_refused(tmp_path: Path) -> None:
    settings = Settings(1, 9, max_staleness=1, depth=1, replaces=True)
    schedule = StalenessScheduler(
        settings, step=1, version=1, served=1, next_ordinal=2, left=((1, PromptStatus.FAILED),)
    )
    LedgerFile(tmp_path).add(RecordedBatch(2, 1, {2: PromptStatus.TRAINED}))  # what left goes with the next batch
    Journal(tmp_path, "key").add(record(2, GroupStatus.SCORED, 1, [trajectory(1)]))
    found = Record(tmp_path, "key", lambda line: None)
    found.load({"ledger": Ledger(0, 1, Counter({PromptStatus.TRAINED: 1})).state()}, schedule)
    with naming(DataError, "ledger.jsonl", "step 2", "prompts [2]"):
        found.again(schedule)


def test_going_back_to_the_start_takes_nothing_of_a_run_before(tmp_path: Path) -> None:
    """As where a worker dies in the validation before the first step; a batch of this run is taken again."""
    LedgerFile(tmp_path).add(RecordedBatch(1, 0, {0: PromptStatus.TRAINED}))
    Journal(tmp_path, "key").add(record(0, GroupStatus.SCORED, 0, [trajectory(0)]))
    start = StalenessScheduler(Settings(1, 9, max_staleness=1, depth=1))
    told: list[str] = []
    found = Record(tmp_path, "key", told.append)
    found.load({"ledger": Ledger().state()}, start)
    assert not found.plan and not found.journal.ended and len(told) == 1 and "1 prompts that a run before" in told[0]
    found.taken(1, 0, {0: PromptStatus.TRAINED})
    found.load({"ledger": Ledger().state()}, start)
    assert [batch.step for batch in found.plan] == [1]


def test_a_record_ends_after_all_prompts_of_plan_and_journal(tmp_path: Path) -> None:
    found = Record(tmp_path, "key", pytest.fail)
    assert found.end == 0
    found.plan.append(RecordedBatch(2, 1, {2: PromptStatus.TRAINED, 3: PromptStatus.FAILED}))
    assert found.end == 4
    Journal(tmp_path, "key").add(record(6, GroupStatus.SCORED, 1, [trajectory(1)]))
    found.journal.read()
    assert found.end == 7


def trajectory(version: int, number: int = 0) -> Trajectory:
    transcript = Transcript([5, 6, 7], [0, 1, 1], [0.0, -0.1234567, -2.5], [VersionSpan(version, 1, 3)], 1)
    turn = Turn("assistant", "three \ud83d", 0, 1, 3, finish_reason="stop", reward=0.25, state="s")
    made = Trajectory(f"train/1/{number}", 0, "x", transcripts=[transcript], turns=[turn], score=1.0)
    made.status, made.baseline = Status.COMPLETED, number == 1
    return made


def record(ordinal: int, outcome: GroupStatus, oldest: int | None, trajectories: list[Trajectory]) -> bytes:
    made = record_of(ordinal, SAMPLE, outcome, oldest, trajectories)
    assert made is not None
    return made


def test_records_come_back_and_the_last_of_a_prompt_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "key")
    for ordinal in range(5):
        journal.add(record(ordinal, GroupStatus.SCORED, ordinal, [trajectory(ordinal), trajectory(ordinal + 1, 1)]))
    journal.add(record(3, GroupStatus.SCORED, 9, [trajectory(9)]))
    journal.keep(lambda ordinal: ordinal in (1, 3, 4))
    journal.add(record(6, GroupStatus.FAILED, None, []))
    first, second = sorted(journal.folder.iterdir())
    again = Journal(tmp_path, "key")
    assert again.read() == 0 and set(again.ended) == {0, 1, 2, 3, 4, 6}, (
        "the file before stays for the checkpoint before"
    )
    assert again.size == sum(path.stat().st_size for path in (first, second)) == journal.size
    assert (again.ended[3].oldest, again.ended[3].newest, again.ended[6].newest) == (9, 9, -1)
    found, expected = trajectories_in(again.record(1)), [trajectory(1), trajectory(2, 1)]
    assert [one.baseline for one in found] == [False, True] and found[0].turns[0].state == "s"
    assert [one.outline() for one in found] == [one.outline() for one in expected]
    assert found[0].transcripts[0].ids == [5, 6, 7] and found[0].turns[0].text == "three \ufffd"
    again.keep(lambda ordinal: ordinal == 4)
    again.keep(lambda ordinal: ordinal == 4)
    assert set(again.ended) == {4} and trajectories_in(again.record(4))[0].uid == "train/1/0"
    assert not first.exists() and not second.exists()
    other = Journal(tmp_path, "another config")
    assert other.read() == 1 and other.ended == {} and other.size == 0 and not list(other.folder.iterdir())


def test_a_record_holds_trajectories_whole() -> None:
    """Several transcripts of unlike lengths, one without a token, and numbers that are none; log-probs as float32."""
    several, none = trajectory(1), trajectory(2, 1)
    several.transcripts += [
        Transcript([2**31 - 1, 0], [1, 0], [-1e-30, 0.0], [VersionSpan(4, 0, 1)], 0, policy="other"),
        Transcript(prompt_length=0),
    ]
    several.transcripts[0].trained_to, several.transcripts[1].score = 0, 0.25
    several.turns[0].state = "\ud83d"
    several.metrics, several.score_extra = {"a": math.inf, "b": 1, "c": float(numpy.float32(0.1))}, {"n": math.nan}
    none.transcripts = []
    found = trajectories_in(record(0, GroupStatus.SCORED, 1, [several, none]))
    several.turns[0].text, several.turns[0].state = "three \ufffd", "\ufffd"
    several.transcripts[0].logprobs[1] = float(numpy.float32(-0.1234567))
    several.transcripts[1].logprobs[0] = float(numpy.float32(-1e-30))
    assert found[0].transcripts == several.transcripts and found[1].transcripts == []
    assert found[0].turns == several.turns and found[0].metrics == several.metrics
    assert math.isnan(found[0].score_extra["n"])


def answer(trajectory: str, key: str, nth: int = 0, version: int | None = None) -> Entry:
    versions = None if version is None else (version, version)
    return Entry(trajectory, Kind.ANSWERED, "engine", key, nth, versions, f"{key}{nth}".encode())


def contents(journal: Journal, ordinal: int) -> list[str]:
    return [f"{one.trajectory}:{one.content.decode()}" for one in journal.entries(ordinal)]


def test_entries_stay_until_the_prompt_has_ended_or_begins_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "key")

    def add(ordinal: int, *entries: Entry) -> None:
        for entry in entries:
            journal.answered(ordinal, "row", entry)

    def reads_the_same() -> None:
        again = Journal(tmp_path, "key")
        again.read()
        assert again.ended == journal.ended and again.unfinished.keys() == journal.unfinished.keys()
        for ordinal, its in journal.unfinished.items():
            assert (again.unfinished[ordinal].prompt, again.unfinished[ordinal].oldest) == (its.prompt, its.oldest)
            assert again.entries(ordinal) == journal.entries(ordinal)
        assert again.size == journal.size == sum(path.stat().st_size for path in journal.folder.iterdir())

    begun = Entry("a", Kind.BEGUN, "tool x", "call", 0)
    for _ in range(3):  # each round in the files of the ones before
        add(1, answer("a", "k", 0, 4), begun, answer("a", "call"), answer("a", "k", 1, 3), answer("b", "k", 0, 5))
        assert contents(journal, 1) == ["a:k0", "a:call0", "a:k1", "b:k0"] and journal.unfinished[1].oldest == 3
        reads_the_same()
        journal.keep(lambda ordinal: True)
        reads_the_same()
        add(1, Entry("a", Kind.FAILED, nth=0, content=b"EngineError"), answer("a", "k", 0, 6))
        assert contents(journal, 1) == ["a:EngineError", "a:k0", "b:k0"] and journal.unfinished[1].oldest == 5
        reads_the_same()
        add(1, Entry("a", Kind.ANEW))
        assert contents(journal, 1) == ["b:k0"]
        reads_the_same()
    add(2, answer("c", "k", 0, 1), answer("c", "k", 1, 7))
    journal.add(record(1, GroupStatus.SCORED, 5, [trajectory(5)]))
    assert not contents(journal, 1) and journal.unfinished.keys() == {2}
    reads_the_same()
    journal.keep(lambda ordinal: True)
    reads_the_same()
    assert journal.anew == 3
    add(1, Entry("", Kind.ANEW), answer("a", "k", 0, 6))
    assert 1 not in journal.ended and contents(journal, 1) == ["a:k0"]
    reads_the_same()
    journal.keep(lambda ordinal: True, newest=6)
    assert contents(journal, 2) == ["c:k0"], "what later weights sampled is forgotten"
    reads_the_same()
    journal.keep(lambda ordinal: ordinal == 2)
    journal.keep(lambda ordinal: ordinal == 2)
    assert journal.unfinished.keys() == {2}
    size = journal.size
    add(2, answer("c", "k", 1, 2))
    (file,) = list(journal.folder.iterdir())[-1:]
    file.write_bytes(file.read_bytes()[:-3])
    again = Journal(tmp_path, "key")
    again.read()
    assert contents(again, 2) == ["c:k0"] and size < journal.size, "a torn one is left out"
    other = Journal(tmp_path, "another config")
    assert other.read() == 1 and not other.unfinished


def test_what_a_record_does_not_hold_begins_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "key")
    told = trajectory(0)
    told.transcripts[0].experts = numpy.zeros((2, 1, 1), numpy.uint8)
    assert record_of(0, SAMPLE, GroupStatus.SCORED, 0, [trajectory(0), told]) is None
    journal.add(record(1, GroupStatus.SCORED, 0, [trajectory(0)]))
    assert set(journal.ended) == {1}


def test_what_a_kill_cuts_off_or_a_disk_spoils_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "key")
    for ordinal in range(3):
        journal.add(record(ordinal, GroupStatus.SCORED, 0, [trajectory(0)]))
    (file,) = journal.folder.iterdir()
    whole = file.read_bytes()
    size = (len(whole) - len("key") - 28) // 3
    for cut in (1, size // 2, size - 1, size, size + 1, 2 * size + 1):
        file.write_bytes(whole[:-cut])
        again = Journal(tmp_path, "key")
        again.read()
        assert set(again.ended) == set(range(3 - -(-cut // size)))
    spoilt = bytearray(whole)
    spoilt[-size - 5] ^= 1
    file.write_bytes(spoilt)
    again = Journal(tmp_path, "key")
    again.read()
    assert set(again.ended) == {0}
    again.add(record(7, GroupStatus.SCORED, 0, [trajectory(0)]))
    third = Journal(tmp_path, "key")
    third.read()
    assert set(third.ended) == {0, 7}, "a new file follows the torn one"


@pytest.mark.parametrize("key", ["key", "another config"])
def test_a_whole_frame_of_another_form_is_told_by_file_and_place(tmp_path: Path, key: str) -> None:
    journal = Journal(tmp_path, "key")
    journal.add(record(0, GroupStatus.SCORED, 0, [trajectory(0)]))
    (file,) = journal.folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole * 2)
    at = rf"{file.name}, byte {len(whole):,}: expected a record or an entry of a prompt, found b'key'\. Remove the file"
    with pytest.raises(DataError, match=at):
        Journal(tmp_path, key).read()


def test_prompts_far_from_all_that_were_drawn_are_refused(tmp_path: Path) -> None:
    Journal(tmp_path, "key").add(record(10**12, GroupStatus.SCORED, 0, [trajectory(0)]))
    with naming(DataError, "journal:", "prompts 1000000000000"):
        schedule = StalenessScheduler(Settings(1, 9, max_staleness=1, depth=1), step=1)
        Record(tmp_path, "key", pytest.fail).load({}, schedule)


def test_rows_are_known_again() -> None:
    other = Sample(SAMPLE.prompt, "x", "single_turn", ground_truth="4")
    moved = Sample(SAMPLE.prompt, "x", "single_turn", ground_truth="3", index=9, file="elsewhere", row=4)
    assert identity(SAMPLE) == identity(moved) != identity(other)


@pytest.mark.parametrize("fsync", [True, False])
def test_a_loss_of_power_costs_no_record_that_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    """The disk is pretended: it has of a file what was there at its last flush, and no name that was not flushed."""
    on_disk: dict[int, int | set[str]] = {}

    def flush(descriptor: int) -> None:
        found = os.fstat(descriptor)
        names = set(os.listdir(descriptor)) if stat.S_ISDIR(found.st_mode) else None
        on_disk[found.st_ino] = found.st_size if names is None else names

    monkeypatch.setattr(os, "fsync", flush)
    folder = tmp_path / "run"
    journal, ledger = Journal(folder, "key", fsync=fsync), LedgerFile(folder, fsync=fsync)
    for ordinal in (4, 5):  # the ledger first: its own flush of the folder must not be what keeps the journal
        ledger.add(RecordedBatch(ordinal - 3, ordinal - 4, {ordinal: PromptStatus.TRAINED}))
        journal.add(record(ordinal, GroupStatus.SCORED, 1, [trajectory(ordinal)]))
    named = on_disk.get(folder.stat().st_ino, set())
    assert isinstance(named, set)
    for path in (*journal.folder.iterdir(), ledger.path):
        names = on_disk.get(path.parent.stat().st_ino, set())
        size = on_disk.get(path.stat().st_ino, 0)
        assert isinstance(names, set) and isinstance(size, int)
        if path.name in names and (path.parent == folder or "journal" in named):
            os.truncate(path, size)
        else:
            path.unlink()
    again = Journal(folder, "key")
    again.read()
    assert sorted(again.ended) == ([4, 5] if fsync else [])
    assert [one.step for one in LedgerFile(folder).read()] == ([1, 2] if fsync else [])
