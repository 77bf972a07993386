"""Checkpoint writers by name, with the one of docs/extending.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
import torch

from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.state import StateWriterFactory, WorkerState
from agentrl.config import load_config
from agentrl.config.registries import CHECKPOINT_WRITERS
from agentrl.config.sections.trainer import CheckpointConfig
from agentrl.errors import CheckpointError, ConfigError
from tests.checkpoint.ranks_of_state import Part, same
from tests.conftest import PROJECT
from tests.naming import naming


@pytest.fixture
def one_file(tmp_path: Path) -> str:
    found = re.search(r"```python\n# my_writer\.py\n(.*?)```", (PROJECT / "docs/extending.md").read_text(), re.DOTALL)
    assert found
    (tmp_path / "my_writer.py").write_text(found.group(1))
    return f"{tmp_path}/my_writer.py:OneFile"


def test_the_writer_of_the_page_reads_exactly_what_it_wrote(one_file: str, tmp_path: Path) -> None:
    make = cast(StateWriterFactory, CHECKPOINT_WRITERS.get(one_file))
    part, other = Part(0, None), Part(1, None)
    part.learn()
    assert make(part.params, part.optim).save(tmp_path, {"lora_rank": 8}) == ["all.safetensors"]
    before = part.whole()
    part.learn()
    reader = make(other.params, other.optim)
    untouched = other.whole()
    with pytest.raises(CheckpointError, match="another model"):
        reader.load(tmp_path, {"lora_rank": 4})
    assert same(other.whole(), untouched)
    reader.load(tmp_path, {"lora_rank": 8})
    assert same(other.whole(), before) and not same(part.whole(), before)


def test_the_built_in_one_is_the_default() -> None:
    assert CHECKPOINT_WRITERS.get(CheckpointConfig().writer) is WorkerState
    with naming(ConfigError, "checkpoint.writer", "'pickle'", "unknown"):
        load_config(["actor_rollout_ref.actor.checkpoint.writer=pickle"])


def test_a_checkpoint_of_another_writer_is_refused(tmp_path: Path) -> None:
    def manager(writer: str) -> CheckpointManager:
        return CheckpointManager(tmp_path / "c", keep=None, fingerprint=CheckpointConfig(writer=writer).fingerprint)

    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(torch.zeros(2).numpy().tobytes())

    saved = manager("my_writer.py:OneFile").save(1, {"policy": write}, {})
    manager("my_writer.py:OneFile").load(saved)
    with naming(CheckpointError, "checkpoint.writer", '"my_writer.py:OneFile"'):
        manager("safetensors").load(saved)
