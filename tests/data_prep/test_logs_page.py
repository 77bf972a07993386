"""The commands of docs/logs.md run as shown, on a log of a few sessions."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.quickstart.tiny_policy import make_tiny_policy
from tests.data_prep.test_log_rows import file
from tests.data_prep.test_trace_sessions import call
from tests.data_prep.test_traces import written
from tests.e2e.test_docs import SMALL, blocks, commands, scaled
from tests.e2e.test_log_rows import conversation
from tests.e2e.test_train import lines
from tests.offline.test_rescoring import Judge, judge
from tests.wheel import Run

__all__ = ["judge"]
PAGE = "docs/logs.md"


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(600)
def test_the_commands_that_join_logs(run_wheel: Run, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    records = [call(f"of EMP-12345{number}", "1", session=f"s{number}", feedback=number % 2) for number in range(10)]
    (tmp_path / "logs" / "may.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (rules,) = (text for text in blocks(PAGE, "yaml") if text.startswith("# rules.yaml"))
    (tmp_path / "rules.yaml").write_text(rules)
    ran = [line for line in commands(PAGE) if "data_prep.traces" in line]
    for line in ran:
        run_wheel(shlex.split(line)[1:], tmp_path)
    assert len(ran) == 2 and len(written(tmp_path / "data" / "logs")) == 9
    assert len(written(tmp_path / "data" / "logs", "held_out")) == 1
    assert written(tmp_path / "data" / "scrubbed")[0]["messages"][1]["content"] == "of [EMPLOYEE_1]"


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(600)
def test_the_commands_that_learn_from_feedback(run_wheel: Run, tmp_path: Path) -> None:
    policy = make_tiny_policy(tmp_path / "policy", seed=3)
    (tmp_path / "data" / "logs").mkdir(parents=True)
    for name, count in (("conversations", 8), ("held_out", 4)):
        rows = [{"messages": json.dumps(said(number)), "feedback": (1.0, -1.0)[number % 2]} for number in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "logs" / f"{name}.parquet")
    ran = [line for line in commands(PAGE) if "agentrl.sft" in line or "agentrl.preferences" in line]
    for line in ran:
        words = scaled(shlex.split(line)[1:], policy)
        run_wheel([*words, *(["data.train_batch_size=2"] if "loss=kto" in words else [])], tmp_path)
    assert len(ran) == 2
    measured = [line for line in lines(tmp_path / "runs" / "logs-kto") if "val/auc" in line]
    assert [line["step"] for line in measured] == [0, 4] and measured[0]["val/auc"] == 0.5


def said(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number} + 1?"}, {"role": "assistant", "content": f"{number + 1}"}]


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(600)
def test_the_commands_that_learn_from_rewards(
    run_wheel: Run, policy_dir: Path, judge: tuple[type[Judge], list[str]], tmp_path: Path
) -> None:
    logs = tmp_path / "data" / "logs"
    logs.mkdir(parents=True)
    file(logs, *(conversation(number, good=number % 4 > 0) for number in range(12)))
    file(logs, *(conversation(number, good=True) for number in range(20, 23)), name="held_out.parquet")
    ran = []
    for line in commands(PAGE):
        words = scaled(shlex.split(line.replace("runs/logs-kto/policy", str(policy_dir)))[1:], policy_dir)
        own = any("data/rl" in word or "data/judged" in word or "after." in word for word in words)
        if not own:
            continue
        if any("judge.base_url" in word for word in words):
            words = [*(word for word in words if "val_max_samples" not in word), *judge[1][:2]]
        if "agentrl.generate" in words:
            words += [word for word in SMALL if "_length" in word]
        run_wheel(words, tmp_path)
        ran.append(words[1])
    assert ran == [
        *("data_prep.log_rows", "agentrl.train", "data_prep.log_rows", "agentrl.train"),
        *("agentrl.generate", "agentrl.evaluate"),
    ]
    assert judge[0].judged, "the judge was asked"
    assert json.loads((tmp_path / "after.json").read_text())["all"]["responses"] == 12
