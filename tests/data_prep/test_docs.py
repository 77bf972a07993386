"""The commands of docs/data.md run as shown, on a few records of each kind."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from agentrl.quickstart.tiny_policy import make_tiny_policy
from tests.data_prep.test_code_tests import MBPP
from tests.data_prep.test_tool_conversations import GLAIVE, HERMES, SHAREGPT, TOOLACE, XLAM
from tests.e2e.test_docs import commands, scaled
from tests.e2e.test_train import lines
from tests.sandbox.servers import running
from tests.wheel import Run


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(600)
def test_the_pages_commands_run(run_wheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = make_tiny_policy(tmp_path / "policy", seed=3)
    questions = [{"question": f"who is number {n}", "answer": [str(n)]} for n in range(320)]
    sources: dict[str, list[dict[str, Any]]] = {
        "NQ-open.dev.jsonl": questions,
        "mbpp.jsonl": [{**MBPP, "task_id": n} for n in range(8)],
        "conversations.jsonl": [SHAREGPT, HERMES, XLAM, TOOLACE, GLAIVE],
    }
    for name, records in sources.items():
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "runs").mkdir()
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    alpaca = json.dumps({"instruction": "2 + 3?", "input": "", "output": "5"})
    (tmp_path / "alpaca.jsonl").write_text(f"{alpaca}\n" * 8)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    with running(None) as sandbox:
        for line in commands("docs/data.md"):
            if line.startswith(("pip install", "python -m data_prep.model ", "python -m data_prep.tasks ")):
                continue  # they need the package index, or containers: test_model.py and test_tasks.py in this folder
            words = shlex.split(line.replace("http://127.0.0.1:8080", sandbox.url).replace("hf:owner/name", "hf:hub"))
            arguments = [word for word in scaled(words[1:], policy) if not word.startswith("data.val_max_samples")]
            run_wheel(arguments, tmp_path)
    assert len(commands("docs/data.md")) > 10, "the page's commands were found"
    judged = lines(tmp_path / "runs" / "mbpp")[-1]
    assert judged["left_out/failed"] == 0
    assert judged["score/pass_fraction"] == 0.0
