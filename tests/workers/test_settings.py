"""A key of the section is where the worker reads it, without being passed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from agentrl.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig
from agentrl.config.sections.parallel import ActorFSDPConfig
from agentrl.config.sections.sft import PreferencesConfig, SFTConfig, TuningConfig
from agentrl.workers import CriticWorker, PolicyWorker
from agentrl.workers.backend import PolicySettings, Settings
from agentrl.workers.sft import policy_settings
from tests.workers.made import config_of

CHANGED = ActorConfig.model_validate(
    {
        "optim": {"lr": 0.5},
        "grad_clip": 0.5,
        "ppo_max_token_len_per_gpu": 77,
        "ulysses_sequence_parallel_size": 2,
        "freeze_vision_tower": True,
        "use_torch_compile": True,
        "router_replay": {"mode": "R2"},
        "fsdp_config": {"param_offload": True},
        "checkpoint": {"writer": "mine"},
    }
)
"""Values other than the defaults, of each key that a name of `Settings` stands for."""


class Made(Exception):
    """Has the settings that a backend was to be made of."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings


def refusing(settings: Settings) -> Any:
    """A backend of a user's that shows what it is given."""
    raise Made(settings)


def settings_of(make: Any) -> Any:
    with pytest.raises(Made) as made:
        make()
    return made.value.settings


def test_the_policys_backend_is_given_the_section_itself() -> None:
    actor = CHANGED.model_copy(update={"strategy": f"{__name__}:refusing"})
    config = config_of(ModelConfig(path="some/model"), actor, seed=3, temperature=0.5, critic_warmup=4)
    settings = settings_of(lambda: PolicyWorker(config, device="cpu", total_steps=10))
    assert settings.section is config.actor_rollout_ref.actor and settings.model is config.actor_rollout_ref.model
    assert (settings.total_steps, settings.seed, settings.temperature) == (6, 3, 0.5)


def test_the_critics_backend_is_given_its_own_keys_over_the_actors() -> None:
    critic = CriticConfig(strategy=f"{__name__}:refusing", grad_clip=0.25, path="a/critic")
    config = config_of(ModelConfig(path="some/model", override_config={"x": 1}), CHANGED, critic)
    settings = settings_of(lambda: CriticWorker(config, device="cpu", total_steps=10))
    assert settings.section == critic.over(CHANGED)
    assert (settings.grad_clip, settings.checkpoint_writer, settings.param_offload) == (0.25, "mine", True)
    assert (settings.model.path, settings.model.override_config) == ("a/critic", {})


@pytest.mark.parametrize("name", sorted(set(ActorConfig.model_fields) - {"fsdp_config"}))
def test_each_key_of_the_actor_is_the_critics_where_it_has_no_own(name: str) -> None:
    shared, own = object(), object()
    actor, critic = ActorConfig().model_copy(update={name: shared}), CriticConfig()
    if name in CriticConfig.model_fields:
        assert getattr(critic.model_copy(update={name: own}).over(actor), name) is own
        critic = critic.model_copy(update={name: None})
    assert getattr(critic.over(actor), name) is shared


def test_the_critics_ranks_are_its_own() -> None:
    actor = ActorConfig(fsdp_config=ActorFSDPConfig(fsdp_size=8, param_offload=True), ulysses_sequence_parallel_size=4)
    critic = CriticConfig.model_validate({"model": {"fsdp_config": {"fsdp_size": 2, "tensor_parallel_size": 2}}})
    section = critic.over(actor)
    assert section.parallel == critic.parallel and section.fsdp_config.param_offload
    assert (section.fsdp_config.fsdp_size, section.fsdp_config.tensor_parallel_size) == (2, 2)


NAMES = [name for name, value in vars(PolicySettings).items() if isinstance(value, property)]
NAMES += [name for name, value in vars(Settings).items() if isinstance(value, property)]


@pytest.mark.parametrize("name", NAMES)
def test_each_name_of_the_settings_is_a_key_of_the_section(name: str) -> None:
    """A name that does not follow its section would leave a key without effect."""

    def value(section: ActorConfig) -> object:
        settings = PolicySettings(section=section, model=ModelConfig(path="m"), device="cpu", total_steps=1, seed=1)
        found: object = getattr(settings, name)
        return found

    assert value(CHANGED) != value(ActorConfig())


@pytest.mark.parametrize(("kind", "data"), [(SFTConfig, {}), (PreferencesConfig, {})])
def test_a_training_from_files_learns_by_the_same_names(kind: type[TuningConfig], data: Mapping[str, object]) -> None:
    given: dict[str, Any] = {
        "data": {"train_files": "a.parquet", "max_token_len_per_gpu": 77, "seed": 5, **data},
        "model": {"path": "m", "fsdp_config": {"param_offload": True, "fsdp_size": 2}},
        "optim": {"lr": 0.5},
        "grad_clip": 0.25,
        "ulysses_sequence_parallel_size": 2,
        "trainer": {"checkpoint": {"writer": "mine"}},
    }
    config = kind.model_validate(given)
    settings = policy_settings(config, "cpu", 10)
    for name in set(ActorConfig.model_fields) & set(TuningConfig.model_fields):
        assert getattr(settings.section, name) == getattr(config, name), name
    assert settings.parallel == config.parallel and settings.max_tokens == 77
    assert (settings.param_offload, settings.checkpoint_writer, settings.seed) == (True, "mine", 5)
    assert settings.optim == OptimConfig.model_validate({**config.optim.model_dump(), "lr": 0.5})
