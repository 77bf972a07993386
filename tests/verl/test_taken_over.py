"""What a checkpoint of verl's is good for, and what is said of the rest."""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.model.folder import check_folder
from agentrl.verl.launch import CONFIGS
from tests.naming import naming

PROJECT = Path(__file__).resolve().parents[2]


def test_a_checkpoint_of_verls_is_told_how_it_becomes_a_model(tmp_path: Path) -> None:
    actor = tmp_path / "global_step_10" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text("{}")
    (actor / "model_world_size_2_rank_0.pt").write_bytes(b"\x80\x04.")
    with naming(ConfigError, "actor/huggingface"):
        check_folder("actor_rollout_ref.model.path", str(actor))
    with naming(ConfigError, "verl.model_merger", actor):
        check_folder("actor_rollout_ref.model.path", str(actor / "huggingface"))
    (actor / "huggingface" / "model.safetensors").touch()
    check_folder("actor_rollout_ref.model.path", str(actor / "huggingface"))


def test_no_document_asks_for_a_command_of_verls_but_those_that_run_here() -> None:
    """Commands of ours are run by tests; another project's cannot be, so none of its is told."""
    named = {
        (path.name, module)
        for path in sorted((PROJECT / "docs").glob("*.md"))
        for module in re.findall(r"-m ((?:verl|recipe)\.[\w.]+)", path.read_text(encoding="utf-8"))
    }
    assert named and {module for _, module in named} <= CONFIGS.keys(), named
