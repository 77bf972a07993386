"""A thousand clean steps with the default thresholds: alarms by severity, and how often each check compared something.

    python -m benchmarks.training.clean_steps --out runs/clean
    python -m benchmarks.training.clean_steps --out runs/clean --pretrained FOLDER --data FOLDER --only pretrained
    .venv-sglang/bin/python -m benchmarks.training.clean_steps --out runs/clean --only sglang "sglang, ahead"

Each arrangement is a sound training. What is in the folder of --out is not run again, so that a soak can be spread over
hours and environments; the table is of all of it. Exits 1 on an alarm of severity fault, and where a check never
compared anything: its silence shows nothing. Arrangements that were not run are named.

--pretrained: a model that was pretrained and calls the quickstart's tools. --data: a folder of data_prep.quickstart.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.checks.finding import MEANINGS
from agentrl.checks.runner import ALARMS_FILE
from agentrl.train import training

ROLES, CORRECTION = "actor_rollout_ref", "algorithm.rollout_correction"
STEPS = 40
"""Steps of an arrangement of the tiny policy."""
KL = f"{ROLES}.actor.use_kl_loss=true"
REFILLED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.refill=true", "data.gen_batch_size=3")


def ahead(bound: int, depth: int = 1) -> tuple[str, ...]:
    """Overrides of a run whose rollouts are up to `bound` versions old."""
    return f"async_training.max_staleness={bound}", f"async_training.depth={depth}", "trainer.save_freq=1000"


ARRANGEMENTS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "kl in the loss": (KL,),
    "kl in the reward, two epochs": ("algorithm.use_kl_in_reward=true", f"{ROLES}.actor.ppo_epochs=2"),
    "only what teaches": ("algorithm.filter_groups.enable=true",),
    "refilled": REFILLED,
    "gae": ("algorithm.adv_estimator=gae",),
    "rloo, cooler": ("algorithm.adv_estimator=rloo", f"{ROLES}.rollout.temperature=0.7"),
    "remax": ("algorithm.adv_estimator=remax",),
    "reinforce++": ("algorithm.adv_estimator=reinforce_plus_plus",),
    "nucleus": (f"{ROLES}.rollout.top_p=0.9", f"{ROLES}.rollout.top_k=50"),
    "token weights": (f"{CORRECTION}.rollout_is=token",),
    "sequence weights": (f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_batch_normalize=true"),
    "the engine is proximal": (f"{CORRECTION}.proximal=rollout",),
    "half precision": (f"{ROLES}.model.dtype=bfloat16",),
    "half precision, gae, kl": (f"{ROLES}.model.dtype=bfloat16", "algorithm.adv_estimator=gae", KL),
    "adapters": (f"{ROLES}.model.lora_rank=4", KL),
    "a constant length": (f"{ROLES}.actor.loss_agg_mode=seq-mean-token-sum-norm",),
    "sequence means": (f"{ROLES}.actor.loss_agg_mode=seq-mean-token-mean",),
    "malformed answers are left out": ("algorithm.masked_statuses=[malformed]",),
    "short answers": ("data.max_response_length=24", f"{ROLES}.rollout.multi_turn.max_tokens_per_turn=8"),
    "long answers": ("data.max_response_length=128",),
    "ahead, refilled": (*ahead(1), *REFILLED),
    "ahead": ahead(1),
    "two ahead": ahead(2, depth=2),
    "three ahead, adapters": (*ahead(3, depth=2), f"{ROLES}.model.lora_rank=4"),
    "four ahead, gae": (*ahead(4, depth=4), "algorithm.adv_estimator=gae"),
}
"""By name, overrides of a run of the tiny policy."""
SGLANG = (f"{ROLES}.rollout.name=sglang", "trainer.device=cpu")
SERVED = {"sglang": SGLANG, "sglang, ahead": (*SGLANG, *ahead(1))}
OTHERS = {"quickstart": 20, "pretrained": 20}
"""By name, steps of the arrangements with policies of their own, which call tools."""
NAMES = (*ARRANGEMENTS, *SERVED, *OTHERS)


@dataclass(frozen=True, slots=True)
class Assets:
    """Policy, data and scorer of the tiny policy's runs."""

    policy: Path
    data: Path
    """Folder of data_prep.quickstart."""
    reward: Path

    @classmethod
    def made(cls, folder: Path) -> Assets:
        """Make them in `folder`, or find them there."""
        from agentrl.quickstart.tiny_policy import make_tiny_policy
        from data_prep.quickstart import Recipe, make

        found = cls(folder / "policy", folder / "data", folder / "reward.py")
        if not found.reward.exists():
            make_tiny_policy(found.policy, seed=3)
            recipe = Recipe(seed=1, train_rows=48, val_rows=6, good_rows=64, flawed_rows=16)
            make(found.data, recipe, lambda text: None)
            found.reward.write_text(
                "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                "    return len(solution_str) % 7 / 7\n"
            )
        return found

    def words(self, arrangement: Sequence[str], steps: int) -> list[str]:
        """Write the overrides of a run."""
        return [
            *_data(self.data),
            f"{ROLES}.model.path={self.policy}",
            f"custom_reward_function.path={self.reward}",
            "data.train_batch_size=2",
            "data.max_prompt_length=300",
            "data.max_response_length=48",
            f"{ROLES}.rollout.n=3",
            f"{ROLES}.actor.ppo_mini_batch_size=1",
            f"{ROLES}.actor.optim.lr=1e-4",
            *_quiet(steps),
            *arrangement,
        ]


