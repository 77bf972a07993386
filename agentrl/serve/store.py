"""Store of live sessions and their feedback: one SQLite file in the run's folder, which survives the process.

A session has one fate. It is taken by one prompt of the run, whose status `ledger.jsonl` has, or it ends without being
trained on (`Fate`). A prompt that is run again, after a kill or from an earlier checkpoint, is given the same session.
So along the surviving line of checkpoints each session, and with it each feedback, counts at most once.

Everything that is answered to a client is committed before. With `fsync` it survives a loss of power, too.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path

from agentrl.config import Config
from agentrl.errors import DataError, TrainingError
from agentrl.system.json_value import JSON

STORE_FILE = "live.sqlite"
VERSION = 2
"""Version of the tables below, `PRAGMA user_version` of the file."""
APPLICATION = 0x61676C76
"""`PRAGMA application_id` of the file: `aglv`."""
TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE counts (name TEXT PRIMARY KEY, number INTEGER NOT NULL);
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    part INTEGER NOT NULL,
    last REAL NOT NULL,
    oldest INTEGER,
    newest INTEGER,
    score REAL,
    prompt INTEGER,
    fate TEXT
);
CREATE UNIQUE INDEX parts ON sessions (name, part);
CREATE UNIQUE INDEX taken ON sessions (prompt) WHERE prompt IS NOT NULL;
CREATE INDEX waiting ON sessions (last) WHERE prompt IS NULL AND fate IS NULL;
CREATE INDEX judged ON sessions (oldest, last, id) WHERE prompt IS NULL AND fate IS NULL AND score IS NOT NULL;
CREATE TABLE tokens (session TEXT PRIMARY KEY, record BLOB NOT NULL, state TEXT);
CREATE TABLE places (number INTEGER PRIMARY KEY, digest BLOB NOT NULL, session TEXT NOT NULL);
CREATE UNIQUE INDEX places_by_digest ON places (digest, session);
CREATE INDEX places_of ON places (session);
CREATE TABLE answers (id TEXT PRIMARY KEY, session TEXT NOT NULL);
CREATE TABLE feedback (
    number INTEGER PRIMARY KEY,
    session TEXT NOT NULL,
    key TEXT UNIQUE,
    value REAL NOT NULL,
    comment TEXT,
    at REAL NOT NULL,
    fate TEXT NOT NULL
);
CREATE INDEX feedback_of ON feedback (session, number);
"""
IS_OPEN = "prompt IS NULL AND fate IS NULL"


class Fate(StrEnum):
    """Reason for which a session was not trained on."""

    NO_FEEDBACK = "no_feedback"
    """None came within the window."""
    TOO_OLD = "too_old"
    """No batch could train on its oldest token within the bound of staleness."""
    OTHER_WEIGHTS = "other_weights"
    """Weights sampled it that the run, which went on from an earlier checkpoint, does not have."""
    NOT_TAKEN = "not_taken"
    """No answer reached its client."""
    DELETED = "deleted"
    """Its tokens were deleted after its training, and the run went back to a checkpoint from before it."""


class FeedbackFate(StrEnum):
    """Fate of feedback when it was posted."""

    TAKEN = "taken"
    """Made the session's score, unless another follows before the session is trained on."""
    REPLACED = "replaced"
    """Contradicted earlier feedback, and took its place."""
    ALREADY = "already"
    """Posted before; it counts once."""
    LATE = "late"
    """The session had been trained on, or had ended without."""


class UnknownSession(Exception):
    """No session has this name."""


