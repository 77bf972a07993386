"""Training with real coding programs inside: a policy that has learnt their calls acts in sessions of several turns."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.chat import Chat
from agentrl.openai_api.agent_loop import OpenAIProxyLoop
from agentrl.trajectory import Status, Transcript
from data_prep import repairs
from tests.agent_loop.conftest import Bench, bench, sample
from tests.e2e.test_train import lines
from tests.harnesses.taught import teach, untaught
from tests.harnesses.test_programs import SHELLS, run
from tests.programs import program
from tests.real_model import TEMPLATE, find_model

__all__ = ["bench", "chat"]
SESSIONS = 50
"""Recorded sessions that the policy learns."""
ARGUMENTS = {"claude_code": ["--tools", "Bash,Edit,Read,Write"], "codex": [], "mini_swe_agent": []}
ROOM = {"max_response_tokens": 30_000, "max_model_len": 60_000, "max_prompt_tokens": 50_000, "max_assistant_turns": 9}
LONG = (
    *("data.max_prompt_length=50000", "data.max_response_length=8000", "actor_rollout_ref.rollout.max_model_len=60000"),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=60000",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=60000",
)
SHORT = (
    *("data.max_prompt_length=2048", "data.max_response_length=2048", "actor_rollout_ref.rollout.max_model_len=4096"),
    "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=128",
    *("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096", "actor_rollout_ref.actor.optim.lr=1e-6"),
)
EVERY_OTHER = """
import sys
with open(__file__ + ".seen", "a") as file:
    file.write("x")
    sys.exit(file.tell() % 2)
"""
"""Check that every other session passes: a group whose scores are equal would teach nothing."""


@pytest.fixture(scope="module", params=ARGUMENTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def policy(name: str, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 for the program whose prompts it can hold, else a tiny policy with room for long ones."""
    folder = tmp_path_factory.mktemp("policy")
    if name != "mini_swe_agent":
        return untaught(folder)
    made = shutil.copytree(find_model(pytestconfig, folder), folder / "policy")
    shutil.copy(TEMPLATE, made / "chat_template.jinja")
    return made


@pytest.fixture(scope="module")
def chat(policy: Path) -> Chat:
    return Chat.from_pretrained(str(policy))


def turns_of(name: str) -> list[str]:
    """Two calls of the program's shell, and an end: an answer, or the command that the program takes for its end."""
    end = run(name, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") if name == "mini_swe_agent" else "The fault is found."
    return [run(name, "ls"), run(name, "python -m unittest -q"), end]


async def recorded(made: Bench, name: str, rows: Sequence[dict[str, Any]]) -> list[Transcript]:
    """Record a session for each row."""
    options = AgentOptions(
        harness=name,
        command=[str(program(SHELLS[name][0]))],
        harness_options={"arguments": ARGUMENTS[name]},
        check=["true"],
    )
    loop = OpenAIProxyLoop(options)
    made.scheduler.loops = {"openai_proxy": loop}
    transcripts = []
    for row in rows:
        (found,) = await made.run(
            sample("openai_proxy", prompt=row["prompt"], extra_info=row["extra_info"], data_source="agent/repairs")
        )
        assert found.status is Status.COMPLETED, found.failure
        transcripts.append(max(found.transcripts, key=lambda one: sum(one.mask)))
    await loop.close()
    return transcripts


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(3000)
async def test_a_policy_that_learnt_its_calls_acts_in_a_real_program(
    bench: Callable[..., Bench], policy: Path, tmp_path: Path, name: str
) -> None:
    assert repairs.main(["--out", str(tmp_path), "--train-rows", str(SESSIONS), "--test-rows", "4"]) == 0
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    said = turns_of(name)
    made = bench(lambda session, turn: said[turn % len(said)], trajectory_timeout=100.0, max_retries=0, **ROOM)
    sessions = await recorded(made, name, rows)
    taught = shutil.copytree(policy, tmp_path / "policy")
    is_small = name != "mini_swe_agent"
    steps, loss = teach(taught, sessions, rate=5e-3 if is_small else 1e-4)
    print(f"{name}: {len(sessions)} sessions of {len(sessions[0].ids)} tokens, taught in {steps} steps to {loss:.4f}")
    check = tmp_path / "check.py"
    check.write_text(EVERY_OTHER)
    proxy = "actor_rollout_ref.rollout.agent.openai_proxy"
    words = [
        f"data.train_files={tmp_path}/test.parquet",
        f"data.val_files={tmp_path}/test.parquet",
        "data.train_batch_size=1",
        *(LONG if is_small else SHORT),
        "actor_rollout_ref.rollout.n=4",
        f"actor_rollout_ref.model.path={taught}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6",
        f"{proxy}.harness={name}",
        f"{proxy}.command=[{program(SHELLS[name][0])}]",
        f"{proxy}.harness_options={{arguments: [{', '.join(json.dumps(one) for one in ARGUMENTS[name])}]}}",
        f"{proxy}.check=[{sys.executable},{check}]",
        "algorithm.filter_groups.enable=false",
        f"trainer.total_training_steps={1 if is_small else 3}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    done = subprocess.run([sys.executable, "-m", "agentrl.train", *words], text=True, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    shown = ("time/", "trajectory/openai", "turns/", "prompt/", "response/", "train/", "actor/grad")
    for metrics in lines(tmp_path / "run"):
        print(f"{name}: {peak:.1f} GB, { ({key: value for key, value in metrics.items() if key.startswith(shown)}) }")
        assert metrics["left_out/failed"] == 0 and metrics.get("trajectory/openai_bad_requests", 0) == 0
        assert metrics["actor/grad_norm"] > 0 and metrics["score/mean"] == 0.5
        assert metrics["turns/mean"] >= 3 and metrics["response/observed_mean"] > 0
