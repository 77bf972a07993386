"""What is no folder of a model, and what the message says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from agentrl.errors import ConfigError
from agentrl.model.folder import HUB_TRIES, check_folder
from tests.naming import naming
from tests.observe.fake_hub import fake_hub


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
    with naming(ConfigError, "lora_adapter_path") as told:
        check_folder("actor_rollout_ref.model.path", str(adapters))
    assert (f"or name {adapters.parent}, which has them merged" in str(told.value)) == merged


def test_a_hub_that_does_not_answer_is_named_within_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unused_tcp_port: int
) -> None:
    """It would be asked for each file of the model, for a minute and a half in all."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused_tcp_port}")
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    with naming(ConfigError, "owner/name", str(unused_tcp_port)):
        check_folder("actor_rollout_ref.model.path", "owner/name")
    assert len(pauses) == HUB_TRIES - 1
    with fake_hub("owner/name", tmp_path) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        check_folder("actor_rollout_ref.model.path", "owner/name")
    assert len(pauses) == HUB_TRIES - 1
