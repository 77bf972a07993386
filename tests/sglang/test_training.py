"""`python -m agentrl.train actor_rollout_ref.rollout.name=sglang`, whole, with what goes wrong on the way."""

from __future__ import annotations

import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.config import load_config
from agentrl.engines.builder import EngineSetting
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.sglang.build import build as build_engine
from agentrl.engines.sglang.options import RESERVED
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.observe.invariants import check_trajectory
from agentrl.system.loop_thread import LoopThread
from agentrl.train import main
from agentrl.trajectory import Trajectory
from agentrl.trajectory.parquet import read_trajectories
from tests.e2e.test_docs import SMALL, blocks, commands
from tests.e2e.test_train import lines
from tests.engines.contract import MAX_MODEL_LEN
from tests.sglang.training import Run, overrides, write_assets

PAGE = "docs/sglang.md"
ROLLOUT = "actor_rollout_ref.rollout"

pytestmark = pytest.mark.timeout(400)

Train = Callable[..., Run]
"""Starts a run with further overrides, in the test's folder. What is left of it is stopped after the test."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def train(assets: Path, model_dir: Path, tmp_path: Path) -> Iterator[Train]:
    runs: list[Run] = []

    def start(*more: str) -> Run:
        runs.append(Run(overrides(assets, model_dir, tmp_path, *more), assets, tmp_path))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()


def trained(folder: Path, step: int) -> list[Trajectory]:
    return read_trajectories(folder / "run" / "trajectories" / f"train_{step:06}.parquet")


def assert_trained(folder: Path, steps: range, *, first_gap: float = 1e-4) -> None:
    """Each step is there, of the weights that the step before had made, and no row was left out or came out wrong."""
    metrics = {int(line["step"]): line for line in lines(folder / "run")}
    for step in steps:
        line = metrics[step]
        assert line["rollout/logprob_gap_max_abs"] < first_gap, "servers and trainer have different weights"
        assert line["actor/grad_norm"] > 0
        assert line["sync/bytes"] > 100_000
        assert line["left_out/failed"] == line["left_out/unscored"] == 0
        rows = trained(folder, step)
        assert len(rows) == 8
        assert [problem for row in rows for problem in check_trajectory(row, vocab_size=475)] == []
        assert all(row.score is not None and row.score > 0 for row in rows)
        spans = [span for row in rows for transcript in row.transcripts for span in transcript.versions]
        assert {span.version for span in spans} == {step - 1}


def found_again(rows: list[Trajectory], at_first: float) -> float:
    """Fraction of the tokens that a session had at its last turn which its next turn found in the server's cache.

    at_first: tokens that the first turns found, which others had left.
    """
    found, known = -at_first, 0.0
    for row in rows:
        mine = [turn for turn in row.turns if turn.role == "assistant"]
        known += sum(turn.end for turn in mine[:-1])
        found += row.metrics["cached_tokens"]
    return found / known


def fails(run: Run, *says: str) -> str:
    """Exit status 2 with one message, and nothing left behind."""
    assert run.end() == 2, run.stderr
    assert run.servers() == set()
    message = run.stderr
    assert message.startswith("error: ") and "Traceback" not in message
    for text in says:
        assert text in message, f"{text!r} is not in: {message}"
    return message


def test_a_run_from_start_to_end(train: Train, assets: Path, tmp_path: Path) -> None:
    run = train(f"data.val_files={assets}/rows.parquet", "data.val_max_samples=2")
    assert run.end() == 0, run.stderr
    assert run.servers() == set()
    assert_trained(tmp_path, range(1, 4))
    metrics = lines(tmp_path / "run")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert {"val/success_sampled", "val/success_greedy"} <= set(metrics[0]) & set(metrics[3])
    assert [line["engine/servers_healthy"] for line in metrics[1:]] == [1.0] * 3
    for step in range(1, 4):
        rows = trained(tmp_path, step)
        at_first = sum(row.metrics["cached_at_first"] for row in rows)
        assert found_again(rows, at_first) > 0.9, "a session's next turn does not find its context"
    assert "server 0: loading weights" in run.stdout
    assert "warning" not in run.stdout, "nothing went wrong"
    assert run.stderr == ""
    assert (tmp_path / "run" / "servers" / "0.log").exists()
    assert not (tmp_path / "run" / "alarms.jsonl").exists()
    log = (tmp_path / "run" / "servers" / "0.log").read_text()
    assert log.count("action=checksum") == len(metrics) - 1, "a sample of its weights is compared after each update"


@pytest.mark.slice(0, "kill")
def test_a_server_is_killed_in_the_middle_of_a_step(train: Train, tmp_path: Path) -> None:
    run = train(
        f"{ROLLOUT}.num_servers=2",
        f"{ROLLOUT}.multi_turn.max_tokens_per_turn=36",  # long enough to be in the middle of
        "data.max_response_length=240",
    )
    run.until(lambda: run.turns >= 8 * 4 + 4)  # step 1 is over, and step 2 at its second turn
    servers = run.groups()
    assert len(servers) == 2
    os.killpg(min(servers), signal.SIGKILL)
    assert run.end() == 0, run.stderr
    assert run.servers() == set()
    assert_trained(tmp_path, range(1, 4))
    metrics = lines(tmp_path / "run")
    assert metrics[0]["engine/servers_healthy"] == 2
    assert metrics[-1]["engine/failovers"] >= 1 and metrics[-1]["trajectory/retries"] == 0
    assert "is dead" in run.stdout and "go on elsewhere" in run.stdout


@pytest.mark.slice(1, "kill")
@pytest.mark.parametrize(("bound", "keeps"), [(1, False), (2, False), (2, True)])
def test_trajectories_go_on_while_the_policy_is_updated(
    train: Train, assets: Path, model_dir: Path, tmp_path: Path, bound: int, keeps: bool
) -> None:
    """Two servers, of which one is killed while both sample; every log-prob is by the weights that are recorded.

    Where keys and values are kept, every one up to the first change of weights in a turn.
    """
    run = train(
        f"async_training.keep_kv_cache={str(keeps).lower()}",
        f"{ROLLOUT}.num_servers=2",
        f"async_training.max_staleness={bound}",
        f"async_training.depth={bound}",
        f"{ROLLOUT}.multi_turn.max_tokens_per_turn=90",  # a trajectory takes longer than several updates
        "data.max_response_length=460",
        "trainer.total_training_steps=6",
        f"data.val_files={assets}/rows.parquet",
        "data.val_max_samples=2",
        "trainer.test_freq=3",
        "trainer.max_actor_ckpt_to_keep=null",
    )
    # At most three steps more are sampled by now, however slow the trainer is. So others have yet to be.
    run.until(lambda: (tmp_path / "run" / "checkpoints" / "step_000001").exists())
    server = min(run.groups())
    os.killpg(server, signal.SIGSTOP)
    # It may have had nothing to answer. After so many turns of the other it is asked, or all that is left waits for it.
    turns, stopped = run.turns, time.monotonic()
    run.until(lambda: run.turns >= turns + 8 or time.monotonic() > stopped + 20)
    os.killpg(server, signal.SIGKILL)
    assert run.end() == 0, run.stderr
    assert run.servers() == set()
    metrics = lines(tmp_path / "run")
    assert [line["step"] for line in metrics] == list(range(7))
    assert max(line["async/staleness_max"] for line in metrics[1:]) <= bound
    assert all(0 <= line[f"async/{who}_idle"] <= 1 for line in metrics[1:] for who in ("engine", "trainer"))
    assert metrics[-1]["engine/failovers"] >= 1
    assert "12 prompts, each once: 12 trained" in run.stdout
    assert_sampled_by_what_is_recorded(tmp_path, model_dir, 6, keeps=keeps)


def assert_sampled_by_what_is_recorded(folder: Path, model: Path, steps: int, *, keeps: bool = False) -> None:
    """Each log-prob is by the checkpoint of its token's version, and some trajectories have more than one.

    keeps: what is sampled behind a change of weights in a turn is not compared.
    """
    rows = [row for step in range(1, steps + 1) for row in trained(folder, step)]
    assert len({row.uid for row in rows}) == len(rows) == steps * 8
    spans = [[span.version for span in transcript.versions] for row in rows for transcript in row.transcripts]
    assert any(len(set(one)) > 1 for one in spans), "some went on under further weights"
    checkpoints = folder / "run" / "checkpoints"
    policies = [policy_of(model)]
    policies += [policy_of(model, checkpoints / f"step_{step:06}" / "policy") for step in range(1, steps)]
    compared = dict.fromkeys(range(steps), 0)
    for row in rows:
        (transcript,) = row.transcripts
        for span in transcript.versions:
            expected = logprobs_under(policies[span.version], transcript.ids)[span.start : span.end]
            found = torch.tensor(transcript.logprobs[span.start : span.end])
            sampled = torch.tensor(transcript.mask[span.start : span.end], dtype=torch.bool)
            if keeps and span.start and transcript.mask[span.start - 1]:  # the rest of a turn that began before
                sampled = sampled & (~sampled).cumsum(0).bool()
            assert ((found - expected)[sampled].abs() < 1e-3).all(), (row.uid, span)
            compared[span.version] += int(sampled.sum())
    assert sum(tokens > 0 for tokens in compared.values()) >= 3, compared


def test_trajectories_outlast_updates_for_which_the_servers_memory_is_freed(
    assets: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has no memory to free, so the server is started without what frees it, and its calls are answered alike."""
    asleep: list[int] = []

    def build(setting: EngineSetting, loop: LoopThread) -> ServerEngine:
        roles = setting.config.actor_rollout_ref
        rollout = roles.rollout.model_copy(update={"free_cache_engine": False})
        roles = roles.model_copy(update={"rollout": rollout})
        config = setting.config.model_copy(update={"actor_rollout_ref": roles})
        engine = build_engine(replace(setting, config=config), loop)
        engine._free_weights, sleep = True, engine.sleep

        async def slept() -> None:
            await sleep()
            asleep.append(sum(call.server is not None for call in engine._calls.values()))
            assert all(server.freed for server in engine._supervisor.servers.values())

        monkeypatch.setattr(engine, "sleep", slept)
        return engine

    monkeypatch.setattr("agentrl.engines.sglang.build.build", build)
    monkeypatch.syspath_prepend(assets)
    monkeypatch.chdir(tmp_path)
    keys = [
        "trainer.device=auto",
        f"{ROLLOUT}.free_cache_engine=true",
        "async_training.max_staleness=1",
        f"{ROLLOUT}.agent.max_concurrent=10",  # of 16, so that some are in the middle when a batch has ended
        f"{ROLLOUT}.multi_turn.max_tokens_per_turn=36",
        "data.max_response_length=240",
        "trainer.total_training_steps=4",
        f"data.val_files={assets}/rows.parquet",
        "data.val_max_samples=2",
        "trainer.test_freq=2",
        "trainer.max_actor_ckpt_to_keep=null",
    ]
    assert main([*overrides(assets, model_dir, tmp_path), *keys]) == 0
    metrics = lines(tmp_path / "run")
    assert [line["step"] for line in metrics] == list(range(5))
    assert max(line["async/staleness_max"] for line in metrics[1:]) <= 1
    assert metrics[-1]["engine/failovers"] == 0
    assert len(asleep) == 4 and max(asleep) > 0, "requests waited in a server that was asleep"
    assert_sampled_by_what_is_recorded(tmp_path, model_dir, 4)