class KeyReused(Exception):
    """Feedback with this key was posted before, for another session or with another value."""


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session, as its last answer left it."""

    id: str
    name: str
    """Name that its client gave, or that it was given; `id` is the name of one of its parts."""
    part: int
    """Number among the parts of this name, from 1: a client that goes on after a part was trained on begins another."""
    last: float
    """Time of its last request or answer, in seconds since 1970."""
    oldest: int | None
    """Version of the oldest sampled token."""
    newest: int | None
    record: bytes | None
    """Trajectory, as the journal writes it; None: it ended without being trained on, or no process trains on it
    again."""
    state: str | None
    """JSON from which it goes on; None: it does not."""
    score: float | None
    prompt: int | None
    """Ordinal of the prompt that took it."""
    fate: Fate | None

    @property
    def is_open(self) -> bool:
        """No prompt took it, and it did not end without."""
        return self.prompt is None and self.fate is None

    @property
    def goes_on(self) -> bool:
        """A request may continue it."""
        return self.is_open and (self.record is None or self.state is not None)


COLUMNS = tuple(StoredSession.__dataclass_fields__)
STORED = f"SELECT {', '.join(COLUMNS)} FROM sessions LEFT JOIN tokens ON tokens.session = sessions.id"


class Store:
    """The store of a run. Call it from the thread that opened it."""

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        """Open the file, or make it. Raises DataError for a file that is no store of this version."""
        self.path = path
        self._counted: Counter[str] = Counter()
        """Counts that no transaction has written yet."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._link = sqlite3.connect(path, isolation_level=None)
            self._check()
            self._link.execute("PRAGMA journal_mode = WAL")
            self._link.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{path}: expected the store of live sessions (SQLite), and it cannot be read: {error}. Move it aside; "
                "its sessions are then unknown"
            ) from error

    def _check(self) -> None:
        number = self._number("PRAGMA user_version")
        if not number and not self._number("SELECT count(*) FROM sqlite_master"):
            with self._transaction():
                for statement in TABLES.split(";\n"):
                    self._link.execute(statement)
                self._link.execute(f"PRAGMA application_id = {APPLICATION}")
                self._link.execute(f"PRAGMA user_version = {VERSION}")
            return
        if self._number("PRAGMA application_id") != APPLICATION:
            raise DataError(f"{self.path}: expected the store of live sessions, found another database. Move it aside")
        if number != VERSION:
            raise DataError(
                f"{self.path}: expected a store of version {VERSION}, found version {number}, of another release of "
                "agentrl. Serve with that release until its sessions have their fates, or move the file aside: its "
                "sessions are then unknown, and feedback for them is answered 404"
            )

    def close(self) -> None:
        """Write the counts, and close the file."""
        self.write_counts()
        self._link.close()

    def _number(self, query: str, *values: object) -> int:
        (found,) = self._link.execute(query, values).fetchone()
        return int(found)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit all of it, or nothing. Raises TrainingError where it cannot be written, e.g. on a full disk."""
        try:
            self._link.execute("BEGIN IMMEDIATE")
            try:
                yield
                for name, number in self._counted.items():
                    self._link.execute(
                        "INSERT INTO counts VALUES (?, ?) ON CONFLICT DO UPDATE SET number = number + ?",
                        (name, number, number),
                    )
                self._link.execute("COMMIT")
                self._counted.clear()
            except BaseException:
                if self._link.in_transaction:
                    self._link.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise TrainingError(f"{self.path}: the store of live sessions cannot be written: {error}") from error

    def count(self, name: str) -> None:
        """Count an event; it is written with the next transaction."""
        self._counted[name] += 1

    def write_counts(self) -> None:
        """Write the counts since the last transaction."""
        if self._counted:
            with self._transaction():
                pass

    def know(self, facts: Mapping[str, str]) -> None:
        """Write facts that sessions depend on. Raises DataError where the store was made with others."""
        known = dict(self._link.execute("SELECT name, value FROM facts").fetchall())
        for name, value in facts.items():
            if known.get(name, value) != value:
                found = f"{name}={known[name]:.200}"
                raise DataError(
                    f"{self.path}: expected sessions of {name}={value:.200}, found a store of {found}. Give this run "
                    "a folder of its own (trainer.default_local_dir), or move the file aside"
                )
        with self._transaction():
            self._link.executemany("INSERT OR IGNORE INTO facts VALUES (?, ?)", list(facts.items()))

    # Sessions

    def find(self, id: str) -> StoredSession | None:
        """Find a session by its id."""
        return self._one("id = ?", id)

    def newest_of(self, name: str) -> StoredSession | None:
        """Find the newest part of a name."""
        return self._one("name = ? ORDER BY part DESC LIMIT 1", name)

    def taken_by(self, prompt: int) -> StoredSession | None:
        """Find the session that a prompt took."""
        return self._one("prompt = ?", prompt)

    def _one(self, where: str, *values: object) -> StoredSession | None:
        row = self._link.execute(f"{STORED} WHERE {where}", values).fetchone()
        if row is None:
            return None
        told = dict(zip(COLUMNS, row, strict=True))
        return StoredSession(**told | {"fate": None if told["fate"] is None else Fate(told["fate"])})

    def begin(self, name: str, part: int, now: float) -> str:
        """Begin a session; return its id. A name of its own is a client's, so it has no `~`."""
        id = name if part == 1 else f"{name}~{part}"
        with self._transaction():
            self._link.execute("INSERT INTO sessions (id, name, part, last) VALUES (?, ?, ?, ?)", (id, name, part, now))
        return id

    def keep(
        self,
        id: str,
        now: float,
        versions: tuple[int | None, int | None],
        record: bytes,
        state: str,
        answer: tuple[str, bytes] | None = None,
        left: Iterable[bytes] = (),
    ) -> None:
        """Write a session as it is now, with the oldest and the newest version of its tokens, if it is open.

        `answer`: id of a new answer, and the digest of the history that ends with it. `left`: digests of the histories
        that its request continues; no other request is joined to the session by them.
        """
        with self._transaction():
            found = self._link.execute(
                f"UPDATE sessions SET last = ?, oldest = ?, newest = ? WHERE id = ? AND {IS_OPEN}",
                (now, *versions, id),
            )
            if not found.rowcount:
                return
            self._link.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)", (id, record, state))
            self._link.executemany(
                "DELETE FROM places WHERE digest = ? AND session = ?", [(digest, id) for digest in left]
            )
            if answer is not None:
                self._link.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (answer[0], id))
                self._link.execute("INSERT OR REPLACE INTO places (digest, session) VALUES (?, ?)", (answer[1], id))

    def asked(self, id: str, now: float) -> None:
        """Note that a client asks in a session."""
        with self._transaction():
            self._link.execute("UPDATE sessions SET last = ? WHERE id = ?", (now, id))

    def undo(self, id: str) -> bool:
        """Delete a session without an answer or feedback; say whether it was one."""
        with self._transaction():
            return bool(
                self._link.execute(
                    f"DELETE FROM sessions WHERE id = ? AND score IS NULL AND {IS_OPEN} "
                    "AND id NOT IN (SELECT session FROM tokens)",
                    (id,),
                ).rowcount
            )

    def stop(self, id: str) -> None:
        """Note that an open session does not go on; it may still be trained on."""
        with self._transaction():
            self._stop(id)

    def _stop(self, id: str) -> None:
        self._link.execute("UPDATE tokens SET state = NULL WHERE session = ?", (id,))
        self._link.execute("DELETE FROM places WHERE session = ?", (id,))

    def at(self, digest: bytes, but: Callable[[str], bool] = lambda id: False) -> str | None:
        """Find the open session whose history has this digest, and that no request continues from there; of several the
        newest. `but`: says which are left out."""
        found = self._link.execute("SELECT session FROM places WHERE digest = ? ORDER BY number DESC", (digest,))
        return next((str(id) for (id,) in found if not but(id)), None)

    def of_answer(self, id: str) -> str | None:
        """Find the session that an answer belongs to."""
        found = self._link.execute("SELECT session FROM answers WHERE id = ?", (id,)).fetchone()
        return None if found is None else str(found[0])

    def ready(self, before: float, but: Collection[str]) -> list[tuple[str, int]]:
        """List the sessions with feedback that were silent since `before`, the oldest tokens first.

        Each is its id and the version of its oldest token. `but`: sessions that are left out.
        """
        found = self._link.execute(
            f"SELECT id, oldest FROM sessions WHERE {IS_OPEN} AND score IS NOT NULL AND oldest IS NOT NULL "
            "AND last <= ? ORDER BY oldest, last, id",
            (before,),
        ).fetchall()
        return [(id, oldest) for id, oldest in found if id not in but]

    def take(self, id: str, prompt: int) -> None:
        """Give an open session to a prompt, for good; giving it again changes nothing."""
        with self._transaction():
            self._link.execute(f"UPDATE sessions SET prompt = ? WHERE id = ? AND {IS_OPEN}", (prompt, id))
            self._stop(id)

    def forget(self, prompts: Collection[int]) -> None:
        """Delete the tokens of the sessions that these prompts took: no process runs the prompts again."""
        found = self._link.execute("SELECT id, prompt FROM tokens JOIN sessions ON session = id")
        if ended := [(id,) for id, prompt in found.fetchall() if prompt in prompts]:
            with self._transaction():
                self._link.executemany("DELETE FROM tokens WHERE session = ?", ended)

    def end(self, id: str, fate: Fate) -> None:
        """End a session that is not trained on; its tokens are deleted."""
        with self._transaction():
            self._end("id = ?", fate, id)

    def expire(self, before: float, but: Collection[str]) -> None:
        """End the sessions without feedback, or without an answer, that were silent since `before`."""
        found = self._link.execute(
            f"SELECT id, score FROM sessions WHERE {IS_OPEN} AND (score IS NULL OR oldest IS NULL) AND last <= ?",
            (before,),
        ).fetchall()
        if ended := [one for one in found if one[0] not in but]:
            with self._transaction():
                for id, score in ended:
                    self._end("id = ?", Fate.NO_FEEDBACK if score is None else Fate.NOT_TAKEN, id)

    def lose_after(self, version: int) -> int:
        """End the sessions that weights after `version` sampled; return their number."""
        where = "fate IS NULL AND newest > ?"
        lost = self._number(f"SELECT count(*) FROM sessions WHERE {where}", version)
        if lost:
            with self._transaction():
                self._end(where, Fate.OTHER_WEIGHTS, version)
        return lost

    def _end(self, where: str, fate: Fate, value: object) -> None:
        for table in ("places", "tokens"):
            self._link.execute(
                f"DELETE FROM {table} WHERE session IN (SELECT id FROM sessions WHERE {where})", (value,)
            )
        self._link.execute(f"UPDATE sessions SET fate = ?, prompt = NULL WHERE {where}", (fate.value, value))

    # Feedback

    def give(self, id: str, value: float, now: float, *, key: str | None, comment: str | None) -> FeedbackFate:
        """Take feedback for a session, by its id. `key`: name of this post, by which it is known again.

        Raises UnknownSession, and KeyReused.
        """
        with self._transaction():
            session = self.find(id)
            if session is None:
                raise UnknownSession(id)
            fate = self._fate_of(session, value, key)
            if fate is FeedbackFate.REPLACED:
                self._link.execute("UPDATE feedback SET fate = 'replaced' WHERE session = ? AND fate = 'taken'", (id,))
            told = FeedbackFate.TAKEN if fate is FeedbackFate.REPLACED else fate
            if key is not None or fate is not FeedbackFate.ALREADY:
                self._link.execute(  # A post whose name is known changes nothing.
                    "INSERT OR IGNORE INTO feedback (session, key, value, comment, at, fate) VALUES (?, ?, ?, ?, ?, ?)",
                    (id, key, value, comment, now, told.value),
                )
            if told is FeedbackFate.TAKEN:
                self._link.execute("UPDATE sessions SET score = ? WHERE id = ?", (value, id))
            self.count(f"feedback_{fate.value}")
        return fate

    def _fate_of(self, session: StoredSession, value: float, key: str | None) -> FeedbackFate:
        if key is not None:
            same = self._link.execute("SELECT session, value FROM feedback WHERE key = ?", (key,)).fetchone()
            if same is not None:
                if tuple(same) != (session.id, value):
                    raise KeyReused(key)
                return FeedbackFate.ALREADY
        last = self._link.execute(
            "SELECT value FROM feedback WHERE session = ? AND fate != 'already' ORDER BY number DESC LIMIT 1",
            (session.id,),
        ).fetchone()
        if last is not None and last[0] == value and key is None:
            return FeedbackFate.ALREADY
        if not session.is_open:
            return FeedbackFate.LATE
        if session.score is None:
            return FeedbackFate.TAKEN
        return FeedbackFate.ALREADY if session.score == value else FeedbackFate.REPLACED

    # Reports

    def feedback_on(self, id: str) -> list[JSON]:
        """List the feedback on a session, in its order."""
        names = ("value", "fate", "at", "comment", "key")
        rows = self._link.execute(
            f"SELECT {', '.join(names)} FROM feedback WHERE session = ? ORDER BY number", (id,)
        ).fetchall()
        return [dict(zip(names, row, strict=True)) for row in rows]

    def totals(self) -> dict[str, int]:
        """Count sessions by state, and events, since the store was made."""
        states = self._link.execute(
            "SELECT CASE WHEN prompt IS NOT NULL THEN 'taken' WHEN fate IS NOT NULL THEN fate "
            "WHEN score IS NOT NULL THEN 'ready' ELSE 'waiting' END AS state, count(*) FROM sessions GROUP BY state"
        ).fetchall()
        counts = self._link.execute("SELECT name, number FROM counts").fetchall()
        return {f"sessions_{name}": int(number) for name, number in states} | dict(counts)

    def sessions(self) -> Iterator[StoredSession]:
        """Return all sessions, by the time of their last answer."""
        ids = self._link.execute("SELECT id FROM sessions ORDER BY last, id").fetchall()
        return (one for (id,) in ids if (one := self.find(id)) is not None)


FACTS = ("model.path", "model.chat_template", "rollout.temperature", "rollout.multi_turn.format")
"""Keys of `actor_rollout_ref` by which sessions were rendered and sampled, and their log-probs measured."""


def facts_of(config: Config) -> dict[str, str]:
    """List the keys of a run that its sessions depend on, with their values."""
    values = attrgetter(*FACTS)(config.actor_rollout_ref)
    return {f"actor_rollout_ref.{key}": str(value) for key, value in zip(FACTS, values, strict=True)}
