"""Frozen adapters of a config: found before a server starts, and refused by name where servers cannot serve them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.config import load_config
from agentrl.config.adapters import most_adapters
from agentrl.config.sections.offline import GenerateConfig
from agentrl.config.sections.training import Config
from agentrl.engines.contract import SamplingParams
from agentrl.engines.recorded import request_key
from agentrl.engines.servers.adapters import find_frozen_adapters
from agentrl.engines.servers.client import ServerInfo
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.sglang.build import check as check_sglang
from agentrl.engines.vllm.build import check as check_vllm
from agentrl.errors import ConfigError
from agentrl.model.lora import CONFIG, WEIGHTS
from tests.naming import naming

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
FACTS = ModelFacts(100, {"model.layers.0.self_attn.q_proj.weight": (6, 8)})


def adapter(folder: Path, rank: int = 2, layer: str = LAYER, wide: int = 8, **keys: object) -> Path:
    """Write an adapter of one layer as peft does."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "base_model_name_or_path": "base", **keys}
    (folder / CONFIG).write_text(json.dumps(config))
    tensors = {f"{layer}.lora_A.weight": torch.zeros(rank, wide), f"{layer}.lora_B.weight": torch.zeros(6, rank)}
    save_file(tensors, folder / WEIGHTS)
    return folder


def config_of(*folders: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr("agentrl.config.installed.is_installed", lambda _: True)
    players = ", ".join(f"r{number}: {{policy: p{number}, adapter: {path}}}" for number, path in enumerate(folders))
    config = load_config(
        [
            "actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.model.path=base",
            "actor_rollout_ref.model.lora_rank=4",
            "actor_rollout_ref.model.lora_merge=false",
            f"actor_rollout_ref.rollout.roles={{own: {{}}, {players}}}",
        ]
    )
    assert isinstance(config, Config)
    return config


def test_they_are_found_by_name_and_another_base_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [adapter(tmp_path / "a"), adapter(tmp_path / "b", 4, base_model_name_or_path="other")]
    said: list[str] = []
    config = config_of(*folders, monkeypatch=monkeypatch)
    found = find_frozen_adapters(config, FACTS, said.append)
    assert found == {"p0": folders[0], "p1": folders[1]} and most_adapters(found) == 4
    assert len(said) == 1 and said[0].endswith("it was made for other, and plays on base")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rank": 8}, "has r=8, and servers serve adapters up to the policy's lora_rank=4"),
        ({"use_dora": True}, "has use_dora=True; only plain LoRA"),
        ({"peft_type": "IA3"}, "has peft_type=IA3; only plain LoRA"),
        ({"peft_type": None}, "has peft_type=None; only plain LoRA"),
        ({"layer": "base_model.model.model.layers.0.mlp.router"}, "servers run no adapters of router"),
        ({"layer": LAYER.replace("0", "9")}, "another base: it adapts model.layers.9.*no such weight"),
        ({"wide": 10}, r"another base: it adapts .*of shape \(6, 10\), and the model has \(6, 8\)"),
    ],
)
def test_those_that_servers_cannot_serve_are_refused(
    keys: dict[str, object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path / "odd", **keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"rollout.roles: adapter=.*/odd: .*{says}"):
        find_frozen_adapters(config_of(folder, monkeypatch=monkeypatch), FACTS, print)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled: list[tuple[Callable[[Path], object], str]] = [
        (lambda path: (path / CONFIG).unlink(), f"{CONFIG} cannot be read"),
        (lambda path: (path / WEIGHTS).unlink(), f"{WEIGHTS} cannot be read"),
        (lambda path: (path / WEIGHTS).write_bytes(b"x" * 99), f"{WEIGHTS} cannot be read"),
        (lambda path: save_file({"lora": torch.zeros(1)}, path / WEIGHTS), "lora: expected matrices"),
        (lambda path: save_file({f"{LAYER}.lora_A.weight": torch.zeros(2, 8)}, path / WEIGHTS), "expected matrices"),
    ]
    for number, (spoil, says) in enumerate(spoiled):
        folder = adapter(tmp_path / str(number))
        spoil(folder)
        with pytest.raises(ConfigError, match=says):
            find_frozen_adapters(config_of(folder, monkeypatch=monkeypatch), FACTS, print)


def test_nothing_else_than_a_training_serves_them(tmp_path: Path) -> None:
    roles = f"{{own: {{}}, other: {{policy: old, adapter: {adapter(tmp_path / 'a')}}}}}"
    keys = ["data.path=rows.parquet", "data.output_path=out", "actor_rollout_ref.model.path=base"]
    given = [*keys, f"actor_rollout_ref.rollout.roles={roles}"]
    with naming(ConfigError, "roles:", "old", "base_url"):
        load_config(given, "generate", GenerateConfig)


@pytest.mark.parametrize(
    ("check", "flags"),
    [
        (check_sglang, "--enable-lora --max-lora-rank 4 --max-loras-per-batch 3 "),
        (check_vllm, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank 8 --max-loras 3 "),
    ],
)
def test_a_server_without_adapters_is_refused_with_its_arguments(
    check: Callable[[ServerInfo, str, Config], None],
    flags: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(adapter(tmp_path / "a"), monkeypatch=monkeypatch)
    info = ServerInfo("base", None, 4096, 1, "0", True, True, "cpu")
    with naming(ConfigError, "http://here", "rank 4", flags):
        check(info, "http://here", config)
    check(replace(info, max_lora_rank=8), "http://here", config)


def test_a_journal_tells_adapters_apart() -> None:
    """The keys of requests to the policy are those of journals that were written before adapters had names."""
    plain = SamplingParams(8, seed=3)
    assert request_key([1, 2], plain, ()) == "9801e76be7d25720f33768e8c15dc3ce"
    keys = {request_key([1, 2], SamplingParams(8, seed=3, adapter=name), ()) for name in (None, "a", "b")}
    assert len(keys) == 3
