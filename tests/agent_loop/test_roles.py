"""Episodes with several roles: transcripts and scores by role, frozen players, and what bad input gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from agentrl.agent_loop.roles import Roles
from agentrl.agents.agent import AgentOptions
from agentrl.config.sections.roles import RoleConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import Generation, SamplingParams
from agentrl.environments.loop import EnvironmentLoop
from agentrl.environments.sidecar import EnvironmentOptions
from agentrl.errors import CodeError, ConfigError, DataError
from agentrl.observe.invariants import check_trajectory
from agentrl.openai_api.agent_loop import OpenAIProxyLoop
from agentrl.system.call_journal import CallJournal, Entry
from agentrl.trajectory import Status, Trajectory
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.parquet import read_trajectories, write_trajectories
from agentrl.trajectory.sample import Sample
from tests.agent_loop.conftest import Bench, sample
from tests.agent_loop.recorded_environments import FILE, MOVES, REPLAY
from tests.conftest import PROJECT
from tests.naming import naming

MakeBench = Callable[..., Bench]
NIM = EnvironmentOptions(environment=str(PROJECT / "examples" / "self_play" / "nim.py"))
BOTH = ["first", "second"]


def game(sticks: int, roles: list[str] = BOTH, **task: Any) -> Sample:
    text = json.dumps({"task": {"roles": roles, "sticks": sticks, **task}, "seed": 7})
    return sample("env", data_source="environment/nim", extra_info={"environment": text})


class Opponent(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that answers with the next of its `moves`, and keeps what it was asked."""

    models: ClassVar[list[str]] = []
    moves: ClassVar[list[str]] = []
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.answer({"data": [{"id": name} for name in self.models]})

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer({"choices": [{"message": {"role": "assistant", "content": self.moves[len(self.asked) - 1]}}]})

    def answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def opponent() -> Iterator[str]:
    Opponent.models, Opponent.moves, Opponent.asked = ["small"], [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Opponent)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


async def played(
    bench: Bench,
    row: Sample,
    options: EnvironmentOptions = NIM,
    journal: CallJournal | None = None,
    **keys: dict[str, Any],
) -> Trajectory:
    """Play one episode, with roles of these keys."""
    roles = Roles({name: RoleConfig.model_validate(one) for name, one in keys.items()})
    await roles.start("test")
    bench.scheduler.context = replace(bench.scheduler.context, roles=roles.turns)
    loop = EnvironmentLoop(options)
    bench.scheduler.loops["env"] = loop  # type: ignore[index]
    try:
        (one,) = await bench.scheduler.run([replace(bench.requests(row)[0], journal=journal)])
    finally:
        await loop.close()
        await roles.close()
    assert check_trajectory(one, bench.chat.vocab_size) == []
    return one


async def test_roles_have_transcripts_and_scores_of_their_own(bench: MakeBench, tmp_path: Path) -> None:
    b = bench(lambda session, turn: {"0": ["2", "3"], "1": ["1"]}[session.rsplit(".", 1)[1]][turn])
    one = await played(b, game(6), first={}, second={})
    assert one.status is Status.COMPLETED
    assert [transcript.role for transcript in one.transcripts] == BOTH
    assert [(turn.transcript, turn.role, turn.text) for turn in one.turns] == [
        *[(0, "assistant", "2"), (1, "assistant", "1"), (0, "user", "3 sticks"), (0, "assistant", "3")]
    ]
    assert "6 sticks" in b.chat.decode(one.transcripts[0].ids) and "4 sticks" in b.chat.decode(one.transcripts[1].ids)
    assert "3 sticks" not in b.chat.decode(one.transcripts[1].ids)
    assert one.score == 0.0 and one.role_scores == {"first": 1.0, "second": -1.0}
    batch = from_trajectories([one], turn_reward_coef=1.0, columns=["role"])
    sums = [float(batch.select([row]).rewards.sum()) for row in range(len(batch))]
    assert sums == [1.0, -1.0] and all(batch.select([row]).rewards[batch.select([row]).mask][-1] for row in range(2))
    assert batch.role is not None and len(batch.role.unique()) == 2
    file = write_trajectories(tmp_path, [one], step=1, split="train", turn_reward_coef=1.0)
    assert [transcript.role for transcript in read_trajectories(file)[0].transcripts] == BOTH


