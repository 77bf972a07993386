"""The keys of vLLM servers, of fleets of both softwares, and of a reward model's servers."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from tests.config.loading import load

ROLLOUT = "actor_rollout_ref.rollout"
ATTACHED = f"{ROLLOUT}.server_urls=[http://node1:30000,http://node2:8000]"
MODEL = ["reward_model.enable=true", "reward_model.model.path=/rm", "reward_model.model.generative=true"]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.config.installed.is_installed", lambda package: False)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.config.installed.is_installed", lambda package: True)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([f"{ROLLOUT}.name=mixed"], "name=mixed needs .*server_urls.*servers that run already"),
        ([f"{ROLLOUT}.name=mixed", ATTACHED, f"{ROLLOUT}.num_servers=2"], "num_servers=2 has no effect"),
        (
            [f"{ROLLOUT}.name=mixed", ATTACHED, f"{ROLLOUT}.update_weights_checksum=true"],
            "update_weights_checksum=true with vLLM's servers needs .*update_weights_delta=true",
        ),
        (
            [f"{ROLLOUT}.name=vllm", ATTACHED, f"{ROLLOUT}.update_weights_checksum=true"],
            "update_weights_checksum=true with vLLM's servers needs .*update_weights_delta=true",
        ),
        ([*MODEL, "reward_model.rollout.name=vllm"], "reward_model.rollout.name=vllm starts vLLM servers.*setup-vllm"),
        ([*MODEL, "reward_model.rollout.name=trt"], "'sglang' or 'vllm'"),
        (
            [*MODEL, "reward_model.rollout.engine_kwargs.vllm={seed: 1}"],
            "engine_kwargs.vllm.* has no effect: it needs reward_model.rollout.name=vllm",
        ),
        (
            [*MODEL, "reward_model.rollout.name=vllm", "reward_model.rollout.engine_kwargs.vllm={port: 1}"],
            "engine_kwargs.vllm.*port.*agentrl's to choose",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        load(*words)


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("name", ["vllm", "mixed"])
def test_delta_weights_and_checksums_are_for_servers_of_either_software(name: str) -> None:
    both = [f"{ROLLOUT}.update_weights_delta=true", f"{ROLLOUT}.update_weights_checksum=true"]
    rollout = load(f"{ROLLOUT}.name={name}", ATTACHED, *both).actor_rollout_ref.rollout
    assert rollout.update_weights_delta and rollout.update_weights_checksum and rollout.serves


@pytest.mark.usefixtures("all_installed")
def test_a_reward_models_servers_may_be_vllms() -> None:
    own = "reward_model.rollout.engine_kwargs.vllm={max_logprobs: 30}"
    keys = load(*MODEL, "reward_model.rollout.name=vllm", own).reward_model.rollout
    assert (keys.name, keys.engine_kwargs.vllm) == ("vllm", {"max_logprobs": 30})