def policy_of(model: Path, checkpoint: Path | None = None) -> PreTrainedModel:
    """The model in a folder, with the weights of a checkpoint, of which each rank has written its part."""
    policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if checkpoint is not None:
        weights = {name: torch.full_like(parameter, math.nan) for name, parameter in policy.named_parameters()}
        load(weights, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
        policy.load_state_dict(weights, strict=False)
    return policy


@torch.no_grad()
def logprobs_under(policy: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """log p(ids[i] | ids[:i]) [T], 0 for the first."""
    logits = policy(input_ids=torch.tensor([ids])).logits[0]
    found = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), found])


@pytest.mark.slice(0, "kill")
def test_interrupted_gone_on_with_and_killed(train: Train, tmp_path: Path) -> None:
    run = train("trainer.total_training_steps=30")
    run.until(lambda: (tmp_path / "run" / "checkpoints" / "step_000001").exists())
    run.kill(signal.SIGINT)
    assert run.end(20) == 130
    assert run.servers() == set()
    assert "interrupted" in run.stderr and "Traceback" not in run.stderr
    done = int(lines(tmp_path / "run")[-1]["step"])

    run = train("trainer.total_training_steps=30")
    run.until(lambda: int(lines(tmp_path / "run")[-1]["step"]) >= done + 2)
    assert f"(step {done - 1})" in run.stdout or f"(step {done})" in run.stdout
    run.kill()
    assert run.end() == -signal.SIGKILL
    killed = time.monotonic()
    while run.servers():
        assert time.monotonic() - killed < 5, "servers outlive the trainer"
        time.sleep(0.05)
    # The servers have the policy's weights, not those of the model's folder, at the first rollout of the second run.
    assert_trained(tmp_path, range(1, done + 3))


