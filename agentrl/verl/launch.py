"""verl's launch modules, and what each starts from here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PPO, DAPO, SEARCH_R1 = "ppo_trainer", "dapo_trainer", "search_r1_trainer"
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
OF_SEARCH_R1 = ("max_turns=", "do_search=", "retriever.", "data.max_start_length=", "data.max_obs_length=")
"""Beginnings of keys that only Search-R1's fork has, whose launch module has verl's own name."""
OWN_FOLDERS = ("config", "verl/trainer/config")
"""Folders of verl's own YAML files, which are ours here."""


def arguments(argv: Sequence[str], config_name: str) -> list[str]:
    """Return the command line for agentrl.train: with the YAML to start from, without verl's own folder of YAML.

    A command with keys of Search-R1's fork takes that fork's defaults.
    """
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, folder = word.partition("=")
        if flag in ("--config-path", "-cp"):
            folder = folder if equals else next(words, "")
            if Path(folder).is_dir() or Path(folder).as_posix().removeprefix("./") not in OWN_FOLDERS:
                kept += [flag, folder]
        else:
            kept.append(word)
    if any(word.partition("=")[0] in ("--config-name", "-cn") for word in kept):
        return kept
    if config_name == PPO and any(word.lstrip("+").startswith(OF_SEARCH_R1) for word in kept):
        config_name = SEARCH_R1
    return [f"--config-name={config_name}", *kept]


def run(config_name: str) -> int:
    """Train as the process's own command line says; return its exit status."""
    import sys

    from agentrl.train import main

    return main(arguments(sys.argv[1:], config_name))
