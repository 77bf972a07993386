"""A training whose tools and interaction never answer the same twice is repeated from a cassette, without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import forked_command
from tests.e2e.test_train import lines
from tests.runs import Overrides

DICE = """
import secrets
from pathlib import Path

from agentrl.agent_loop import AgentLoop, Episode
from agentrl.agent_loop.dialogue import Dialogue
from agentrl.interaction import Interaction, InteractionResponse
from agentrl.trajectory import Status

SERVER = Path(__file__).with_name("server")  # stands for a server: gone, nothing answers


async def roll(sides: int) -> str:
    \"\"\"Roll a die.\"\"\"
    return SERVER.read_text() + str(secrets.randbelow(10**6))


class Moody(Interaction):
    async def start_interaction(self, instance_id, **kwargs):
        return None

    async def generate_response(self, instance_id, messages):
        text = SERVER.read_text() + str(secrets.randbelow(10**6))
        return InteractionResponse(should_end=False, text=text, score=secrets.randbelow(100) / 100)


class Gambler(AgentLoop):
    takes_interactions = True

    async def run(self, episode: Episode) -> None:
        async with Dialogue.open(episode) as dialogue:
            await episode.start(episode.sample.prompt)
            reply = await episode.generate(max_tokens=6)
            rolled = await episode.call("roll", {"sides": len(reply.message.text) % 3})
            if await episode.observe([{"role": "tool", "content": rolled.text, "name": "roll"}]):
                await episode.generate(max_tokens=6)
                await dialogue.respond()
        episode.finish(Status.COMPLETED)
"""


@pytest.fixture
def gamble(small_run: Overrides, data_dir: Path, tmp_path: Path) -> Callable[..., list[str]]:
    (tmp_path / "dice.py").write_text(DICE)
    (tmp_path / "server").write_text("it says ")
    (tmp_path / "tools.yaml").write_text("tools:\n  - function: dice.roll\n")
    (tmp_path / "loops.yaml").write_text("- name: gambler\n  _target_: dice.Gambler\n")
    (tmp_path / "interactions.yaml").write_text("interaction:\n  - {name: moody, class_name: dice.Moody}\n")
    rows = pq.read_table(data_dir / "train.parquet").to_pylist()[:8]
    changed = [{**row, "agent_name": "gambler", "interaction_kwargs": {"name": "moody"}} for row in rows]
    pq.write_table(pa.Table.from_pylist(changed), tmp_path / "rows.parquet")

    def overrides(run: str, *more: str) -> list[str]:
        return small_run(
            f"data.train_files={tmp_path}/rows.parquet",
            "data.val_files=null",
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/tools.yaml",
            f"actor_rollout_ref.rollout.multi_turn.interaction_config_path={tmp_path}/interactions.yaml",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path}/loops.yaml",
            "trainer.total_training_steps=2",
            "tools.cassette_path=answers.jsonl",
            *more,
            run_dir=tmp_path / run,
        )

    return overrides


def numbers(run: Path) -> list[dict[str, float]]:
    """The metrics, but for those that measure time."""
    slow = ("time", "seconds", "perf")
    return [
        {name: value for name, value in line.items() if not any(word in name for word in slow)} for line in lines(run)
    ]


@pytest.mark.timeout(400)
def test_a_training_is_repeated_without_its_servers(gamble: Overrides, tmp_path: Path) -> None:
    done = forked_command(gamble("first", "tools.cassette=record"), tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "server").unlink()
    done = forked_command(gamble("again", "tools.cassette=replay"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "again") == numbers(tmp_path / "first")

    done = forked_command(gamble("other", "tools.cassette=replay", "trainer.seed=2"), tmp_path)
    assert done.returncode == 2, done.stdout
    assert "answers.jsonl holds no answer of" in done.stderr and "tools.cassette=record" in done.stderr
    assert "Traceback" not in done.stderr
