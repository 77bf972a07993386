"""`python -m agentrl.serve --learn`: it learns from live clients, goes on after kills, and refuses what cannot work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.checkpoint.manifest import CHECKPOINTS, steps_in
from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.rollouts.journal import trajectories_in
from agentrl.serve.__main__ import main
from agentrl.serve.check import FITTING
from agentrl.serve.options import SHORTEST_KEY, read_keys
from agentrl.serve.store import STORE_FILE, Fate, Store
from agentrl.trajectory.parquet import read_trajectories
from tests.e2e.test_docs import commands, write_files
from tests.e2e.test_train import lines
from tests.forked import ForkedPython
from tests.runs import refused
from tests.serve.killed import POINTS
from tests.serve.served import KEYS, People, arguments, free_port, serving
from tests.waiting import wait_for

KILLS = 5
"""Kills of a seed."""


def digits(text: str) -> float:
    return sum(character in "0123456789" for character in text) / max(len(text), 1)


def by_length(text: str) -> float:
    return float(len(text) % 5)


@pytest.mark.timeout(400)
async def test_a_tiny_policy_learns_what_people_like(policy_dir: Path, tmp_path: Path) -> None:
    port, steps = free_port(), 16
    more = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "trainer.save_freq=8"]
    words = arguments(policy_dir, tmp_path / "run", port, *more, f"trainer.total_training_steps={steps}")
    with serving(words) as server:
        people = People(port, digits, is_over=lambda: not server.process.is_alive())
        await people.come(8)
        done = server.wait(60)
    assert done.returncode == 0, done.stderr
    rewards = [line["reward/mean"] for line in lines(tmp_path / "run") if line["step"]]
    assert len(rewards) == steps
    # Which sessions make a batch, and how old they are, is up to the machine's speed, and with it the pace of learning.
    before, after = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert before < 0.02 and after > before + 0.05, rewards
    last = lines(tmp_path / "run")[-1]
    assert last["live/sessions_taken"] >= 16 * steps and last["async/staleness_max"] <= 4


@pytest.mark.slice(1, "kill")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(40))
async def test_kills_lose_no_session_and_double_no_feedback(policy_dir: Path, tmp_path: Path, seed: int) -> None:
    """Together the seeds kill 200 times: each behind, or before, a call of the store, the journal, the ledger, ..."""
    rng = random.Random(seed)
    port, run, steps = free_port(), tmp_path / "run", 10
    words = arguments(policy_dir, run, port, f"trainer.total_training_steps={steps}")
    servers: list[ForkedPython] = []
    statuses: list[int] = []
    people = People(port, by_length, seed, turns=3, is_over=lambda: bool(statuses and not statuses[-1]))

    async def serve() -> None:
        for kill in range(KILLS + 1):
            point = "" if kill == KILLS else rng.choice(list(POINTS))
            number = rng.choice([1, 2, 3]) * rng.choice([1, -1])
            with serving(words, point, number) as server:
                servers.append(server)
                await asyncio.to_thread(server.process.join, 300)
                done = server.wait(1)
            statuses.append(done.returncode)
            assert done.returncode == (0 if kill == KILLS else -signal.SIGKILL), (point, number, done.stderr)

    try:
        await asyncio.gather(serve(), people.come(4))
    except AssertionError as error:
        raise AssertionError("\n".join(server.said(1)[-4000:] for server in servers)) from error
    check_each_once(run, people, steps)


def check_each_once(run: Path, people: People, steps: int) -> None:
    """Each acknowledged answer is in the store, and each feedback in at most one step of the surviving line."""
    store = Store(run / STORE_FILE)
    sessions = {one.id: one for one in store.sessions()}
    store.close()
    for id, said in people.said.items():
        found = sessions[id]
        assert found.fate in (None, Fate.TOO_OLD)
        if found.record is not None:
            (recorded,) = trajectories_in(found.record)
            texts = {turn.text for turn in recorded.turns if turn.role == "assistant"}
            assert texts.issuperset(said), "an answer that was sent is recorded"
    for id, value in people.given.items():
        assert sessions[id].score == value
    batches = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert [batch["step"] for batch in batches] == list(range(1, steps + 1))
    trained = [one for batch in batches for first, end in batch["trained"] for one in range(first, end)]
    assert len(set(trained)) == len(trained) == 4 * steps
    by_prompt = {one.prompt: one for one in sessions.values() if one.prompt is not None}
    files = sorted((run / "trajectories").glob("train_*.parquet"))
    assert len(files) == steps
    seen = 0
    oldest = min(steps_in(run / CHECKPOINTS))
    assert oldest == steps - 1
    for file, batch in zip(files, batches, strict=True):
        ordinals = [one for first, end in batch["trained"] for one in range(first, end)]
        for ordinal, trajectory in zip(sorted(ordinals), read_trajectories(file), strict=True):
            taken = by_prompt[ordinal]
            if batch["step"] < oldest:
                assert taken.record is None, "its step is behind every checkpoint"
            elif batch["step"] > oldest:
                assert taken.record is not None
            if taken.record is not None:
                (recorded,) = trajectories_in(taken.record)
                assert [one.ids for one in trajectory.transcripts] == [one.ids for one in recorded.transcripts]
            texts = {turn.text for turn in trajectory.turns if turn.role == "assistant"}
            assert texts.issuperset(people.said.get(taken.id, ())), "an answer that was sent is trained on"
            assert trajectory.score == taken.score, "its feedback, once"
            seen += 1
    assert seen == 4 * steps


@pytest.mark.timeout(400)
def test_the_pages_commands(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_files("docs/live.md", tmp_path) == ["ask.py"]
    *exports, serve, ask = commands("docs/live.md")
    port = str(free_port())
    file = tmp_path / "ask.py"
    file.write_text(file.read_text().replace("8000", port))
    for line in exports:
        name, _, value = line.removeprefix("export ").partition("=")
        monkeypatch.setenv(name, value)
    words = [word.replace("Qwen/Qwen3-0.6B", str(policy_dir)) for word in shlex.split(serve)]
    small = ["data.train_batch_size=1", "data.max_prompt_length=64", "data.max_response_length=8"]
    small += ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "trainer.total_training_steps=1"]
    server = ForkedPython([*words[1:], f"--port={port}", "--idle-seconds=0", *small], tmp_path)
    try:
        wait_for(lambda: "live clients" in server.said(0) or not server.process.is_alive(), 200)
        asked = subprocess.run([sys.executable, *shlex.split(ask)[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr + server.said(1)
        assert "'status': 'taken'" in asked.stdout
        done = server.wait(120)
    finally:
        server.process.kill()
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "runs" / "live")[-1]["live/sessions_taken"] == 1
    capsys.readouterr()
    assert main(["--fates", str(tmp_path / "runs" / "live")]) == 0
    (told,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (told["fate"], told["prompt"], told["step"]) == ("trained", 0, 1)
    assert [one["fate"] for one in told["feedback"]] == ["taken"] and told["feedback"][0]["value"] == told["score"]


class TestRefusals:
    @pytest.fixture(autouse=True)
    def keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, key in KEYS.items():
            monkeypatch.setenv(name, key)

    @pytest.mark.parametrize("name", sorted({*ADVANTAGE_ESTIMATORS.names()} - {*FITTING, "online_dpo", "rlsd"}))
    def test_an_estimator_that_compares_a_group(
        self, policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        """Two more need keys that no live run has: online_dpo n above 1, rlsd a privileged teacher."""
        words = arguments(policy_dir, tmp_path / "run", 0, f"algorithm.adv_estimator={name}")
        refused(main, words, capsys, f"adv_estimator={name}", "reinforce_plus_plus", "rae", "gae")

    @pytest.mark.parametrize(
        ("more", "says"),
        [
            ("actor_rollout_ref.rollout.n=2", "a group of one"),
            ("async_training.max_staleness=0", "1 or more"),
            ("data.val_files=rows.parquet", "would wait for clients"),
            ("actor_rollout_ref.rollout.nnodes=1", "under Ray"),
            ("--host=0.0.0.0", ""),
            ("--idle-seconds=-1", "expected seconds"),
            ("--port=99999", "0 to 65535"),
            ("--client-key-env=NOT_SET", "NOT_SET, found nothing"),
            ("--client-key-env=OPERATOR_KEY", "two keys, found one"),
        ],
    )
    def test_what_cannot_work(
        self, policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, says: str
    ) -> None:
        words = arguments(policy_dir, tmp_path / "run", 0, more)
        if more.startswith("--host"):
            words = [word for word in words if "key-env" not in word]
            says = "as --host=0.0.0.0"
        refused(main, words, capsys, says)
        assert not (tmp_path / "run").exists()

    def test_keys_that_nobody_names_are_made_up(self) -> None:
        made = read_keys(None, "OPERATOR_KEY", "127.0.0.1")
        assert made.operator == KEYS["OPERATOR_KEY"] and made.made_up == {"--client-key-env": made.client}
        assert len(made.client) >= SHORTEST_KEY and made.client != read_keys(None, None, "127.0.0.1").client

    def test_serving_without_learning(self, capsys: pytest.CaptureFixture[str]) -> None:
        refused(main, [], capsys, "--learn", "SGLang", "docs/serve.md")

    def test_the_fates_of_a_folder_without_a_store(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        refused(main, ["--fates", str(tmp_path)], capsys, STORE_FILE, "no such file")

    def test_a_port_that_is_taken(self, policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            refused(main, arguments(policy_dir, tmp_path / "run", port), capsys, f"--port={port}", "already in use")
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("fact", ["model.path=another/model", "rollout.temperature=0.5", "model.chat_template=x"])
    def test_a_store_of_another_model(
        self, policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fact: str
    ) -> None:
        """Log-probs of its sessions hold at one temperature, and its tokens in one template."""
        key, _, value = f"actor_rollout_ref.{fact}".partition("=")
        with contextlib.closing(Store(tmp_path / "run" / STORE_FILE)) as store:
            store.know({key: value})
        refused(main, arguments(policy_dir, tmp_path / "run", 0), capsys, STORE_FILE, fact)
        assert [one.name for one in (tmp_path / "run").iterdir()] == [STORE_FILE]

    def test_a_store_of_another_version(
        self, policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Store(tmp_path / "run" / STORE_FILE).close()
        with sqlite3.connect(tmp_path / "run" / STORE_FILE) as link:
            link.execute("PRAGMA user_version = 1")
        link.close()
        refused(main, arguments(policy_dir, tmp_path / "run", 0), capsys, STORE_FILE, "found version 1")
