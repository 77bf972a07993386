"""What is no folder of a model, and what the message says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.model.folder import check_folder


def test_a_file_is_no_model_and_gguf_is_named(tmp_path: Path) -> None:
    gguf, weights = tmp_path / "quantized" / "a.gguf", tmp_path / "model.safetensors"
    gguf.parent.mkdir()
    for file in (gguf, weights):
        file.touch()
    for given, said in ((gguf, "a.gguf is a file"), (gguf.parent, "it has no config.json"), (weights, "is a file")):
        with pytest.raises(ConfigError, match=said) as told:
            check_folder("actor_rollout_ref.model.path", str(given))
        assert ("GGUF holds quantized weights" in str(told.value)) == (given != weights)


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_no_model_and_their_key_is_named(tmp_path: Path, merged: bool) -> None:
    adapters = tmp_path / "policy" / "adapter"
    adapters.mkdir(parents=True)
    (adapters / "adapter_config.json").touch()
    if merged:
        (adapters.parent / "config.json").touch()
    with pytest.raises(ConfigError, match=r"it holds adapters.*as lora_adapter_path") as told:
        check_folder("actor_rollout_ref.model.path", str(adapters))
    assert (f"or name {adapters.parent}, which has them merged" in str(told.value)) == merged