def _data(folder: Path) -> list[str]:
    tools = f"{ROLES}.rollout.multi_turn.tool_config_path={folder}/tools.yaml"
    return [f"data.train_files={folder}/train.parquet", "data.val_files=null", tools]


def _quiet(steps: int) -> list[str]:
    keys = ("trainer.save_freq=-1", "trainer.show_trajectory_freq=-1", "trainer.resume_mode=disable")
    return [f"trainer.total_training_steps={steps}", *keys]


def other_words(name: str, out: Path, pretrained: str | None, data: str | None) -> list[str] | None:
    """Write the overrides of one of OTHERS; None where its model is not given."""
    if name == "quickstart":
        size = ["data.val_files=null", "data.train_batch_size=4", f"{ROLES}.rollout.n=8"]
        return [
            *size,
            f"{ROLES}.actor.ppo_mini_batch_size=4",
            f"quickstart.dir={out}/quickstart",
            *_quiet(OTHERS[name]),
        ]
    if pretrained is None or data is None:
        return None
    return [
        *_data(Path(data)),
        f"{ROLES}.model.path={pretrained}",
        "data.train_batch_size=2",
        "data.max_prompt_length=300",
        "data.max_response_length=96",
        f"{ROLES}.rollout.n=4",
        f"{ROLES}.actor.ppo_mini_batch_size=2",
        f"{ROLES}.actor.optim.lr=1e-5",
        *_quiet(OTHERS[name]),
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's steps, its alarms, and how often each check compared something."""

    steps: int
    evaluated: dict[str, int]
    alarms: list[dict[str, object]]
    """Lines of alarms.jsonl."""
    entropy: float
    """Mean of the steps' entropies, nats a token; 0 where no step had one."""

    def told(self, severity: str) -> list[str]:
        """Write the alarms of a severity."""
        return [
            f"step {one['step']}: {one['check']}: {one['what']}" for one in self.alarms if one["severity"] == severity
        ]


def measure(words: Sequence[str], folder: Path) -> Outcome:
    """Train in `folder`. Raises UserError as the command does."""
    with training([*words, f"trainer.default_local_dir={folder}"]) as run:
        entropies = [step["actor/entropy"] for step in run if "actor/entropy" in step]
        steps, evaluated = run.step, run.evaluated
    path = folder / ALARMS_FILE
    alarms = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return Outcome(steps, evaluated, alarms, sum(entropies) / max(len(entropies), 1))


def table(found: dict[str, Outcome]) -> Iterable[str]:
    """Write what was run and what it showed, in Markdown."""
    yield "| run | steps | entropy | faults | signs |\n|---|---|---|---|---|"
    for name, one in found.items():
        signs = Counter(str(alarm["check"]) for alarm in one.alarms if alarm["severity"] == "sign")
        said = ", ".join(f"`{check}` {count}" for check, count in signs.items())
        yield f"| {name} | {one.steps} | {one.entropy:.3g} | {len(one.told('fault'))} | {said} |"
    steps, faults = (
        sum(column) for column in zip(*((one.steps, len(one.told("fault"))) for one in found.values()), strict=True)
    )
    yield f"| {len(found)} runs | {steps} | | {faults} | |"
    yield "\n| check | compared |\n|---|---|"
    for check in MEANINGS:
        yield f"| `{check}` | {sum(one.evaluated.get(check, 0) for one in found.values())} |"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each arrangement of the tiny policy")
    parser.add_argument("--pretrained")
    parser.add_argument("--data")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.only or ()) - set(NAMES):
        parser.error(f"--only: expected names of {', '.join(NAMES)}, found {', '.join(sorted(unknown))}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run what has not been run, print the table, and return the exit status."""
    arguments = parse(argv)
    out: Path = arguments.out
    found, missing = {}, []
    for name in NAMES:
        path = out / f"{name.replace(',', '').replace(' ', '_')}.json"
        if not path.exists() and name in (arguments.only or NAMES):
            if name in OTHERS:
                words = other_words(name, out, arguments.pretrained, arguments.data)
            elif name in SERVED and importlib.util.find_spec("sglang") is None:
                words = None
            else:
                words = Assets.made(out / "assets").words((ARRANGEMENTS | SERVED)[name], arguments.steps)
            if words is not None:
                path.write_text(json.dumps(asdict(measure(words, path.with_suffix("")))))
        if path.exists():
            found[name] = Outcome(**json.loads(path.read_text()))
        else:
            missing.append(name)
    print("\n".join(table(found)))
    silent = [check for check in MEANINGS if not any(one.evaluated.get(check) for one in found.values())]
    faults = [f"{name}: {text}" for name, one in found.items() for text in one.told("fault")]
    for title, lines in (("not run", missing), ("never compared anything", silent), ("faults", faults)):
        if lines:
            print(f"\n{title}: {'; '.join(lines)}")
    return 1 if silent or faults else 0


if __name__ == "__main__":
    sys.exit(main())
