"""The quickstart's assets: what `quickstart` stands for, and a policy that is made once and used again."""

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.chat import Chat
from agentrl.config import Config, load_config
from agentrl.observe.display import Display
from agentrl.observe.plain import PlainDisplay
from agentrl.quickstart.assets import make_policy, with_quickstart_data
from agentrl.quickstart.tiny_policy import make_tiny_policy
from data_prep.quickstart import Recipe, make

SMALL = Recipe(seed=1, train_rows=9, val_rows=3, good_rows=96, flawed_rows=32)
TURNS = "actor_rollout_ref.rollout.multi_turn"


@pytest.fixture
def display() -> Display:
    return PlainDisplay("test", io.StringIO())


def config_in(directory: Path, *overrides: str) -> Config:
    return load_config([f"quickstart.dir={directory}", *overrides])


def test_paths_take_the_place_of_quickstart(tmp_path: Path, display: Display) -> None:
    policy = make_tiny_policy(tmp_path / "tiny", seed=1)
    overrides = (f"actor_rollout_ref.model.path={policy}", "quickstart.train_rows=12", "quickstart.val_rows=3")
    config = with_quickstart_data(config_in(tmp_path / "assets", *overrides), display)
    assert config.data.train_files == str(tmp_path / "assets" / "train.parquet")
    assert config.data.val_files == str(tmp_path / "assets" / "val.parquet")
    assert config.actor_rollout_ref.model.path == str(policy)
    assert config.actor_rollout_ref.rollout.multi_turn.tool_config_path == str(tmp_path / "assets" / "tools.yaml")
    assert pq.read_metadata(tmp_path / "assets" / "train.parquet").num_rows == 12
    assert not (tmp_path / "assets" / "warmed-up").exists()


def test_other_tools_than_the_quickstarts_are_kept(tmp_path: Path, display: Display) -> None:
    policy = make_tiny_policy(tmp_path / "tiny", seed=1)
    config = config_in(
        tmp_path, f"actor_rollout_ref.model.path={policy}", f"{TURNS}.tool_config_path=tools/calculator.yaml"
    )
    assert (
        with_quickstart_data(config, display).actor_rollout_ref.rollout.multi_turn
        == config.actor_rollout_ref.rollout.multi_turn
    )


def test_a_config_without_quickstart_is_left_alone(tmp_path: Path, display: Display) -> None:
    (tmp_path / "train.parquet").write_bytes(b"")
    config = load_config([f"data.train_files={tmp_path}/train.parquet", f"actor_rollout_ref.model.path={tmp_path}"])
    assert with_quickstart_data(config, display) is config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.parquet"]


def test_the_policy_learns_is_used_again_and_is_made_anew_for_other_data(tmp_path: Path) -> None:
    said = io.StringIO()
    display = PlainDisplay("test", said)
    keys = config_in(tmp_path).quickstart
    make(tmp_path, SMALL, lambda line: None)
    make_policy(tmp_path, keys, "cpu", display)
    weights = tmp_path / "warmed-up" / "model.safetensors"
    first = weights.read_bytes()
    losses = [
        json.loads(line)["sft/loss"] for line in (tmp_path / "warm-up" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 1.0

    time = weights.stat().st_mtime_ns
    make_policy(tmp_path, keys, "cpu", display)
    assert weights.stat().st_mtime_ns == time
    assert "used again" in said.getvalue()

    make(tmp_path, Recipe(1, 9, 3, 96, 64), lambda line: None)
    make_policy(tmp_path, keys, "cpu", display)
    assert weights.read_bytes() != first
    make(tmp_path, SMALL, lambda line: None)
    make_policy(tmp_path, keys, "cpu", display)
    assert weights.read_bytes() == first


def test_the_vocabulary_is_the_tasks_own(tmp_path: Path, display: Display) -> None:
    make(tmp_path, SMALL, lambda line: None)
    make_policy(tmp_path, config_in(tmp_path).quickstart, "cpu", display)
    chat = Chat.from_pretrained(str(tmp_path / "warmed-up"))
    row = pq.read_table(tmp_path / "val.parquet").to_pylist()[1]
    tools = json.loads(pq.read_table(tmp_path / "sft.parquet", columns=["tools"])[0][0].as_py())
    assert len(chat.render(row["prompt"], tools)) < 75
    words = {chat.decode([token]) for token in range(chat.vocab_size)}
    assert {"calculator", "search", "expression", "query", " of"} <= words
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "warmed-up")
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == 1 << 16  # docs/agents/claude_code.md, Tasks of your own
