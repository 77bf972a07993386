"""A side call that is left out changes no weight: two runs that train, one of whose agents makes none."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from agentrl.trajectory import Trajectory
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.parquet import read_trajectories
from tests.e2e.conftest import forked_command
from tests.e2e.test_train import lines
from tests.runs import Overrides

AGENT = """
import openai

TITLES = {titles}

async def solve(sample, base_url, api_key, model, report_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async def ask(messages, name=model):
            reply = await client.chat.completions.create(model=name, messages=messages, max_tokens=8)
            return reply.choices[0].message.content

        async def title(text):
            if TITLES:
                await ask([{{"role": "user", "content": text}}], "small")

        messages = list(sample["prompt"])
        await title("Title? " + messages[-1]["content"])
        said = await ask(messages)
        await title("New topic? " + messages[-1]["content"])
        messages += [{{"role": "assistant", "content": said}}, {{"role": "user", "content": "Sure?"}}]
        await ask(messages)
        await title("Summary?")
        return {{"reward": len(said) % 5 / 5}}
"""
KEYS = "actor_rollout_ref.rollout.agent"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    row = {"data_source": "quickstart/arithmetic", "reward_model": {"style": "rule", "ground_truth": "5"}}
    asked = [{**row, "prompt": [{"role": "user", "content": f"What is {n} + 3?"}]} for n in range(8)]
    pq.write_table(pyarrow.Table.from_pylist(asked), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def recorded(run: Path) -> list[Trajectory]:
    return [one for file in sorted((run / "trajectories").glob("train_*.parquet")) for one in read_trajectories(file)]


def test_a_side_call_that_is_left_out_changes_no_weight(small_run: Overrides, tmp_path: Path, rows: Path) -> None:
    for name in ("without", "titled"):
        (tmp_path / f"{name}.py").write_text(AGENT.format(titles=name == "titled"))
        arguments = small_run(
            *(f"data.train_files={rows}", "data.val_files=null", "data.max_response_length=64"),
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
            f"{KEYS}.default_agent_loop=openai_proxy",
            f"{KEYS}.openai_proxy.target={tmp_path}/{name}.py:solve",
            f"{KEYS}.openai_proxy.train=[policy]",
            *("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "trainer.total_training_steps=2"),
            run_dir=tmp_path / name,
        )
        done = forked_command(arguments, tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"{KEYS}.openai_proxy.train=[policy]: the transcripts of calls that name one of" in done.stdout
        said = "16 transcripts of sessions: 16 main, 0 of sub-agents, 0 side calls; 0 are left out"
        if name == "titled":
            said = "64 transcripts of sessions: 16 main, 0 of sub-agents, 48 side calls (opened by "
        assert f"step 1 had {said}" in done.stdout, done.stdout
    without, titled = (recorded(tmp_path / name) for name in ("without", "titled"))
    assert [len(one.transcripts) for one in (*without, *titled)] == [1] * 32 + [4] * 32
    for kind in ("policy", "checkpoints"):
        files = [sorted((tmp_path / name / kind).rglob("*.safetensors")) for name in ("without", "titled")]
        for one, other in zip(*files, strict=True):
            tensors, others = load_file(one), load_file(other)
            assert tensors and all(torch.equal(values, others[name]) for name, values in tensors.items()), one
    numbers = [lines(tmp_path / name) for name in ("without", "titled")]
    for one, other in zip(*numbers, strict=True):
        wanted = ("actor/", "train/", "reward/", "response/", "prompt/", "turns/", "group/", "left_out/")
        same = [name for name in one if name.startswith(wanted)]
        assert len(same) > 20 and [one[name] for name in same] == [other[name] for name in same]
        assert other["trajectory/left_out/side_calls"] == 3 and one["trajectory/left_out/side_calls"] == 0
        assert one["checks/alarms"] == other["checks/alarms"] == 0
    ids = [from_trajectories(each, turn_reward_coef=1.0).ids.tolist() for each in (without, titled)]
    assert ids[0] == ids[1], "a batch of the record is the batch that was trained on"
    table = pq.read_table(sorted((tmp_path / "titled" / "updates").glob("*.parquet"))[0])
    for row in table["advantages"].to_pylist():
        assert [any(value is not None for value in window) for window in row] == [False, True, False, False]
    assert json.loads((tmp_path / "titled" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


SCORING = """
import httpx
import openai

async def solve(sample, base_url, api_key, model, report_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async def ask(text):
            messages = [{"role": "user", "content": text}]
            return await client.chat.completions.create(model=model, messages=messages, max_tokens=8)

        title = await ask("Title?")
        said = (await ask(sample["prompt"][-1]["content"])).choices[0].message.content
        body = {"score": len(title.choices[0].message.content) % 3 / 4, "response": title.id}
        async with httpx.AsyncClient() as judge:
            (await judge.post(report_url + "/feedback", json=body)).raise_for_status()
        return {"score": len(said) % 7 / 7}
"""


def test_a_transcript_with_a_score_is_trained_by_it(small_run: Overrides, tmp_path: Path, rows: Path) -> None:
    """Its tokens have the advantage that GRPO gives the session with that score; the others have the session's."""
    (tmp_path / "scoring.py").write_text(SCORING)
    arguments = small_run(
        *(f"data.train_files={rows}", "data.val_files=null", "data.max_response_length=64"),
        *("actor_rollout_ref.rollout.multi_turn.tool_config_path=null", "custom_reward_function.path=null"),
        "reward_model.scorers={quickstart/arithmetic: {name: reported}}",
        f"{KEYS}.default_agent_loop=openai_proxy",
        f"{KEYS}.openai_proxy.target={tmp_path}/scoring.py:solve",
        "trainer.total_training_steps=1",
    )
    done = forked_command(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    table = pq.read_table(next((run / "updates").glob("*.parquet"))).to_pylist()
    trained = recorded(run)
    assert len(trained) == len(table) == 16
    scored = 0
    for one, row in zip(trained, table, strict=True):
        scores = [other.score for other in trained if other.group == one.group and other is not one]
        for transcript, advantages in zip(one.transcripts, row["advantages"], strict=True):
            own = one.score if transcript.score is None else transcript.score
            assert own is not None
            scored += transcript.score is not None and transcript.score != one.score
            rewards = torch.tensor([own, *scores], dtype=torch.float64)
            wanted = 0.0 if rewards.max() == rewards.min() else float((own - rewards.mean()) / (rewards.std() + 1e-6))
            found = {value for value in advantages if value is not None}
            assert len(found) == 1 and found.pop() == pytest.approx(wanted, abs=1e-4)
    assert scored > 4, "most titles have another score than their session"
    assert lines(run)[-1]["checks/alarms"] == 0
