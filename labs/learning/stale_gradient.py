"""The gradient that stale samples give under each correction, against the true one, on a policy where that is known.

    python -m labs.learning.stale_gradient [--seeds 16] [--tokens 1024 64]

The policy is a table of logits. Four tokens of a sequence decide: a trajectory succeeds if all four are right, so the
probability of success is a product, and its gradient has a closed form. The other tokens are drawn from 60 rows of the
same table, and do not matter. A seed makes a table that succeeds about one time in eight, and learns for eight steps of
Adam on the policy's own samples (32 prompts, of other difficulty each, 8 trajectories a prompt). Then it estimates the
gradient at the last weights from samples of weights K steps older, as policy gradients do: weight times (reward less
the mean of the other seven) times the gradient of the log-prob.

Prints, each with its standard error over seeds: the projection on the true gradient as a part of its length (1: as
long as it should be), the cosine of one batch's gradient with it, mean weight, effective sample size, and the gap in
nats a token. Two minutes of a core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev

import torch
from torch import Tensor

from agentrl.algorithms.rollout_correction import correct
from agentrl.config.sections.algorithm import RolloutCorrectionConfig
from agentrl.system.json_value import JSON

PROMPTS, EACH, VOCABULARY = 32, 8, 8
DECIDING, FILLING = 4, 60
"""Rows of the table: of tokens that decide, of all others."""
RIGHT, SPREAD = 2.8, 0.7
"""Logit of a right token at first; deviation of what a prompt adds to it."""
STEPS, RATE, BATCHES = 8, 0.03, 8
BOUNDS = (0, 1, 2, 4)
CORRECTIONS: Mapping[str, Mapping[str, JSON]] = {
    "none": {},
    "token": {"rollout_is": "token"},
    "token, mean 1": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "geometric": {"rollout_is": "geometric"},
    "sequence": {"rollout_is": "sequence"},
    "sequence, mean 1": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "sequence, 0.5 to 2, mean 1": {
        "rollout_is": "sequence",
        "rollout_is_lower": 0.5,
        "rollout_is_batch_normalize": True,
    },
    "sequence, 0.72 to 1.39, mean 1": {
        "rollout_is": "sequence",
        "rollout_is_lower": 0.72,
        "rollout_is_threshold": 1.39,
        "rollout_is_batch_normalize": True,
    },
    "tempered": {"rollout_is": "tempered"},
}
MEASURES = ("projection", "cosine", "mean weight", "ESS", "gap")


class Table:
    """A policy of sequences of `tokens` tokens over [rows, vocabulary] logits, which are the parameters."""

    def __init__(self, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = tokens
        self.easier = torch.randn(PROMPTS, DECIDING, generator=generator) * SPREAD
        self.rows = DECIDING + torch.arange(tokens) % FILLING
        self.rows[torch.linspace(0, tokens - 1, DECIDING).long()] = torch.arange(DECIDING)
        self.begins = torch.randn(DECIDING + FILLING, VOCABULARY, generator=generator) / 2
        self.begins[:DECIDING, 0] += RIGHT

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return log-probs [prompts, rows, vocabulary]; token 0 is the right one."""
        easier = torch.nn.functional.pad(self.easier[:, :, None], (0, VOCABULARY - 1, 0, FILLING))
        return (logits + easier).log_softmax(-1)

    def success(self, logits: Tensor) -> Tensor:
        """Return the probability of success, mean over prompts; differentiable."""
        return self.logprobs(logits)[:, :DECIDING, 0].sum(1).exp().mean()

    def gradient(self, logits: Tensor) -> Tensor:
        """Compute the true gradient of the success, [rows, vocabulary]."""
        leaf = logits.clone().requires_grad_()
        return torch.autograd.grad(self.success(leaf), leaf)[0]

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw trajectories: (tokens [prompts, each, tokens], advantages [prompts, each])."""
        probs = self.logprobs(logits).exp()[:, self.rows].reshape(-1, VOCABULARY)
        drawn = torch.multinomial(probs, EACH, replacement=True).view(PROMPTS, self.tokens, EACH).transpose(1, 2)
        reward = (drawn[:, :, self.rows < DECIDING] == 0).all(-1).float()
        return drawn, (reward - reward.mean(1, keepdim=True)) * EACH / (EACH - 1)

    def chosen(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """Return the log-probs of tokens, shaped as they are."""
        by_place = self.logprobs(logits)[:, self.rows]
        return by_place[:, None].expand(-1, EACH, -1, -1).gather(3, drawn[..., None])[..., 0]

    def estimate(self, logits: Tensor, drawn: Tensor, weights: Tensor) -> Tensor:
        """Add up weight times gradient of the log-prob over tokens, mean over trajectories: [rows, vocabulary]."""
        probs = self.logprobs(logits).exp()
        cell = (torch.arange(PROMPTS)[:, None, None] * len(logits) + self.rows) * VOCABULARY + drawn
        found = torch.zeros(probs.numel()).index_add_(0, cell.flatten(), weights.flatten()).view_as(probs)
        return (found - found.sum(-1, keepdim=True) * probs).sum(0) / (PROMPTS * EACH)


def learn(table: Table, seed: int) -> list[Tensor]:
    """Learn in turn; returns the logits before each step and behind the last."""
    torch.manual_seed(seed)
    logits = table.begins.clone().requires_grad_()
    optimizer, found = torch.optim.Adam([logits], lr=RATE), [table.begins]
    for _ in range(STEPS):
        drawn, advantages = table.sample(found[-1])
        logits.grad = -table.estimate(found[-1], drawn, advantages[..., None].expand_as(drawn))
        optimizer.step()
        found.append(logits.detach().clone())
    return found


def measured(tokens: int, seed: int) -> Iterator[tuple[int, str, list[float]]]:
    """Yield (K, correction, MEASURES, each the mean over batches) of a seed."""
    table = Table(tokens, seed)
    weights = learn(table, seed)
    logits, true = weights[-1], table.gradient(weights[-1])
    offsets = torch.arange(PROMPTS * EACH + 1) * tokens
    mask = torch.ones(PROMPTS * EACH * tokens, dtype=torch.bool)
    for bound in BOUNDS:
        old, found = weights[-1 - bound], {name: list[list[float]]() for name in CORRECTIONS}
        for _ in range(BATCHES):
            drawn, advantages = table.sample(old)
            change = table.chosen(logits, drawn) - table.chosen(old, drawn)
            for name, keys in CORRECTIONS.items():
                config = RolloutCorrectionConfig.model_validate(keys)
                weight = correct(change.flatten(), mask, offsets, config).weight
                estimate = table.estimate(logits, drawn, weight.view_as(change) * advantages[..., None])
                along = float((estimate * true).sum() / true.norm())
                found[name].append([
                    along / float(true.norm()),
                    along / float(estimate.norm()),
                    float(weight.mean()),
                    float(weight.sum() ** 2 / (len(weight) * weight.square().sum())),
                    float((change.exp() - 1 - change).mean()),
                ])  # fmt: skip
        for name, batches in found.items():
            yield bound, name, [mean(column) for column in zip(*batches, strict=True)]


def row(seeds: Sequence[Sequence[float]]) -> str:
    """Write the means over seeds with their standard errors."""
    cells = []
    for name, column in zip(MEASURES, zip(*seeds, strict=True), strict=True):
        error = stdev(column) / len(column) ** 0.5 if len(column) > 1 else 0.0
        digits = 5 if name == "gap" else 3
        cells.append(f"{mean(column):.{digits}f} ({error:.{digits}f})")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 64])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for tokens in given.tokens:
        found: dict[tuple[int, str], list[list[float]]] = {}
        for seed in range(given.seeds):
            for bound, name, values in measured(tokens, seed):
                found.setdefault((bound, name), []).append(values)
        print(f"{tokens} tokens, {given.seeds} seeds: K | correction | {' | '.join(MEASURES)}")
        for (bound, name), seeds in found.items():
            if bound or name == "none":
                print(f"{bound} | {name} | {row(seeds)}", flush=True)


if __name__ == "__main__":
    main()
