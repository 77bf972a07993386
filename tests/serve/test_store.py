"""The store of live sessions: each feedback has one fate, and a file of another kind is refused by name."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.errors import DataError
from agentrl.serve.store import Fate, FeedbackFate, KeyReused, Store, UnknownSession
from tests.naming import naming


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "live.sqlite")
    yield made
    made.close()


def kept(store: Store, name: str, *, oldest: int = 0, newest: int | None = None, now: float = 1.0) -> str:
    """A session with one answer."""
    id = store.begin(name, 1, now)
    store.keep(id, now, (oldest, oldest if newest is None else newest), b"record", "{}", (f"a-{name}", name.encode()))
    return id


def given(store: Store, id: str, value: float, key: str | None = None) -> FeedbackFate:
    return store.give(id, value, 2.0, key=key, comment=None)


class TestFeedback:
    def test_the_same_twice_counts_once(self, store: Store) -> None:
        id = kept(store, "one")
        assert given(store, id, 1.0, "k") is FeedbackFate.TAKEN
        assert given(store, id, 1.0, "k") is FeedbackFate.ALREADY
        assert given(store, id, 1.0) is FeedbackFate.ALREADY
        store.take(id, 7)
        assert given(store, id, 1.0, "k") is given(store, id, 1.0) is FeedbackFate.ALREADY, "also after the training"
        assert store.totals() == {"sessions_taken": 1, "feedback_taken": 1, "feedback_already": 4}

    def test_of_two_that_differ_the_last_before_the_training_counts(self, store: Store) -> None:
        id = kept(store, "one")
        given(store, id, 1.0)
        assert given(store, id, -1.0) is FeedbackFate.REPLACED
        store.take(id, 0)
        assert given(store, id, 0.5) is FeedbackFate.LATE
        found = store.taken_by(0)
        assert found is not None and found.score == -1.0
        fates = store._link.execute("SELECT value, fate FROM feedback ORDER BY number").fetchall()
        assert fates == [(1.0, "replaced"), (-1.0, "taken"), (0.5, "late")]

    def test_none_within_the_window_and_then_one_is_late(self, store: Store) -> None:
        id = kept(store, "one", now=10.0)
        store.expire(9.0, ())
        assert store.find(id).is_open  # type: ignore[union-attr]
        store.expire(10.0, {id})
        assert store.find(id).is_open, "it is in memory"  # type: ignore[union-attr]
        store.expire(10.0, ())
        ended = store.find(id)
        assert ended is not None and ended.fate is Fate.NO_FEEDBACK and ended.record is None
        assert given(store, id, 1.0) is FeedbackFate.LATE
        assert store.ready(99.0, ()) == []

    def test_for_a_session_that_was_never_begun_nothing_is_taken(self, store: Store) -> None:
        with pytest.raises(UnknownSession):
            given(store, "nobody", 1.0)
        assert store.totals() == {}

    def test_a_post_that_comes_again_overturns_no_later_one(self, store: Store) -> None:
        id = kept(store, "one")
        assert given(store, id, 1.0, "k1") is FeedbackFate.TAKEN
        assert given(store, id, 1.0, "k2") is FeedbackFate.ALREADY
        assert given(store, id, 0.0, "k3") is FeedbackFate.REPLACED
        assert given(store, id, 1.0, "k2") is given(store, id, 1.0, "k1") is FeedbackFate.ALREADY
        assert given(store, id, 0.0) is FeedbackFate.ALREADY
        assert store.find(id).score == 0.0  # type: ignore[union-attr]
        with pytest.raises(KeyReused):
            given(store, kept(store, "two"), 1.0, "k2")

    @pytest.mark.parametrize(("id", "value"), [("one", 0.0), ("two", 1.0)], ids=["value", "session"])
    def test_a_key_names_one_post(self, store: Store, id: str, value: float) -> None:
        for name in ("one", "two"):
            kept(store, name)
        given(store, "one", 1.0, "k")
        with pytest.raises(KeyReused):
            given(store, id, value, "k")
        assert store.find("one").score == 1.0 and store.find("two").score is None  # type: ignore[union-attr]


class TestSessions:
    def test_a_prompt_is_given_its_session_again(self, store: Store, tmp_path: Path) -> None:
        id = kept(store, "one")
        given(store, id, 1.0)
        store.take(id, 5)
        store.close()
        store = Store(tmp_path / "live.sqlite")
        found = store.taken_by(5)
        assert found is not None and (found.id, found.record, found.score) == (id, b"record", 1.0)
        assert store.ready(99.0, ()) == [], "and no other prompt is"
        store.take(id, 6)
        assert store.taken_by(6) is None

    def test_tokens_of_prompts_that_no_process_runs_again_are_deleted(self, store: Store) -> None:
        for prompt, name in enumerate(("one", "two")):
            given(store, kept(store, name), 1.0)
            store.take(name, prompt)
        kept(store, "open")
        store.forget({0, 7})
        records = {one.id: one.record for one in store.sessions()}
        assert records == {"one": None, "two": b"record", "open": b"record"}
        again = store.taken_by(0)
        assert again is not None and (again.id, again.score) == ("one", 1.0)
        assert given(store, "one", 2.0) is FeedbackFate.LATE

    def test_the_oldest_tokens_come_first(self, store: Store) -> None:
        for name, oldest, now in (("new", 3, 1.0), ("old", 1, 2.0), ("busy", 0, 9.0), ("open", 0, 1.0)):
            given(store, kept(store, name, oldest=oldest, now=now), 1.0)
        kept(store, "unjudged")
        assert store.ready(5.0, {"open"}) == [("old", 1), ("new", 3)]

    def test_sessions_of_weights_that_are_gone_end(self, store: Store) -> None:
        kept(store, "old", oldest=1, newest=2)
        kept(store, "across", oldest=2, newest=3)
        store.take(kept(store, "taken", oldest=3), 4)
        assert store.lose_after(2) == 2
        fates = {one.id: one.fate for one in store.sessions()}
        assert fates == {"old": None, "across": Fate.OTHER_WEIGHTS, "taken": Fate.OTHER_WEIGHTS}
        assert store.taken_by(4) is None, "another session may take its place"

    def test_of_two_with_one_history_each_is_found_once(self, store: Store) -> None:
        for name in ("one", "two"):
            store.begin(name, 1, 1.0)
            store.keep(name, 1.0, (0, 0), b"", "{}", (f"a-{name}", b"same"))
        found = store.at(b"same")
        assert found == "two"
        store.keep("two", 2.0, (0, 0), b"", "{}", ("a-three", b"other"), [b"same"])
        assert store.at(b"same") == "one" and store.at(b"other") == "two" and store.at(b"none") is None
        store.take("one", 0)
        assert store.at(b"same") is None, "a session that is taken goes on no more"
        assert store.of_answer("a-one") == "one"

    def test_a_session_that_ended_takes_no_further_answer(self, store: Store) -> None:
        id = kept(store, "one")
        store.end(id, Fate.TOO_OLD)
        store.keep(id, 2.0, (0, 0), b"later", "{}", ("a-later", b"later"))
        assert store.find(id).record is None and store.at(b"later") is None  # type: ignore[union-attr]
        assert store.of_answer("a-later") is None

    def test_one_without_an_answer_can_be_undone(self, store: Store) -> None:
        store.begin("empty", 1, 1.0)
        kept(store, "one")
        assert store.undo("empty") and not store.undo("one")
        assert [one.id for one in store.sessions()] == ["one"]

    def test_no_look_reads_sessions_that_have_ended(self, store: Store) -> None:
        looks: list[str] = []
        store._link.set_trace_callback(looks.append)
        store.ready(5.0, ())
        store.expire(5.0, ())
        store.taken_by(3)
        store._link.set_trace_callback(None)
        for look in looks:
            for *_, plan in store._link.execute(f"EXPLAIN QUERY PLAN {look}").fetchall():
                assert ("INDEX" in plan and "SCAN sessions USING INDEX judged" in plan) or "SEARCH" in plan, plan


class TestFile:
    def test_another_version_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "live.sqlite"
        Store(path).close()
        with sqlite3.connect(path) as link:
            link.execute("PRAGMA user_version = 9")
        link.close()
        with naming(DataError, path, "version 2", "version 9"):
            Store(path)

    def test_another_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "live.sqlite"
        path.write_bytes(b"no database at all, but longer than its header would be" * 20)
        with naming(DataError, "live.sqlite"):
            Store(path)
        path.unlink()
        with sqlite3.connect(path) as link:
            link.execute("CREATE TABLE mine (a)")
        link.close()
        with naming(DataError, "database"):
            Store(path)

    def test_another_policy_is_refused(self, store: Store) -> None:
        store.know({"model": "a"})
        store.know({"model": "a"})
        with naming(DataError, "model=b", "model=a"):
            store.know({"model": "b"})