@pytest.mark.slice(0, "kill")
@pytest.mark.parametrize("bound", [1, 2, 4])
def test_the_trainer_is_killed_beside_a_server_that_goes_on(
    train: Train, server: SGLangProcess, tmp_path: Path, bound: int
) -> None:
    """With trajectories in flight: each prompt is trained on once, by tokens that are not too old."""
    keys = [
        f"{ROLLOUT}.server_urls=[{server.url}]",
        f"async_training.max_staleness={bound}",
        f"async_training.depth={bound}",
        "trainer.save_freq=2",
        "trainer.total_training_steps=5",
    ]
    run = train(*keys)
    run.until(lambda: run.turns >= 3 * 8 * 4 + 10 * bound)  # in or behind the fourth step
    run.kill()
    assert run.end() == -signal.SIGKILL
    run = train(*keys)
    assert run.end() == 0, run.stderr
    assert "10 prompts, each once: 10 trained" in run.stdout
    for step in range(1, 6):
        rows = trained(tmp_path, step)
        assert len({row.uid for row in rows}) == 8
        spans = [span for row in rows for transcript in row.transcripts for span in transcript.versions]
        assert step - 1 - bound <= min(span.version for span in spans)
    assert len({row.uid for step in range(1, 6) for row in trained(tmp_path, step)}) == 5 * 8
    assert server.exited is None


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
def test_attached_to_a_server_that_runs(train: Train, server: SGLangProcess, tmp_path: Path, transport: str) -> None:
    run = train(
        f"{ROLLOUT}.server_urls=[{server.url}]",
        f"{ROLLOUT}.update_weights_transport={transport}",
        f"{ROLLOUT}.update_weights_checksum=true",
        "trainer.total_training_steps=2",
    )
    assert run.end() == 0, run.stderr
    assert_trained(tmp_path, range(1, 3))
    assert server.exited is None, "it was there before, and stays"
    assert list((tmp_path / "run").glob("weights/*")) == []


