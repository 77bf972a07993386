"""Mistakes in keys, YAML files, user code and rows are told before torch and transformers are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TRAIN = ["train", "data.train_files=good.parquet", "actor_rollout_ref.model.path=none"]
GENERATE = ["generate", "data.output_path=out.parquet", "model.path=none"]
MISTAKES = {
    "a key": ([*TRAIN, "trainer.sed=1"], "unknown key trainer.sed"),
    "a model": ([*TRAIN, "actor_rollout_ref.model.path=./gone"], "model.path: there is no folder ./gone"),
    "a run for a model": ([*TRAIN, "actor_rollout_ref.model.path=run"], "did you mean run/policy?"),
    "a model to learn": (["sft", "data.train_files=good.parquet", "model.path=runs/gone/policy"], "runs/gone/policy"),
    "a model to ask": ([*GENERATE, "data.path=good.parquet", "model.path=/gone"], "there is no folder /gone"),
    "a row": ([*TRAIN, "data.train_files=bad.parquet"], "bad.parquet, row 1"),
    "a row's agent": ([*TRAIN, "data.train_files=agent.parquet"], "unknown name 'nobody'"),
    "a row of validation": ([*TRAIN, "data.val_files=bad.parquet"], "bad.parquet, row 1"),
    "a batch": (TRAIN, "data.train_batch_size=32"),
    "tools": ([*TRAIN, f"{MULTI_TURN}.tool_config_path=tools.yaml"], "tools.yaml: tools[0]"),
    "interactions": ([*TRAIN, f"{MULTI_TURN}.interaction_config_path=interactions.yaml"], "interactions.yaml"),
    "loops": ([*TRAIN, "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml"], "loops.yaml"),
    "a scorer": ([*TRAIN, "custom_reward_function.path=reward.py"], "reward.py"),
    "an engine": ([*TRAIN, "actor_rollout_ref.rollout.name=reward.py:Engine"], "reward.py"),
    "a prompt": ([*GENERATE, "data.path=bad.parquet"], "bad.parquet, row 1"),
    "a transcript": (
        ["sft", "model.path=none", "data.train_files=bad.parquet", "data.messages_key=prompt"],
        "bad.parquet, row 1",
    ),
    "a response": (["evaluate", "data.path=good.parquet"], "good.parquet"),
}
"""Arguments, and what the message says."""

PROGRAM = """
import contextlib, importlib, io, json, sys
found = {}
for name, arguments in json.load(sys.stdin).items():
    message = io.StringIO()
    with contextlib.redirect_stderr(message), contextlib.redirect_stdout(io.StringIO()):
        status = importlib.import_module(f"agentrl.{arguments[0]}").main(arguments[1:])
    found[name] = [status, message.getvalue(), [one for one in ("torch", "transformers") if one in sys.modules]]
json.dump(found, sys.stdout)
"""


def test_no_mistake_waits_for_torch(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    rows = {
        "good": [{"prompt": messages, "data_source": "gsm8k"}],
        "bad": [{"prompt": messages, "data_source": "gsm8k"}, {"prompt": [], "data_source": "gsm8k"}],
        "agent": [{"prompt": messages, "data_source": "gsm8k", "agent_name": "nobody"}],
    }
    for name, content in rows.items():
        pq.write_table(pa.Table.from_pylist(content), tmp_path / f"{name}.parquet")
    (tmp_path / "run/policy").mkdir(parents=True)
    (tmp_path / "run/policy/config.json").write_text("{}")
    (tmp_path / "tools.yaml").write_text("tools: [{class_nam: x.Y}]")
    (tmp_path / "interactions.yaml").write_text("interaction: [{class_nam: x.Y}]")
    (tmp_path / "loops.yaml").write_text("- {name: mine, _target_: x.Y}")
    (tmp_path / "reward.py").write_text("def compute_score(:\n")
    asked = {name: arguments for name, (arguments, _) in MISTAKES.items()}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(asked), capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for name, (status, message, imported) in json.loads(done.stdout).items():
        assert (status, imported) == (2, []), (name, message)
        assert MISTAKES[name][1] in message, name
    assert not (tmp_path / "runs").exists()