async def test_a_role_that_never_moved_has_no_part(bench: MakeBench) -> None:
    one = await played(bench(["no"]), game(6), first={}, second={})
    assert [transcript.role for transcript in one.transcripts] == ["first"]
    assert one.score == -1.0 and one.role_scores == {"first": -1.0}


async def test_a_frozen_model_is_sent_its_role_and_not_trained_on(bench: MakeBench, opponent: str) -> None:
    Opponent.moves = ["1"]
    keys: dict[str, Any] = {"policy": "small", "base_url": opponent, "temperature": 0.5, "max_tokens": 9}
    one = await played(bench(["2", "3"]), game(6), first={}, second=keys)
    assert [transcript.policy for transcript in one.transcripts] == ["policy", "small"]
    assert [turn.role for turn in one.turns] == ["assistant", "frozen", "user", "assistant"]
    assert one.transcripts[1].sampled_length == 0
    assert one.score == 1.0 and one.score_extra["role/second"] == -1.0
    (asked,) = Opponent.asked
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("small", 0.5, 9)
    assert [message["content"] for message in asked["messages"]] == ["What is 2 + 3?\n\n4 sticks"]
    batch = from_trajectories([one], turn_reward_coef=1.0, columns=["role"])
    assert len(batch) == 1 and batch.policies == ("policy",) and float(batch.rewards.sum()) == 1.0


async def test_the_runs_policy_plays_a_role_that_is_not_trained(bench: MakeBench) -> None:
    b = bench(lambda session, turn: {"0": ["2", "3"], "1": ["1"]}[session.rsplit(".", 1)[1]][turn])
    one = await played(b, game(6), first={"trains": False}, second={})
    assert [(transcript.policy, bool(transcript.sampled_length)) for transcript in one.transcripts] == [
        *[("policy", False), ("policy", True)]
    ]
    assert one.score == -1.0


async def test_a_frozen_adapter_is_asked_by_its_name_and_not_trained_on(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, asked = bench(lambda session, turn: {"0": ["2", "3"], "1": ["1"]}[session.rsplit(".", 1)[1]][turn]), []
    generate = b.engine.generate

    async def told(ids: Any, params: SamplingParams, session: str, images: Any = ()) -> Generation:
        asked.append(params.adapter)
        return await generate(ids, params, session, images)

    monkeypatch.setattr(b.engine, "generate", told)
    one = await played(b, game(6), first={}, second={"policy": "older", "adapter": "runs/older/policy/adapter"})
    assert asked == [None, "older", None]
    assert [(transcript.policy, bool(transcript.sampled_length)) for transcript in one.transcripts] == [
        *[("policy", True), ("older", False)]
    ]


async def test_after_a_kill_a_frozen_turn_is_not_asked_for_again(bench: MakeBench, opponent: str) -> None:
    Opponent.moves = ["1"]
    keys = {"policy": "small", "base_url": opponent}
    entries: list[Entry] = []
    first = await played(bench(["2", "3"]), game(6), journal=CallJournal("t/0", entries.append), first={}, second=keys)
    journal = CallJournal("t/0", entries.append, list(entries))
    again = await played(bench(["not", "asked"]), game(6), journal=journal, first={}, second=keys)
    assert journal.mismatch is None and len(Opponent.asked) == 1
    assert [one.ids for one in again.transcripts] == [one.ids for one in first.transcripts]


ODD = """
def tasks(split, seed, count):
    yield {}

def start(task, seed):
    return dict(task), task["start"]

def step(episode, action):
    return episode.get("step", {"done": True})

def score(episode):
    return episode["score"]
"""
FIRST = {"role": "first", "observation": "go"}


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"start": {"role": "third", "observation": "go"}}, "one of the task's roles (first, second), found 'third'"),
        ({"start": "go"}, "role must be one of the task's roles (first, second), found None"),
        ({"start": FIRST, "step": {"observation": "on"}}, "found None"),
        ({"start": FIRST, "score": {"scores": {"first": 1, "second": 0}}}, "'second' has a score and did not play"),
        ({"start": FIRST, "score": {"scores": {}}}, "the role 'first' played and has no score"),
        ({"start": FIRST, "score": {"scores": {"first": "high"}}}, "first must be a finite number, found 'high'"),
        ({"start": FIRST, "score": {"scores": {"first": None}}}, "ended without a reward, so it has no score"),
        ({"start": FIRST, "score": 1.0}, 'score must be a dict with "scores"'),
    ],
)
async def test_an_environment_that_breaks_the_contract_is_named(
    bench: MakeBench, tmp_path: Path, task: dict[str, Any], says: str
) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    options = EnvironmentOptions(environment=str(tmp_path / "odd.py"))
    begins = len(task) > 1  # errors after the policy's turn cost the trajectory alone
    with nullcontext() if begins else pytest.raises(CodeError, match=f"environment odd: .*{re.escape(says)}"):
        one = await played(bench(["a", "b"]), game(1, **task), options, first={}, second={})
        assert begins and one.score is None
        assert says in str(one.failure) and "environment odd" in str(one.failure)