def test_agents_that_talk_to_an_openai_client(
    train: Train, assets: Path, server: SGLangProcess, tmp_path: Path
) -> None:
    run = train(
        f"{ROLLOUT}.server_urls=[{server.url}]",
        f"{ROLLOUT}.agent.default_agent_loop=openai_proxy",
        f"{ROLLOUT}.agent.openai_proxy.target={assets}/agent.py:solve",
        "trainer.total_training_steps=2",
    )
    assert run.end() == 0, run.stderr
    assert_trained(tmp_path, range(1, 3))
    assert lines(tmp_path / "run")[-1]["trajectory/openai_calls"] == 3
    rows = trained(tmp_path, 2)
    at_first = [int(line) for line in (tmp_path / "cached_at_first.txt").read_text().split()]
    assert len(at_first) == 2 * len(rows)
    assert found_again(rows, sum(at_first[-len(rows) :])) > 0.9, "a session's next turn does not find its context"


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize(
    ("argument", "says", "most"),
    [
        ("schedule_policy=best", ["argument --schedule-policy: invalid choice: 'best'"], 7),
        ("load_format=gguf", ["MODEL is not a file", "actor_rollout_ref.model.path=MODEL"], 12),
    ],
    ids=["argument", "model"],
)
def test_a_start_that_sglang_refuses(train: Train, model_dir: Path, argument: str, says: list[str], most: int) -> None:
    argument = f"{ROLLOUT}.engine_kwargs.sglang.{argument}"
    message = fails(train(argument), argument, "servers/0.log", *(one.replace("MODEL", str(model_dir)) for one in says))
    assert len(message.splitlines()) <= most


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            [f"{ROLLOUT}.server_urls=[http://127.0.0.1:9]", f"{ROLLOUT}.server_start_timeout=1"],
            [f"{ROLLOUT}.server_urls", "http://127.0.0.1:9", "within 1 s"],
        ),
        (
            [f"{ROLLOUT}.server_urls=[SERVER]", f"data.max_response_length={MAX_MODEL_LEN}"],
            [
                *(f"{ROLLOUT}.server_urls", f"has a context of {MAX_MODEL_LEN + RESERVED} tokens"),
                *(f"this job needs {MAX_MODEL_LEN + 60}", f"--context-length {MAX_MODEL_LEN + 60 + RESERVED}"),
            ],
        ),
        (
            [f"{ROLLOUT}.server_urls=[http://no-such-host.invalid:1,SERVER]", f"{ROLLOUT}.server_start_timeout=6"],
            [f"{ROLLOUT}.server_urls", "http://no-such-host.invalid:1"],
        ),
        (
            [f"{ROLLOUT}.free_cache_engine=true"],
            [f"{ROLLOUT}.free_cache_engine", "trainer.device=cuda"],
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2"],
            [f"{ROLLOUT}.tensor_model_parallel_size=2", "must be 1"],
        ),
    ],
    ids=["no server", "shorter context", "one of two missing", "memory of a CPU", "more GPUs than there are"],
)
def test_settings_that_cannot_work(
    assets: Path,
    model_dir: Path,
    server: SGLangProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    says: list[str],
) -> None:
    simple = [f"{ROLLOUT}.agent.default_agent_loop=single_turn", f"{ROLLOUT}.agent.agent_loop_config_path=null"]
    changes = [change.replace("SERVER", server.url) for change in changes]
    assert main([*overrides(assets, model_dir, tmp_path, *simple), *changes]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    for text in says:
        assert text in message, f"{text!r} is not in: {message}"
    assert not (tmp_path / "run" / "servers").exists()


def test_the_pages_commands(
    assets: Path, model_dir: Path, server: SGLangProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that a CPU can run, with the shared server; of those for GPUs, that every key is there."""
    for name in ("my_data", "my_test"):
        (tmp_path / f"{name}.parquet").symlink_to(assets / "rows.parquet")
    (command,) = commands(PAGE)
    words = [word.replace("Qwen/Qwen3-0.6B", str(model_dir)) for word in shlex.split(command)]
    assert words[:3] == ["python", "-m", "agentrl.train"]
    more = [f"{ROLLOUT}.server_urls=[{server.url}]", f"custom_reward_function.path={assets}/reward.py"]
    small = [*SMALL, "data.max_prompt_length=60", "data.max_response_length=40", "algorithm.filter_groups.enable=false"]
    monkeypatch.chdir(tmp_path)
    assert main([*words[3:], *small, *more]) == 0
    texts = " ".join(blocks(PAGE, "text")).replace("\\\n", " ")
    launches = [shlex.split(text, comments=True) for text in texts.split("python -m ")[1:]]
    assert [words[0] for words in launches] == ["agentrl.train", "sglang.launch_server", "agentrl.train"]
    for words in launches:
        if words[0] == "agentrl.train":
            data = ["data.train_files=my_data.parquet", "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B"]
            load_config([*data, "trainer.device=cuda", *(word for word in words[1:] if word != "...")])
        else:
            assert {word for word in words if word.startswith("--")} <= set(server.arguments.argv(1))
