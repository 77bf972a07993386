"""GiGPO against GRPO on the arena's errand, by a policy that is a table: what does the comparison by state add?

    python -m labs.arena.credit [--seeds 10] [--turns 10 30]

The errand of examples/gigpo/walk.py (no language model; a preference for each move by where the goal lies), 32 starts
of 8 walks a step, 20 steps of two updates, the advantages of agentrl's own estimators. Prints for each setting the mean
success over all steps and at the end, less GRPO's with the same seed and with the standard error; then, for policies of
growing success, how often states come again and how the advantages compare with what a move was worth: the change that
it made to the probability of reaching the goal, computed exactly. A minute of a core.
"""

from __future__ import annotations

import argparse
from itertools import islice
from statistics import mean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.algorithms.columns import EstimatorColumns
from agentrl.algorithms.estimators.gigpo import GigpoOptions, gigpo
from agentrl.algorithms.estimators.grpo import grpo
from agentrl.config.sections.algorithm import AlgorithmConfig
from examples.gigpo.walk import MOVES, SIDE, errands

STARTS, EACH, STEPS, RATE = 32, 8, 20, 0.15
STEP = torch.tensor(list(MOVES.values()))
CONFIG = AlgorithmConfig()
SETTINGS = [
    None,
    *(GigpoOptions(step_gamma=gamma) for gamma in (0.95, 0.8, 1.0)),
    *(GigpoOptions(step_advantage_w=weight) for weight in (0.3, 3.0)),
]
"""None: GRPO."""
BEGINNINGS = {10: 0.2, 30: -0.6}
"""By turns, the preference for moves that lead nearer with which about a tenth of the walks succeed."""


class Walks(NamedTuple):
    """Walks of one step, a turn a place in the row."""

    columns: EstimatorColumns
    goal: Tensor  # [T, 2]
    place: Tensor  # [T, 2]
    move: Tensor  # [T]
    left: Tensor  # [T], turns left before the move
    success: Tensor  # [walks] bool


def row_of(place: Tensor, goal: Tensor) -> Tensor:
    """Number the row of the table for where the goal lies from a place."""
    way = goal - place + SIDE - 1
    return way[..., 0] * (2 * SIDE - 1) + way[..., 1]