async def test_textarenas_recorded_game_for_two(bench: MakeBench, tmp_path: Path) -> None:
    recorded = json.loads(FILE.read_text())["game"]
    (tmp_path / "replay.py").write_text(REPLAY)
    task = {**recorded["task"], "opening": recorded["opening"], "steps": recorded["steps"], "score": recorded["score"]}
    b = bench(
        lambda session, turn: MOVES[int(session.rsplit(".", 1)[1]) :: 2][turn],
        max_model_len=3000,
        tool_response_tokens=900,
    )
    options = EnvironmentOptions(environment=str(tmp_path / "replay.py"))
    row = sample("env", data_source="environment/ta", extra_info={"environment": json.dumps({"task": task, "seed": 7})})
    b.scheduler.context = replace(
        b.scheduler.context,
        limits=replace(b.scheduler.context.limits, max_response_tokens=2000, max_prompt_tokens=2000),
    )
    keys: dict[str, Any] = {"player-0": {}, "player-1": {}}
    one = await played(b, row, options, **keys)
    assert one.status is Status.COMPLETED, one.failure
    assert [turn.text for turn in one.turns if turn.role == "assistant"] == MOVES
    assert one.role_scores == {"player-0": 1.0, "player-1": -1.0}
    shown = b.chat.decode(one.transcripts[1].ids)
    assert "Player 0 placed their symbol (O) in cell 0." in shown and "You are Player 0" not in shown


async def test_an_endpoint_that_does_not_answer_or_has_another_model(opponent: str) -> None:
    keys = {"policy": "large", "base_url": opponent}
    with naming(ConfigError, "'large'"):
        await Roles({"first": RoleConfig(), "second": RoleConfig.model_validate(keys)}).start("test")
    gone = Roles({"second": RoleConfig(policy="small", base_url="http://127.0.0.1:9/v1", timeout=1)})
    with pytest.raises(ConfigError, match=r"role second: http://127.0.0.1:9/v1: no OpenAI-compatible endpoint"):
        await gone.start("test")
    await gone.close()


def test_a_role_that_nobody_plays_is_refused_by_row() -> None:
    loop = EnvironmentLoop(NIM)
    keys: dict[str, Any] = {"rollout": {"roles": {"first": {}, "sekond": {}}}}
    loop.configure(RolloutsConfig.model_validate({"actor_rollout_ref": keys}))
    with naming(DataError, "test.parquet", "role 'second'", "'sekond'"):
        loop.first_prompt(game(4), [])
    with naming(DataError, "`roles`"):
        loop.first_prompt(game(4, ["first", "first"]), [])


