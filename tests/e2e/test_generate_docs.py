"""The commands of docs/generate.md run as shown."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.test_docs import SMALL, commands, scaled, write_files
from tests.wheel import Run


@pytest.mark.timeout(400)
def test_the_commands_of_the_page_run_after_the_first_run(run_wheel: Run, tmp_path: Path, policy_dir: Path) -> None:
    """Of the data of the first run, which lies in runs/lengths."""
    write_files("docs/first_run.md", tmp_path)
    for line in commands("docs/first_run.md"):
        words = shlex.split(line)
        if words[1] == "my_data.py" or "trainer.experiment_name=lengths" in words:
            run_wheel(scaled(words[1:], policy_dir), tmp_path)
    shutil.copy(tmp_path / "my_data.parquet", tmp_path / "test.parquet")
    shutil.copy(tmp_path / "my_tools.yaml", tmp_path / "tools.yaml")
    for line in commands("docs/generate.md"):
        words = [word.replace("Qwen/Qwen3-0.6B", str(policy_dir)) for word in shlex.split(line)[1:]]
        if "agentrl.generate" in words:
            (tmp_path / "out.parquet").unlink(missing_ok=True)
            lengths = [word for word in SMALL if "_length" in word]
            words += [*lengths, "data.max_samples=2"]
        else:
            words.append("custom_reward_function.path=my_reward.py")
        run_wheel(words, tmp_path)
        assert pq.read_table(tmp_path / "out.parquet").num_rows == 2
    assert (tmp_path / "scores.json").exists()
