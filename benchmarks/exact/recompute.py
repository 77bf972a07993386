"""The updates of a run computed again, by plain torch, from what the run recorded.

Nothing of the trainer is used but its files: the trajectories of each step, the record of the update beside them, and
the metrics. Beginning with the policy that the run began with, each step's log-probs, advantages, weights, gradient
and AdamW step are computed sequence by sequence, and held against the records and the exported policy.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.trajectory.files import update_file

RATE, CLIP = 1e-4, 1.0
"""Learning rate and largest norm of the gradient, as the cells set them."""
CUT = 2.0
"""Bound of the weight of a sequence with stale tokens."""
CLOSE = 2e-3
"""Largest difference of a log-prob, or of an advantage: float32 over sequences that are computed in another order."""
NORMS_CLOSE = 1e-2
WEIGHTS_CLOSE = 0.05
"""Norm of the difference of the whole change of the weights, as a part of that change: AdamW divides gradients that
are next to nothing by their own size, so rounding alone moves some of the weights. One trajectory left out, paid
otherwise or doubled is ten times as much."""


@dataclass(frozen=True, slots=True)
class TrainedSequence:
    """One transcript that is trained on."""

    uid: str
    role: str
    """Empty in an episode without roles."""
    ids: torch.Tensor
    mask: torch.Tensor
    sampled: torch.Tensor
    """Log-probs of the engine [tokens]."""
    versions: list[int]
    """Version of each sampled token."""
    recorded: Mapping[str, list[float | None]]
    """By column of the update's record."""


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    """Read a step's trajectories, each with the update's columns under `update`."""
    rows: list[dict[str, Any]] = []
    for file in sorted((run / "trajectories").glob(f"train_{step:06d}*.parquet")):
        found = pq.read_table(file).to_pylist(maps_as_pydicts="strict")
        updates = {row["uid"]: row for row in pq.read_table(update_file(file)).to_pylist()}
        rows += [row | {"update": updates[row["uid"]]} for row in found]
    return rows


def survives(row: Mapping[str, Any]) -> bool:
    """Say whether a recorded trajectory can be trained on."""
    return row["status"] != "failed" and row["score"] is not None and any(any(mask) for mask in row["mask"])


def sequences_of(row: Mapping[str, Any]) -> list[TrainedSequence]:
    found = []
    for number, mask in enumerate(row["mask"]):
        if any(mask):
            spans = row["versions"][number]
            versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
            columns = {name: column[number] for name, column in row["update"].items() if name != "uid"}
            found.append(
                TrainedSequence(
                    row["uid"],
                    row["role"][number],
                    torch.tensor(row["ids"][number]),
                    torch.tensor(mask, dtype=torch.bool),
                    torch.tensor(row["logprobs"][number]),
                    versions,
                    columns,
                )
            )
    return found


def log_probs(model: PreTrainedModel, sequence: TrainedSequence) -> torch.Tensor:
    """Compute the log-probs of the sampled tokens of one sequence [sampled tokens]."""
    logits = model(input_ids=sequence.ids[None]).logits[0, :-1].log_softmax(-1)
    chosen = logits.gather(1, sequence.ids[1:, None])[:, 0]
    return chosen[sequence.mask[1:]]


def scores_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a trajectory's scores by role; without roles its score, under an empty name."""
    by_role = {role: row["score_extra"][f"role/{role}"] for role in row["role"] if role}
    return by_role or {"": row["score"] + sum(row["turn_rewards"] or [])}


def advantages_of(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Compute GRPO's advantages over the survivors of each prompt, role by role: by trajectory and role."""
    groups: defaultdict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        for role, score in scores_of(row).items():
            groups[row["group"], role][row["uid"]] = score
    found: dict[tuple[str, str], float] = {}
    for (_, role), members in groups.items():
        rewards = torch.tensor(list(members.values()), dtype=torch.float64)
        centred = rewards - rewards.mean()
        scale = rewards.std() + 1e-6 if len(members) > 1 else torch.tensor(1.0)
        equal = bool((rewards == rewards[0]).all())
        found |= {(uid, role): 0.0 if equal else float(one) for uid, one in zip(members, centred / scale, strict=True)}
    return found


def recorded(sequence: TrainedSequence, name: str) -> torch.Tensor | None:
    """Read a column of the record at the sampled tokens; None where a sampled token has none."""
    values = [
        one for one, is_sampled in zip(sequence.recorded[name], sequence.mask.tolist(), strict=True) if is_sampled
    ]
    return None if any(one is None for one in values) else torch.tensor(values, dtype=torch.float32)


def update_again(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, float],
) -> list[str]:
    """Take one step's update; returns what differs from its record."""
    problems: list[str] = []
    kept = [row for row in rows if survives(row)]
    advantages = advantages_of(kept)
    sequences = [sequence for row in kept for sequence in sequences_of(row)]
    tokens = sum(int(one.mask.sum()) for one in sequences)
    optimizer.zero_grad()
    for one in sequences:
        new, sampled = log_probs(model, one), one.sampled[one.mask]
        old, advantage = new.detach(), advantages[one.uid, one.role]
        weight = torch.ones_like(old)
        if "weights" in one.recorded:
            weight = (old - sampled).sum().exp().clamp(max=CUT).expand_as(old)
        for name, expected in (
            ("trainer_logprobs", old),
            ("advantages", torch.full_like(old, advantage)),
            *((("weights", weight),) if "weights" in one.recorded else ()),
        ):
            seen = recorded(one, name)
            if seen is None or not torch.allclose(seen, expected, rtol=CLOSE, atol=CLOSE):
                problems.append(f"{one.uid}: {name} is not what its record gives")
        (-(advantage * weight * (new - old).exp()).sum() / tokens).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    if metrics.get("actor/skipped_updates", 0.0):
        return problems
    said = metrics.get("actor/grad_norm", 0.0)
    if abs(said - norm) > NORMS_CLOSE * max(norm, 1e-3):
        problems.append(f"the gradient's norm is {said:.5g}, and {norm:.5g} computed again")
    if sequences:
        optimizer.step()
    return problems


def differences(run: Path, policy: Path, steps: int) -> list[str]:
    """Compute the updates of all steps again; returns what differs from the records and the exported weights."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, attn_implementation="eager")
    before = {name: value.clone() for name, value in load_file(policy / "model.safetensors").items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), weight_decay=0.01)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line for line in metrics}
    problems: list[str] = []
    for step in range(1, steps + 1):
        problems += [f"step {step}: {one}" for one in update_again(model, optimizer, rows_of(run, step), by_step[step])]
    made, again = load_file(run / "policy" / "model.safetensors"), model.state_dict()
    moved = sum(float((again[name] - before[name]).square().sum()) for name in made) ** 0.5
    apart = sum(float((again[name] - made[name]).square().sum()) for name in made) ** 0.5
    if not apart <= WEIGHTS_CLOSE * moved:
        problems.append(f"the policy is {apart:.3g} from the one that the records give, which moved by {moved:.3g}")
    return problems
