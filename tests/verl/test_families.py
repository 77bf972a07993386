"""The families of verl's trainers that the package has, against the YAML of their own releases and forks."""

from __future__ import annotations

from functools import cache

import pytest
from omegaconf import OmegaConf

from agentrl.config import Config
from agentrl.config.command_line import parse_command_line
from agentrl.config.keys import defaults, flatten, leaf_keys, nested
from agentrl.config.load import compose_keys, without_hydra
from agentrl.system.json_value import JSON
from agentrl.verl.keys.families import CONFIGS, FAMILY
from agentrl.verl.keys.rewrites import ACTOR, CORRECTION, MANAGERS, MODEL, ROLLOUT, TURNS
from agentrl.verl.keys.translation import translate
from tests.verl.test_table import defaults_of

pytestmark = pytest.mark.usefixtures("sglang_installed")
THEIRS = {
    "ppo_trainer": ["0.9.1/fsdp"],
    "ppo_megatron_trainer": ["0.9.1/megatron"],
    "ppo_0_2_trainer": ["0.2/fsdp"],
    "search_r1_trainer": ["search-r1/fsdp"],
    "verl_agent_trainer": ["verl-agent/fsdp"],
    "dapo_trainer": ["0.9.1/fsdp", "dapo/fsdp"],
    "dapo_megatron_trainer": ["0.9.1/megatron", "dapo/megatron"],
    "dapo_transfer_queue_trainer": ["dapo-transfer-queue/megatron"],
    "fully_async_ppo_trainer": ["0.9.1/fsdp", "fully-async/fsdp"],
    "fully_async_ppo_megatron_trainer": ["0.9.1/megatron", "fully-async/megatron"],
    "one_step_off_ppo_trainer": ["0.9.1/fsdp", "one-step-off/fsdp"],
    "one_step_off_ppo_megatron_trainer": ["0.9.1/megatron", "one-step-off/megatron"],
    "transfer_queue_ppo_trainer": ["transfer-queue/fsdp"],
    "transfer_queue_ppo_megatron_trainer": ["transfer-queue/megatron"],
}
"""The composed YAML of each family's own release or fork, in `defaults.csv`; later ones go over earlier ones."""


@cache
def composed(family: str, *words: str) -> dict[str, JSON]:
    """Compose our YAML of a family, as the start does."""
    keys = compose_keys(parse_command_line([f"--config-name={family}", *words], family, Config), Config)
    assert keys.tree is not None
    tree = OmegaConf.to_container(without_hydra(keys.tree), resolve=True)
    return flatten(tree, leaf_keys(Config))  # type: ignore[arg-type]


def of_their_yaml(family: str) -> dict[str, JSON]:
    """Return the values of the family's own YAML, with verl's choice of the code that reads them."""
    found: dict[str, JSON] = {}
    for trainer in THEIRS[family]:
        found |= defaults_of(trainer)
    return flatten(nested(found), leaf_keys(Config))


def values_of(given: dict[str, JSON]) -> dict[str, JSON]:
    """Return the values of our keys that a config in verl's keys comes to, and the keys that are refused in it."""
    found = translate(given, Config)
    refused: dict[str, JSON] = {f"refused: {key}": True for key in found.unsupported}
    unknown: dict[str, JSON] = {f"unknown: {key}": True for key in found.strangers}
    return flatten(defaults(Config), leaf_keys(Config)) | found.values | refused | unknown


SWITCHES: dict[str, dict[str, JSON]] = {
    "nothing else": {},
    "LoRA": {f"{MODEL}.lora_rank": 8},
    "LoRA by Megatron's key": {f"{MODEL}.lora.rank": 8},
    "KL in the reward": {"algorithm.use_kl_in_reward": True},
    "KL in the loss": {f"{ACTOR}.use_kl_loss": True},
    "gigpo": {"algorithm.adv_estimator": "gigpo", f"{ACTOR}.use_invalid_action_penalty": False},
    "groups": {"algorithm.filter_groups.enable": True},
    "validation by sampling": {f"{ROLLOUT}.val_kwargs.temperature": 0.6},
    "tools": {f"{TURNS}.tool_config_path": "tools.yaml"},
    "an environment": {f"{TURNS}.interaction_config_path": "talks.yaml"},
    "DAPO's penalty": {
        **dict.fromkeys(MANAGERS, "dapo"),
        "reward_model.overlong_buffer.enable": True,
        "reward.reward_kwargs.overlong_buffer_cfg.enable": True,
    },
    "importance weights": {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_rs": "token_k2"},
    "a course of the rate": {f"{ACTOR}.optim.lr_scheduler_type": "cosine", f"{ACTOR}.optim.warmup_style": "cosine"},
    "a reward model": {"reward_model.enable": True, "reward_model.model.path": "judge"},
    "a teacher": {"distillation.enabled": True, "distillation.teacher_models.teacher_model.model_path": "teacher"},
}
"""Keys that decide whether others are read: a default that only they make count must be the family's, too."""
APART = {
    "trainer.device": "auto, so that a command runs on a CPU, too",
    "critic.strategy": "FSDP2 for all engines",
    f"{MODEL}.target_modules": "Megatron's names of all linear layers",
    f"{ROLLOUT}.update_weights_bucket_megabytes": "the way of the weights to the engine",
    f"{ROLLOUT}.engine_kwargs.sglang": "a null is SGLang's own default",
    "actor_rollout_ref.hybrid_engine": "false marks the asynchronous mains, which do not read it",
}
"""Keys of ours and of verl's that may differ from a family's own YAML, with the reason."""


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("family", THEIRS)
@pytest.mark.slice(20, "matrix")
def test_the_defaults_of_a_family_are_those_of_its_own_yaml(family: str, switch: str) -> None:
    """Each value of the family's own YAML is written over ours: nothing that decides the training may change."""
    ours = composed(family) | SWITCHES[switch]
    own = {
        key: value for key, value in of_their_yaml(family).items() if key not in APART and key not in SWITCHES[switch]
    }
    mine, theirs = values_of(ours), values_of(ours | own)
    keys = [key for key in sorted(mine | theirs) if key not in APART and not key.startswith("refused: env.")]
    assert {key: (mine.get(key), theirs.get(key)) for key in keys if mine.get(key) != theirs.get(key)} == {}


def test_every_family_is_compared() -> None:
    assert set(THEIRS) == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert translate({FAMILY: "no_such_trainer"}, Config).strangers == [FAMILY]
    for family in THEIRS:
        assert composed(family).get(FAMILY, family) == family
