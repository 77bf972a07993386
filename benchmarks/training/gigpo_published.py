"""Compares GiGPO with the function that its authors publish, on random ragged trajectories.

Prints the largest difference of the advantages, relative to the largest of a batch, with and without the division by
the standard deviation, with the group's mean and deviation over trajectories (the paper's equation 3) and over turns,
`adv_options.over_turns` (what the published function does by default), and how far these two are from each other. The
published file (Apache-2.0) is read where it lies, `gigpo/core_gigpo.py` of a checkout of
langfengQ/verl-agent or langfengQ/DrMAS; of verl it names one class, which is not called and which a stand-in replaces:

    python -m benchmarks.training.gigpo_published verl-agent/gigpo/core_gigpo.py

Inputs avoid what is different on purpose: lone survivors, which keep their raw reward there and teach nothing here, and
groups of equal rewards, whose rounding is divided by 1e-6 there and is exactly 0 here. There a row is one turn; here a
trajectory's turns stand in one sequence. Its step rewards are the discounted rewards to go, in float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import random
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from agentrl.algorithms.advantages import compute_advantages
from agentrl.config.sections.algorithm import AlgorithmConfig
from agentrl.trajectory.batch import RaggedBatch

GAMMA, WEIGHT = 0.95, 0.7
OVER_TURNS = ("compute_mean_std_cross_steps", "group_by_agent_id")
"""Names in the published files of what `over_turns` is here."""


def published(path: Path) -> Any:
    """Load the authors' file."""
    verl = ModuleType("verl")
    verl.DataProto = object  # type: ignore[attr-defined]
    sys.modules.setdefault("verl", verl)
    spec = importlib.util.spec_from_file_location("core_gigpo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trajectories(draw: random.Random) -> list[dict[str, Any]]:
    """Two to four prompts of two to six trajectories of one to six turns, in one of four states each."""
    made = []
    for group in range(draw.randint(2, 4)):
        for _ in range(draw.randint(2, 6)):
            turns = [(draw.randint(1, 4), draw.randint(0, 3), draw.gauss(0, 1)) for _ in range(draw.randint(1, 6))]
            made.append({"group": group, "turns": turns})
    return made


def ours(drawn: list[dict[str, Any]], *, by_std: bool, over_turns: bool) -> list[float]:
    """Advantages by turn, in order."""
    mask: list[bool] = []
    turn: list[int] = []
    state: list[int] = []
    rewards: list[float] = []
    lengths: list[int] = []
    for one in drawn:
        before = len(mask)
        for number, (tokens, place, reward) in enumerate(one["turns"]):
            mask += [False, *[True] * tokens]
            turn += [-1, *[number] * tokens]
            state += [-1, *[place] * tokens]
            rewards += [0.0] * tokens + [reward]
        lengths.append(len(mask) - before)
    total = len(mask)
    batch = RaggedBatch.unsampled(
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        ids=torch.zeros(total, dtype=torch.int64),
        mask=torch.tensor(mask),
        group=torch.tensor([one["group"] for one in drawn]),
        trajectory=torch.arange(len(drawn)),
    )
    batch = batch.with_fields(
        turn=torch.tensor(turn, dtype=torch.int32),
        state=torch.tensor(state),
        rewards=torch.tensor(rewards),
        old_logprobs=torch.zeros(total),
    )
    options = {"step_advantage_w": WEIGHT, "step_gamma": GAMMA, "over_turns": over_turns}
    keys = {"adv_estimator": "gigpo", "norm_adv_by_std_in_grpo": by_std, "adv_options": options}
    found = compute_advantages(batch, AlgorithmConfig.model_validate(keys), 8).advantages
    assert found is not None
    lasts = [place for place in range(total) if mask[place] and (place + 1 == total or not mask[place + 1])]
    return found[lasts].tolist()


def theirs(module: Any, drawn: list[dict[str, Any]], *, by_std: bool) -> list[float]:
    """Advantages by turn, in order: a row is a turn, with the trajectory's whole reward as its score.

    The mean and deviation of groups are those of `module.episode_norm_reward`.
    """
    rows = [(one["group"], name, *turn) for name, one in enumerate(drawn) for turn in one["turns"]]
    to_go: list[float] = []
    for one in drawn:
        own: list[float] = []
        for _, _, reward in reversed(one["turns"]):
            own.append(reward + GAMMA * (own[-1] if own else 0.0))
        to_go += reversed(own)
    total = {name: sum(reward for _, _, reward in one["turns"]) for name, one in enumerate(drawn)}
    with redirect_stdout(StringIO()):
        found, _ = module.compute_gigpo_outcome_advantage(
            token_level_rewards=torch.tensor([[total[name]] for _, name, *_ in rows]),
            step_rewards=torch.tensor(to_go),
            response_mask=torch.ones(len(rows), 1),
            anchor_obs=np.array([str(state) for _, _, _, state, _ in rows], dtype=object),
            index=np.array([group for group, *_ in rows]),
            traj_index=np.array([name for _, name, *_ in rows]),
            step_advantage_w=WEIGHT,
            mode="mean_std_norm" if by_std else "mean_norm",
        )
    values: list[float] = found[:, 0].tolist()
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--batches", type=int, default=200)
    given = parser.parse_args()
    module = published(given.file)
    by_episode = module.episode_norm_reward
    (name,) = [one for one in OVER_TURNS if one in inspect.signature(by_episode).parameters]
    default = inspect.signature(by_episode).parameters[name].default
    print(f"{name}={default} is the default of {given.file}")
    for by_std in (True, False):
        apart = 0.0
        for over_turns in (False, True):
            module.episode_norm_reward = partial(by_episode, **{name: over_turns})
            worst = 0.0
            for seed in range(given.batches):
                drawn = trajectories(random.Random(seed))
                left = torch.tensor(ours(drawn, by_std=by_std, over_turns=over_turns))
                other = torch.tensor(ours(drawn, by_std=by_std, over_turns=not over_turns))
                right = torch.tensor(theirs(module, drawn, by_std=by_std))
                worst = max(worst, float((left - right).abs().max() / right.abs().max()))
                apart = max(apart, float((left - other).abs().max() / left.abs().max()))
            what = f"by the standard deviation: {by_std}, over turns: {over_turns}"
            print(f"{what}; largest difference of {given.batches} batches: {worst:.2g}", flush=True)
        print(f"by the standard deviation: {by_std}; over turns from over trajectories: {apart:.2g}")


if __name__ == "__main__":
    main()