AGENT = """
import openai

async def agent(sample, base_url, api_key, model):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    async def ask(model, *said):
        messages = [
            {"role": "user" if place % 2 == 0 else "assistant", "content": text} for place, text in enumerate(said)
        ]
        answer = await client.chat.completions.create(model=model, messages=messages)
        return answer.choices[0].message.content
    names = [one.id for one in (await client.models.list()).data]
    assert names == ["player-1", "player-2"], names
    first = await ask("player-1", "Guess.")
    other = await ask("player-2", "Guess.")  # the same words, to another role
    again = await ask("player-1", "Guess.", first, "No.")
    try:
        await ask("player-3", "Guess.")
    except openai.NotFoundError as error:
        assert "nobody plays the role 'player-3'" in str(error), error
    else:
        raise AssertionError("an unknown role was answered")
    REPORT
"""


async def by_agent(bench: Bench, report: str, file: Path, **keys: dict[str, Any]) -> Trajectory:
    file.write_text(AGENT.replace("REPORT", report))
    roles = Roles({name: RoleConfig.model_validate(one) for name, one in keys.items()})
    bench.scheduler.context = replace(bench.scheduler.context, roles=roles.turns)
    loop = OpenAIProxyLoop(AgentOptions(target=f"{file}:agent"))
    bench.scheduler.loops["openai_proxy"] = loop  # type: ignore[index]
    try:
        (one,) = await bench.run(sample("openai_proxy", data_source="agent/guess"))
    finally:
        await loop.close()
        await roles.close()
    return one


SCORES = 'return {"role/player-1": 1.0, "role/player-2": -1.0, "depth": 2}'


async def test_an_agent_names_roles_as_models(bench: MakeBench, tmp_path: Path) -> None:
    b = bench(lambda session, turn: f"by {session.rsplit('.', 1)[1]}, {turn}")
    one = await by_agent(b, SCORES, tmp_path / "both.py", **{"player-1": {}, "player-2": {}})
    assert one.failure is None and check_trajectory(one, b.chat.vocab_size) == []
    assert [transcript.role for transcript in one.transcripts] == ["player-1", "player-2"]
    assert [(turn.transcript, turn.text) for turn in one.turns if turn.role == "assistant"] == [
        *[(0, "by 0, 0"), (1, "by 1, 0"), (0, "by 0, 1")]
    ]
    assert one.score == 0.0 and one.role_scores == {"player-1": 1.0, "player-2": -1.0}
    assert one.score_extra["depth"] == 2.0


async def test_an_agents_other_model_may_be_frozen(bench: MakeBench, tmp_path: Path, opponent: str) -> None:
    Opponent.moves = ["frozen words"]
    keys = {"player-1": {}, "player-2": {"policy": "small", "base_url": opponent}}
    b = bench(["a", "b"])
    one = await by_agent(b, SCORES, tmp_path / "frozen.py", **keys)
    assert one.failure is None and check_trajectory(one, b.chat.vocab_size) == []
    assert [(turn.role, turn.text) for turn in one.turns if turn.role != "user"] == [
        *[("assistant", "a"), ("frozen", "frozen words"), ("assistant", "b")]
    ]
    assert [transcript.sampled_length > 0 for transcript in one.transcripts] == [True, False]
    assert one.score == 1.0 and len(from_trajectories([one], turn_reward_coef=1.0)) == 1


async def test_an_agent_that_scores_no_role_is_told(bench: MakeBench, tmp_path: Path) -> None:
    with naming(CodeError, "role/NAME", "role 'player-1'"):
        await by_agent(
            bench(lambda session, turn: "a"),
            'return {"score": 1.0}',
            tmp_path / "none.py",
            **{"player-1": {}, "player-2": {"trains": False}},
        )
