"""The sampler `curriculum` in whole runs: a tiny curriculum of three levels, and the commands of its page."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.train import main
from tests.e2e.test_docs import commands
from tests.e2e.test_train import lines
from tests.runs import Overrides

LEVELS = {"level/1": 90, "level/2": 45, "level/3": 15}
"""Characters that an answer may have at most."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) <= int(ground_truth))
"""


def write_levels(path: Path, names: dict[str, int], rows: int = 8) -> None:
    table = [
        {
            "prompt": [{"role": "user", "content": f"Say something short about the number {number}."}],
            "data_source": name,
            "agent_name": "single_turn",
            "reward_model": {"ground_truth": str(limit)},
        }
        for name, limit in names.items()
        for number in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), path)


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(900)
def test_a_curriculum_reaches_the_hardest_level(small_run: Overrides, tmp_path: Path) -> None:
    """The first level teaches the last one, which fails at first: rows leave the pools of what is too hard."""
    write_levels(tmp_path / "levels.parquet", LEVELS)
    (tmp_path / "shortness.py").write_text(REWARD)
    run = small_run(
        f"data.train_files={tmp_path}/levels.parquet",
        "data.val_files=null",
        f"custom_reward_function.path={tmp_path}/shortness.py",
        "data.sampler.name=curriculum",
        "data.sampler.options.weights=success",
        "data.sampler.options.pools=true",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "trainer.total_training_steps=30",
        run_dir=tmp_path / "run",
    )
    assert main(run) == 0
    steps = lines(tmp_path / "run")

    def mean(name: str, part: slice) -> float:
        values = [step[name] for step in steps[part] if name in step]
        return sum(values) / len(values)

    first, last = slice(0, 8), slice(-5, None)
    assert mean("success/level/3", first) < 0.3 and mean("success/level/3", last) > 0.7
    assert mean("sampler/share/level/1", first) > mean("sampler/share/level/1", last)
    hard = "sampler/pool/level/3/too_hard"
    assert max(step[hard] for step in steps[first]) > 2 * mean(hard, last)
    assert sum(step["sampler/drawn/level/3"] for step in steps) > 40


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_run(
    small_run: Overrides, reward_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, source in (("gsm8k", "openai/gsm8k"), ("nq", "nq")):
        write_levels(tmp_path / f"{name}.parquet", {source: 10})
    found = commands("docs/curriculum.md")
    assert len(found) == 3
    for number, line in enumerate(found):
        words = shlex.split(line)
        assert words[:3] == ["python", "-m", "agentrl.train"]
        small = [
            one for one in small_run("data.val_files=null", run_dir=tmp_path / str(number)) if "train_files" not in one
        ]
        assert main([*small, *words[3:], "trainer.total_training_steps=2"]) == 0
        assert "sampler/drawn/openai/gsm8k" in lines(tmp_path / str(number))[-1]