def beginning(preference: float, seed: int) -> Tensor:
    """Make a table [rows, moves] that prefers moves that lead nearer."""
    reach = torch.arange(1 - SIDE, SIDE)
    way = torch.cartesian_prod(reach, reach)
    nearer = (way[:, None] * STEP).amax(-1) > 0
    noise = torch.randn(nearer.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
    return preference * nearer + noise


def walk(table: Tensor, name: str, turns: int) -> Walks:
    """Walk from 32 starts, 8 times each."""
    drawn = torch.tensor(list(islice(errands(name), STARTS))).repeat_interleave(EACH, 0)
    place, goal = drawn[:, 0], drawn[:, 1]
    walking = torch.ones(len(place), dtype=torch.bool)
    seen = []
    for _ in range(turns):
        move = torch.multinomial(table[row_of(place, goal)].softmax(-1), 1)[:, 0]
        seen.append((place, move, walking))
        place = torch.where(walking[:, None], (place + STEP[move]).clamp(0, SIDE - 1), place)
        walking = walking & (place != goal).any(-1)
    places, moves, went = (torch.stack(one, 1) for one in zip(*seen, strict=True))
    length, success = went.sum(1), ~walking
    owner = torch.arange(len(length)).repeat_interleave(length)
    offsets = torch.cat([length.new_zeros(1), length.cumsum(0)])
    rewards = torch.zeros(len(owner))
    rewards[offsets[1:] - 1] = success.float()
    turn = torch.arange(len(owner)) - offsets[owner]
    nothing = torch.zeros(len(owner))
    columns = EstimatorColumns(
        rewards=rewards,
        mask=torch.ones(len(owner), dtype=torch.bool),
        offsets=offsets,
        group=torch.arange(len(length)) // EACH,
        trajectory=torch.arange(len(length)),
        turn=turn.int(),
        version=nothing.int(),
        old_logprobs=nothing,
        rollout_logprobs=nothing,
        n=EACH,
        state=places[went][:, 0] * SIDE + places[went][:, 1],
    )
    return Walks(columns, goal[owner], places[went], moves[went], turns - turn, success)


def advantages(walks: Walks, options: GigpoOptions | None) -> Tensor:
    found = grpo(walks.columns, CONFIG) if options is None else gigpo(walks.columns, CONFIG, options)
    return found.advantages.float()


def learn(seed: int, options: GigpoOptions | None, turns: int) -> tuple[float, float]:
    """Return (mean success over all steps, success at the end)."""
    torch.manual_seed(seed)
    table = beginning(BEGINNINGS[turns], seed).requires_grad_()
    optimizer = torch.optim.Adam([table], lr=RATE)
    rates = []
    for step in range(STEPS):
        walks = walk(table.detach(), f"{seed} {step}", turns)
        rates.append(walks.success.float().mean().item())
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        taught, first = advantages(walks, options), walks.columns.group < STARTS // 2
        first = first.repeat_interleave(walks.columns.offsets.diff())
        for half in (first, ~first):
            logprobs = table[row_of(walks.place[half], walks.goal[half])].log_softmax(-1)
            loss = -(logprobs.gather(1, walks.move[half, None])[:, 0] * taught[half]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ends = [walk(table.detach(), f"{seed} end {one}", turns).success.float().mean().item() for one in range(4)]
    return mean(rates), mean(ends)


def worth(table: Tensor, goal: Tensor, turns: int) -> Tensor:
    """Compute what each move adds to the probability of success: [turns + 1 left, places, moves]."""
    reach = torch.arange(SIDE)
    places = torch.cartesian_prod(reach, reach)
    chosen = table[row_of(places, goal)].softmax(-1)
    following = (places[:, None] + STEP).clamp(0, SIDE - 1)
    following = following[..., 0] * SIDE + following[..., 1]
    there = (places == goal).all(-1)
    value, added = there.float(), [torch.zeros(chosen.shape)]
    for _ in range(turns):
        by_move = value[following]
        usual = (chosen * by_move).sum(-1)
        added.append(by_move - usual[:, None])
        value = torch.where(there, 1.0, usual)
    return torch.stack(added)


def signal(preference: float) -> str:
    """Describe the advantages that a policy's walks get, as a row of a table."""
    torch.manual_seed(1)
    table = beginning(preference, 1)
    found: list[list[float]] = []
    for step in range(8):
        walks = walk(table, f"signal {step}", 10)
        columns = walks.columns
        assert columns.state is not None
        group = columns.group.repeat_interleave(columns.offsets.diff())
        _, state, met = torch.unique(group * SIDE**2 + columns.state, return_inverse=True, return_counts=True)
        by_walk = advantages(walks, None)
        by_both = advantages(walks, GigpoOptions())
        by_state = by_both - by_walk
        true = torch.zeros_like(by_walk)
        for one in group.unique():
            own = group == one
            true[own] = worth(table, walks.goal[own][0], 10)[walks.left[own], columns.state[own], walks.move[own]]
        says = by_state.abs() > 1e-6
        both = says & (by_walk != 0)
        found.append([
            walks.success.float().mean().item(),
            (met[state] > 1).float().mean().item(),
            says.float().mean().item(),
            (by_state.sign() == by_walk.sign())[both].float().mean().item(),
            *(torch.corrcoef(torch.stack([one, true]))[0, 1].item() for one in (by_walk, by_state, by_both)),
        ])  # fmt: skip
    shares = [mean(column) for column in zip(*found, strict=True)]
    return " | ".join([*(f"{share:.0%}" for share in shares[:4]), *(f"{share:.2f}" for share in shares[4:])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--turns", type=int, nargs="+", choices=BEGINNINGS, default=list(BEGINNINGS))
    given = parser.parse_args()
    for turns in given.turns:
        usual: list[tuple[float, float]] = []
        for options in SETTINGS:
            runs = [learn(seed, options, turns) for seed in range(given.seeds)]
            usual = usual or runs
            name = "grpo" if options is None else f"w {options.step_advantage_w:g}, gamma {options.step_gamma:g}"
            told = [f"{turns} turns", name]
            for which in (0, 1):
                more = [one[which] - other[which] for one, other in zip(runs, usual, strict=True)]
                error = stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
                told.append(f"{mean(one[which] for one in runs):.1%}, {mean(more):+.1%} ({error:.1%})")
            print(" | ".join(told), flush=True)
    print("success | turns in states that came again | with an advantage by state | of the walk's sign | correlation")
    for preference in (0.2, 0.6, 1.4, 3.0):
        print(signal(preference), flush=True)


if __name__ == "__main__":
    main()
