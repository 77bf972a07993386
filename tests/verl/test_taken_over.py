"""What a checkpoint of verl's is good for, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.model.folder import check_folder


def test_a_checkpoint_of_verls_is_told_how_it_becomes_a_model(tmp_path: Path) -> None:
    actor = tmp_path / "global_step_10" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text("{}")
    (actor / "model_world_size_2_rank_0.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match=r"did you mean .*actor/huggingface\?"):
        check_folder("actor_rollout_ref.model.path", str(actor))
    with pytest.raises(ConfigError, match=rf"are pickles, .*model_merger merge --backend fsdp --local_dir {actor} "):
        check_folder("actor_rollout_ref.model.path", str(actor / "huggingface"))
    (actor / "huggingface" / "model.safetensors").touch()
    check_folder("actor_rollout_ref.model.path", str(actor / "huggingface"))
