"""Writes the keys that verl's releases, its recipes and Search-R1's fork have, for agentrl/verl/keys/known_keys.txt.

Each CLONE is a folder with a release of verl (a fork), or with recipes beside it; the trainers' YAML of all of them is
composed. A key whose value may get keys of its own (an empty mapping, or null) is followed by `.*`.

    python -m benchmarks.verl.known_keys VERL_0.9 VERL_0.7.1 RECIPES ... > agentrl/verl/keys/known_keys.txt
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.verl.composed import TRAINERS, composed

ENGINES = ("megatron", "veomni", "torchtitan", "mindspeed", "automodel")
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
IN_NO_YAML = (
    *(f"{role}.fsdp_config.{name}.*" for role in (ACTOR, REF) for name in ("mixed_precision", "turbo_config")),
    "critic.model.fsdp_config.mixed_precision.*",
    "critic.fsdp_config.*",
    f"{ACTOR}.engine.*",
    f"{ACTOR}.model_engine",
    "actor_rollout_ref.model.lora.fully_sharded_loras",
    f"{ROLLOUT}.engine_kwargs.dynamo.*",
    f"{ROLLOUT}.server.*",
    "distillation.teacher_models.*",
    "ray_kwargs.ray_init.runtime_env.env_vars.*",
    "reward.custom_reward_function.reward_kwargs.*",
    "reward.reward_kwargs.*",
    "reward_model.reward_kwargs.*",
    "trainer.worker_env.*",
)
"""Keys that verl's code reads and commands add by `+`."""


def trainers(clone: Path) -> list[Path]:
    """List the YAML files of a clone that make the config of a trainer."""
    found = []
    for path in sorted(clone.rglob("*.yaml")):
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError:
            continue
        if isinstance(tree, dict) and "trainer" in path.stem and {"actor_rollout_ref", "defaults"} & tree.keys():
            found.append(path)
    return found


def keys_of(clones: Sequence[Path]) -> set[str]:
    """Compose every trainer's config of every clone; each file that cannot be is named on the standard error."""
    found: set[str] = set(IN_NO_YAML)
    for clone in clones:
        base = clone if (clone / TRAINERS).is_dir() else clones[0]
        for path in trainers(clone):
            for overrides in ([], *([f"model_engine={engine}"] for engine in ENGINES)):
                try:
                    values = composed(base, path.parent, path.stem, overrides)
                except Exception as error:
                    if not overrides:
                        print(f"{path}: {str(error).splitlines()[0]}", file=sys.stderr)
                    continue
                found |= {f"{key}.*" if value in (None, {}) else key for key, value in values.items()}
    return {key for key in found if f"{key}.*" not in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", nargs="+", type=Path, metavar="CLONE")
    print("\n".join(sorted(keys_of(parser.parse_args().clones))))


if __name__ == "__main__":
    main()
