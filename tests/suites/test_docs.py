"""The commands of docs/evaluate.md run as shown, on a tiny policy and a few tasks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl.suites import reasoning_gym
from tests.e2e.test_docs import commands, write_files
from tests.offline.test_rescoring import judge, recorded, run_of
from tests.suites.test_bfcl import wheel
from tests.suites.test_reasoning_gym import package
from tests.wheel import Run

__all__ = ["judge", "package", "wheel"]
MODULE = ["-m", "agentrl.evaluate"]


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("wheel")
def test_the_commands_of_the_page_run(
    run_wheel: Run,
    policy_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    judge: tuple[object, list[str]],
    package: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(package.__file__).parent.parent))
    assert write_files("docs/evaluate.md", tmp_path) == ["shorter.py", "my_suite.py"]
    run_of(tmp_path / "runs/mine", {step: [recorded(step, 0, k, 1.0, str(k)) for k in range(2)] for step in (1, 12)})
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    (tmp_path / "data/gsm8k/test.jsonl").write_text('{"question": "What is 2 + 2?", "answer": "4\\n#### 4"}\n')
    ran = []
    for line in commands("docs/evaluate.md"):
        words = [word.replace("Qwen/Qwen3-0.6B", str(policy_dir)) for word in shlex.split(line)]
        if words[0] == "pip":
            continue
        assert words[:3] == ["python", "-m", "agentrl.evaluate"]
        words = words[3:]
        if any("judge.base_url" in word for word in words):
            words += judge[1][:2]
        if "--suite" in words:
            words += ["--limit", "1", "data.max_prompt_length=2000", "data.max_response_length=8"]
            if "bfcl" in words:
                words += ["--parts", "simple_python,irrelevance"]
                run_wheel(
                    [*MODULE, *("runs/bfcl-trained" if word == "runs/bfcl" else word for word in words)], tmp_path
                )
        run_wheel([*MODULE, *words], tmp_path)
        ran.append(words)
    assert len(ran) == 7
    assert pq.read_table("judged.parquet")["score"].to_pylist() == [0.0, 0.1], "of the steps 10 to 20"
    numbers = json.loads(Path("runs/bfcl/report.json").read_text())["numbers"]
    assert set(numbers) == {"simple_python", "irrelevance"}
    assert set(json.loads(Path("runs/gym/report.json").read_text())["numbers"]) <= set(reasoning_gym.DEFAULT)
