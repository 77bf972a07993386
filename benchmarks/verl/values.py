"""Values that releases of verl compose of a command: its words over the defaults of the release's YAML."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path

from agentrl.system.json_value import JSON
from benchmarks.verl.release_steps import ACTOR, ROLLOUT, Release

DEFAULTS = Path(__file__).parents[2] / "tests" / "verl" / "defaults.csv"
FIRST: dict[str, JSON] = {
    "data.train_batch_size": 1024,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.entropy_coeff": 0.001,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    "critic.optim.lr": 1e-5,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "trainer.test_freq": -1,
}
"""Defaults of verl 0.2 for the keys that its formulas read; Search-R1's fork has the same."""


@cache
def main_defaults() -> dict[str, JSON]:
    with DEFAULTS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if "0.9.1/fsdp" in row["trainers"].split()]
    return {row["key"]: json.loads(row["default"]) for row in rows}


def values_of(words: list[str], release: Release) -> dict[str, JSON]:
    """The values that verl composes of a command."""
    values = dict(main_defaults() if release == "main" else FIRST | {f"{ROLLOUT}.n_agent": 1})
    given: dict[str, JSON] = {}
    for word in words:
        key, _, text = word.lstrip("+").partition("=")
        try:
            given[key] = json.loads(text.lower() if text in ("True", "False") else text)
        except json.JSONDecodeError:
            given[key] = text
    values |= given
    if "critic.ppo_mini_batch_size" not in given:
        values["critic.ppo_mini_batch_size"] = values[f"{ACTOR}.ppo_mini_batch_size"]
    return values
