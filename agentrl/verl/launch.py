"""verl's launch modules, each with the command that it starts here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.verl.keys.rewrites import ROLLOUT
from agentrl.verl.keys.table import FIRST_NAMES
from agentrl.verl.keys.translation import first_keys, is_known

PPO, DAPO = "ppo_trainer", "dapo_trainer"
SEARCH_R1, VERL_AGENT = "search_r1_trainer", "verl_agent_trainer"
MEGATRON, FIRST = "ppo_megatron_trainer", "ppo_0_2_trainer"
FULLY_ASYNC, ONE_STEP_OFF = "fully_async_ppo_trainer", "one_step_off_ppo_trainer"
CONFIGS = {
    "verl.trainer.main_ppo": PPO,
    "verl.trainer.main_ppo_v0": PPO,
    "verl.trainer.main_ppo_sync": PPO,
    "verl.experimental.transfer_queue.main_ppo": PPO,
    "agentrl.verl.main_ppo": PPO,
    "recipe.dapo.main_dapo": DAPO,
    "recipe.dapo_transfer_queue.main_dapo": DAPO,
    "recipe.dapo.dapo_transfer_queue.main_dapo": DAPO,
    "agentrl.verl.main_dapo": DAPO,
    "verl.experimental.fully_async_policy.fully_async_main": FULLY_ASYNC,
    "recipe.fully_async_policy.fully_async_main": FULLY_ASYNC,
    "agentrl.verl.fully_async_main": FULLY_ASYNC,
    "verl.experimental.one_step_off_policy.main_ppo": ONE_STEP_OFF,
    "recipe.one_step_off_policy.main_ppo": ONE_STEP_OFF,
    "recipe.one_step_off_policy.async_main_ppo": ONE_STEP_OFF,
    "agentrl.verl.one_step_off_main": ONE_STEP_OFF,
}
"""The config that a launch module starts from, unless its command names another."""
OF_SEARCH_R1 = (
    "max_turns=",
    "do_search=",
    "retriever.",
    "data.max_start_length=",
    "data.max_obs_length=",
    f"{ROLLOUT}.n_agent=",
)
"""Beginnings of keys that only Search-R1's fork has, whose launch module has verl's own name."""
OF_VERL_AGENT = ("env.env_name=", "env.max_steps=", "env.rollout.n=", "algorithm.gigpo.")
"""Likewise of verl-agent, in which GiGPO was published."""
OF_FIRST_RELEASES = (
    *FIRST_NAMES,
    "actor_rollout_ref.actor.fsdp_config.grad_offload",
    "critic.model.fsdp_config.grad_offload",
    "trainer.val_generations_to_log_to_wandb",
    "trainer.remove_previous_ckpt_in_save",
)
"""Keys that show a command of verl's first releases: the first names of others, and keys that were removed later."""
OWN_FOLDERS = ("config", "verl/trainer/config")
"""Folders of verl's own YAML files, which are ours here."""


def arguments(argv: Sequence[str], config_name: str) -> list[str]:
    """Return the command line for agentrl.train: with the YAML to start from, without verl's own folder of YAML.

    A command with keys of Search-R1's fork or of verl-agent takes that fork's defaults, and one of verl's first
    releases theirs.
    """
    kept: list[str] = []
    folder = ""
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in ("--config-path", "-cp", "--config-name", "-cn"):
            value = value if equals else next(words, "")
        if flag in ("--config-name", "-cn"):
            config_name = value
        elif flag not in ("--config-path", "-cp"):
            kept.append(word)
        elif Path(value).is_dir() or Path(value).as_posix().removeprefix("./") not in OWN_FOLDERS:
            kept += [flag, value]
            folder = value
    name = config_name.removesuffix(".yaml")
    if not folder and name in (PPO, MEGATRON):
        if any(word.lstrip("+").startswith(OF_SEARCH_R1) for word in kept):
            config_name = SEARCH_R1
        elif any(word.lstrip("+").startswith(OF_VERL_AGENT) for word in kept):
            config_name = VERL_AGENT
        elif is_of_first_releases(kept):
            config_name = FIRST
            kept += ["model_engine=megatron"] if name == MEGATRON else []
    return [f"--config-name={config_name}", *kept]


def is_of_first_releases(words: Sequence[str]) -> bool:
    """Check whether a command has a key of verl's first releases alone, and no key that only later ones have.

    A key added by + shows nothing, as any release takes it.
    """
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    marks = [key for key in OF_FIRST_RELEASES if given.get(key) not in (None, "null")]
    later = (key for key in given if is_known(key) and key not in first_keys())
    return bool(marks) and not any(later)


def run(config_name: str) -> int:
    """Train as the process's own command line says; return its exit status."""
    import sys

    from agentrl.train import main

    return main(arguments(sys.argv[1:], config_name))
