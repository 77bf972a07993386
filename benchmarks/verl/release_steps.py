"""Training steps by the formulas of verl's releases, on trajectories that are given: a plain model, nothing of agentrl.

A replay starts from the weights that a run starts from, and goes over the run's trajectories: token ids, prompts,
scores, and for asynchronous commands the engine's log-probs. Everything else it computes by itself in float64: which
tokens are the policy's, log-probs, the reward of each token, advantages, mini-batches, losses, rates, and weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

Release = Literal["main", "0.2", "search_r1"]
"""Code whose formulas hold: verl since 0.4 (its recipes, too), releases up to 0.3.0, and Search-R1's fork."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
USER = r"\n<\|im_start\|>user\n.*?<\|im_start\|>assistant\n"
OBSERVED = {
    "search_r1": re.compile(
        r"\n\n(?:<information>.*?</information>|[^\n]* Try again: [^\n]*)\n\n(?:No more tool calls [^\n]*\n\n)?|"
        + USER,
        re.DOTALL,
    ),
    "main": re.compile(USER + r"|(?<=<\|im_end\|>)\n.*?(?:<\|im_start\|>assistant\n|\Z)", re.DOTALL),
}
"""Texts of a response that the policy did not write: in the fork's tags, and in the tiny policy's template."""
CRITIC, RATES = "critic's tokens", "rates of the warm-up"
"""Differences from a release: critic and advantages have the policy's tokens alone; no step has the rate 0."""
SEEN = re.compile(r"([^\n]*)<\|im_end\|>\n<\|im_start\|>assistant\n$")
"""The last line that a policy has read before its turn."""


@dataclass(frozen=True, slots=True)
class Row:
    """A trajectory as a run has it before anything is computed."""

    prompt: list[int]
    response: list[int]
    group: int
    score: float
    engine_logprobs: list[float]
    """By token of the response, 0 where the engine did not sample."""
    turn_rewards: list[float] = field(default_factory=list)
    """In an environment: the reward of each turn, which the score is the sum of."""


@dataclass(slots=True)
class Found:
    """Numbers of a step. Lists by row hold a number for each token of the response."""

    sampled: list[list[bool]]
    old: list[list[float]]
    rewards: list[list[float]]
    advantages: list[list[float]]
    values: list[list[float]] | None
    numbers: dict[str, float] = field(default_factory=dict)
    """Means over the optimizer steps, rates, and the number of optimizer steps."""


class Replay:
    """A run's steps by a release's formulas, on the values that the release composes of a command."""

    def __init__(
        self,
        policy: Path,
        values: Mapping[str, Any],
        release: Release,
        total_steps: int,
        here: frozenset[str] = frozenset(),
    ) -> None:
        """`here`: differences of agentrl from the release that are taken over, so that nothing else may differ: CRITIC
        and RATES."""
        self.here = here
        self.folder, self.values, self.release, self.total_steps = policy, values, release, total_steps
        self.found: list[Found] = []
        self.taken: list[str] = []
        """The role of each optimizer step, in order."""
        self.tokenizer = AutoTokenizer.from_pretrained(policy)
        self.policy = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
        self.reference = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
        self.critic = _Critic(policy) if values["algorithm.adv_estimator"] == "gae" else None
        self.models = {ACTOR: self.policy} | ({"critic": self.critic} if self.critic else {})
        self.optimizers = {role: _adam(model) for role, model in self.models.items()}

    @property
    def is_old(self) -> bool:
        return self.release != "main"

    def step(self, number: int, rows: Sequence[Row]) -> Found:
        """Take step `number`, counted from 1."""
        values = self.values
        sampled = [self.sampled(row) for row in rows]
        mask = _padded(sampled).double()
        with torch.no_grad():
            of_policy = self.logprobs(self.policy, rows)[0]
            old = _padded([row.engine_logprobs for row in rows]) if self.bypass else of_policy
            ref = self.logprobs(self.reference, rows)[0]
            known = self.known(sampled)
            before = None if self.critic is None else self.critic(rows) * known
        rewards = torch.zeros_like(mask)
        for i, row in enumerate(rows):
            if row.turn_rewards:
                ends = [end - 1 for _, end in runs(sampled[i])]
                rewards[i, ends] = torch.tensor(row.turn_rewards, dtype=torch.float64)
            else:
                end = runs(sampled[i])[-1][1]  # verl's loop ends before an answer for which there is no room
                rewards[i, end - 1] = row.score + self.overlong(end)
        kl_in_reward = not values[f"{ACTOR}.use_kl_loss"] if self.is_old else values["algorithm.use_kl_in_reward"]
        if kl_in_reward:
            rewards = (
                rewards - values["algorithm.kl_ctrl.kl_coef"] * kl(old, ref, values["algorithm.kl_penalty"]) * mask
            )
        if values["algorithm.adv_estimator"] == "gigpo":
            advantages, returns = self.gigpo(rows, sampled), None
        else:
            advantages, returns = self.advantages(rows, rewards, mask, before)
        width = mask.shape[1]
        found = Found(
            sampled=sampled,
            old=_unpadded(old, rows),
            rewards=_unpadded(rewards, rows),
            advantages=_unpadded(advantages[:, :width] * mask, rows),
            values=None if before is None else _unpadded(before, rows),
        )
        if self.critic is not None:
            assert before is not None and returns is not None
            self.fit("critic", number, rows, found, self.value_loss(known, before, returns))
        if number >= values.get("trainer.critic_warmup", 0):
            self.fit(ACTOR, number, rows, found, self.policy_loss(mask, old, ref, advantages[:, :width]))
        return found

    @property
    def bypass(self) -> bool:
        """The ratio is taken to the engine's log-probs."""
        return bool(self.values.get("algorithm.rollout_correction.bypass_mode"))

    def sampled(self, row: Row) -> list[bool]:
        """Tell the policy's tokens from observed ones by the text of a response."""
        texts = [str(self.tokenizer.decode([one], clean_up_tokenization_spaces=False)) for one in row.response]
        place, starts = 0, []
        for text in texts:
            starts.append(place)
            place += len(text)
        observed = OBSERVED["search_r1" if self.release == "search_r1" else "main"]
        spans = [found.span() for found in observed.finditer("".join(texts))]
        return [not any(start <= one < end for start, end in spans) for one in starts]

    def known(self, sampled: Sequence[Sequence[bool]]) -> Tensor:
        """Mark the states that the critic values, [N, R + 1]: the ones before the tokens, and the one after the last.

        Releases up to 0.3 shift the mask of all tokens by one, so that the state after a response has a value where
        the response is shorter than its column. Later ones take the policy's tokens.
        """
        mask = nn.functional.pad(_padded(sampled).double(), (0, 1))
        if not self.is_old or CRITIC in self.here:
            return mask
        lengths = torch.tensor([len(one) for one in sampled])
        width = int(lengths.max()) if self.release == "search_r1" else self.values["data.max_response_length"]
        return (torch.arange(mask.shape[1]) <= lengths.clamp(max=width - 1)[:, None]).double()

    def logprobs(self, model: nn.Module, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Log-probs of the response's tokens and entropies of their distributions, [N, R]."""
        ids, starts = _ids(rows)
        every = (model(ids).logits[:, :-1] / self.values[f"{ROLLOUT}.temperature"]).log_softmax(-1)
        chosen = every.gather(-1, ids[:, 1:, None])[..., 0]
        entropy = -(every.exp() * every).sum(-1)
        return _responses(chosen, starts, rows), _responses(entropy, starts, rows)

    def overlong(self, length: int) -> float:
        """Penalty of DAPO's reward manager for a response near its limit."""
        name = "reward_model.overlong_buffer"
        if not self.values.get(f"{name}.enable"):
            return 0.0
        room = self.values[f"{name}.len"]
        over = length - (self.values["data.max_response_length"] - room)
        return float(min(-over / room * self.values[f"{name}.penalty_factor"], 0.0))

    def advantages(
        self, rows: Sequence[Row], rewards: Tensor, mask: Tensor, values: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Advantages, and the critic's targets, [N, R]."""
        if values is None:
            total = rewards.sum(1).tolist()
            of_group: dict[int, list[float]] = {}
            for row, one in zip(rows, total, strict=True):
                of_group.setdefault(row.group, []).append(one)
            norm = [
                (one - mean(of_group[row.group])) / (stdev(of_group[row.group]) + 1e-6)
                for row, one in zip(rows, total, strict=True)
            ]
            return torch.tensor(norm, dtype=torch.float64)[:, None] * mask, None
        gamma, lam = self.values.get("algorithm.gamma", 1.0), self.values.get("algorithm.lam", 1.0)
        rewards, mask = (nn.functional.pad(one, (0, 1)) for one in (rewards, mask))
        if self.is_old and CRITIC not in self.here:  # Its mask of advantages has the tokens that were read, too.
            mask = (torch.arange(mask.shape[1]) < torch.tensor([len(row.response) for row in rows])[:, None]).double()
            return self.whitened(self.over_all(rewards, values, gamma, lam), mask, values)
        after, running, found = torch.zeros(len(rows)), torch.zeros(len(rows)), torch.zeros_like(mask)
        for t in reversed(range(mask.shape[1])):
            here = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * running
            is_own = mask[:, t] > 0
            after, running = torch.where(is_own, values[:, t], after), torch.where(is_own, here, running)
            found[:, t] = running
        return self.whitened(found, mask, values)

    def over_all(self, rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
        """Generalised advantages of releases up to 0.3, which pass over no token."""
        following = nn.functional.pad(values[:, 1:], (0, 1))
        found, running = torch.zeros_like(values), torch.zeros(len(values), dtype=torch.float64)
        for t in reversed(range(values.shape[1])):
            running = rewards[:, t] + gamma * following[:, t] - values[:, t] + gamma * lam * running
            found[:, t] = running
        return found

    def whitened(self, found: Tensor, mask: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages of mean 0 and deviation 1 over the tokens of `mask`, and the critic's targets."""
        own = found[mask > 0]
        return (found - own.mean()) / (own.var() + 1e-8).sqrt(), found + values

    def gigpo(self, rows: Sequence[Row], sampled: Sequence[Sequence[bool]]) -> Tensor:
        """Advantages [N, R] of verl-agent's GiGPO: of the episode, and of the turn among turns in the same state."""
        options = {name: self.values[f"algorithm.gigpo.{name}"] for name in ("mode", "step_advantage_w")}
        gamma = self.values["algorithm.gamma"]
        turns: list[tuple[int, tuple[int, int], float, tuple[int, str], float]] = []
        for i, row in enumerate(rows):
            before, spans = 0, runs(sampled[i])
            for number, (start, end) in enumerate(spans):
                read = row.response[before:start] if number else row.prompt
                seen = SEEN.search(str(self.tokenizer.decode(read)))
                assert seen is not None
                to_go = sum(gamma**k * one for k, one in enumerate(row.turn_rewards[number:]))
                turns.append((i, (start, end), sum(row.turn_rewards), (row.group, seen[1]), to_go))
                before = end
        by_prompt = _normed([(rows[i].group, whole) for i, _, whole, _, _ in turns], options["mode"])
        by_state = _normed([(state, to_go) for *_, state, to_go in turns], options["mode"])
        found = torch.zeros(_padded(sampled).shape, dtype=torch.float64)
        for (i, (start, end), *_), of_episode, of_turn in zip(turns, by_prompt, by_state, strict=True):
            found[i, start:end] = of_episode + options["step_advantage_w"] * of_turn
        return found

    def policy_loss(self, mask: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> _Loss:
        """Make the loss of a mini-batch with its terms."""
        values = self.values
        low, high = (values.get(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
        both = values[f"{ACTOR}.clip_ratio"]
        low, high = (both if one is None or self.is_old else one for one in (low, high))
        mode = "token-mean" if self.is_old else values[f"{ACTOR}.loss_agg_mode"]

        def loss(mini: Sequence[int], rows: Sequence[Row]) -> tuple[Tensor, dict[str, float]]:
            width = slice(max(len(row.response) for row in rows))
            part, was, advantage = (one[mini, width] for one in (mask, old, advantages))
            logprobs, entropy = self.logprobs(self.policy, rows)
            ratio = (logprobs - was).exp()
            by_token = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
            if not self.is_old:
                bound = -advantage * values[f"{ACTOR}.clip_ratio_c"]
                by_token = torch.where(advantage < 0, torch.minimum(by_token, bound), by_token)
            total = gradient = aggregated(by_token, part, mode)
            terms = {"actor/pg_loss": float(gradient.detach())}
            total = total - values[f"{ACTOR}.entropy_coeff"] * aggregated(entropy, part, mode)
            if values[f"{ACTOR}.use_kl_loss"]:
                apart = aggregated(kl(logprobs, ref[mini, width], values[f"{ACTOR}.kl_loss_type"]), part, mode)
                terms["actor/kl_loss"] = float(apart.detach())
                total = total + values[f"{ACTOR}.kl_loss_coef"] * apart
            return total, terms

        return loss

    def value_loss(self, mask: Tensor, before: Tensor, returns: Tensor) -> _Loss:
        """Make the critic's loss of a mini-batch."""
        bound = self.values.get("critic.cliprange_value", 0.5)

        def loss(mini: Sequence[int], rows: Sequence[Row]) -> tuple[Tensor, dict[str, float]]:
            width = slice(max(len(row.response) for row in rows) + 1)
            part, was, target = (one[mini, width] for one in (mask, before, returns))
            assert self.critic is not None
            now = self.critic(rows)
            near = was + (now - was).clamp(-bound, bound)
            found = 0.5 * aggregated(torch.maximum((now - target) ** 2, (near - target) ** 2), part, "token-mean")
            return found, {"critic/vf_loss": float(found.detach())}

        return loss

    def fit(self, role: str, number: int, rows: Sequence[Row], found: Found, loss: _Loss) -> None:
        """Take the optimizer steps of a role, and add their means to the step's numbers."""
        model, optimizer, name = self.models[role], self.optimizers[role], role.split(".")[-1]
        rate, rising = self.rate(role, number), self.warm_up(role)
        for group in optimizer.param_groups:
            soon = RATES in self.here and number <= rising
            group["lr"] = self.values[f"{role}.optim.lr"] * number / (rising + 1) if soon else rate
        taken: list[dict[str, float]] = []
        for mini in self.mini_batches(role, len(rows)):
            optimizer.zero_grad()
            total, terms = loss(mini, [rows[i] for i in mini])
            total.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            taken.append(terms | {f"{name}/grad_norm": float(norm)})
            self.taken.append(role)
        found.numbers |= {one: mean(terms[one] for terms in taken) for one in taken[0]}
        found.numbers[f"{name}/lr"] = rate

    def mini_batches(self, role: str, rows: int) -> Iterator[list[int]]:
        """Split a batch of trajectories in its order, in the unit that the release counts in."""
        size = self.values[f"{ACTOR}.ppo_mini_batch_size"]
        if role == "critic":
            size = self.values.get("critic.ppo_mini_batch_size", size)
        n = self.values[f"{ROLLOUT}.n"]
        size *= 1 if self.release == "search_r1" or (role == "critic" and self.is_old) else n
        for _ in range(1 if self.is_old else self.values[f"{ACTOR}.ppo_epochs"]):
            for start in range(0, rows, size):
                yield list(range(start, min(start + size, rows)))

    def warm_up(self, role: str) -> int:
        """Steps of the warm-up."""
        steps = 0 if self.is_old else self.values.get(f"{role}.optim.lr_warmup_steps") or 0
        part = self.values.get(f"{role}.optim.lr_warmup_steps_ratio") or 0.0
        return int(steps if steps > 0 else part * self.total_steps)

    def rate(self, role: str, number: int) -> float:
        """Learning rate of a step: verl's schedulers start at 0 and step after the update."""
        optim, rising = f"{role}.optim", self.warm_up(role)
        style = self.values.get(f"{optim}.lr_scheduler_type")
        rate = float(self.values[f"{optim}.lr"])
        if number <= rising:
            return rate * (number - 1) / rising
        if self.is_old or style in (None, "constant"):
            return rate
        least = self.values.get(f"{optim}.min_lr_ratio") or 0.0
        fallen = 0.5 * (1 + math.cos(math.pi * (number - 1 - rising) / max(1, self.total_steps - rising)))
        return rate * (least + (1 - least) * fallen)

    def validations(self) -> list[int]:
        """Steps after which validation runs, 0 before the first."""
        every, last = self.values["trainer.test_freq"], self.total_steps
        due = [one for one in range(1, last) if every > 0 and one % every == 0]
        return [0, *due, *([last] if self.is_old or every > 0 else [])]

    def last_step(self) -> int:
        return self.total_steps - 1 if self.is_old else self.total_steps


_Loss = Callable[[Sequence[int], Sequence[Row]], tuple[Tensor, dict[str, float]]]


class _Critic(nn.Module):
    """A backbone and a head whose weights are 0 at first, as the run's are."""

    def __init__(self, policy: Path) -> None:
        super().__init__()
        self.base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64).model
        self.head = nn.Linear(self.base.config.hidden_size, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.head.weight)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Values of the states before the response's tokens, and of the one after the last, [N, R + 1]."""
        ids, starts = _ids(rows)
        return _responses(self.head(self.base(ids).last_hidden_state)[..., 0], starts, rows, 1)


def runs(sampled: Sequence[bool]) -> list[tuple[int, int]]:
    """List where each of the policy's turns begins and ends."""
    edges = [i for i, (was, now) in enumerate(zip([False, *sampled], [*sampled, False], strict=True)) if was != now]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _normed(turns: Sequence[tuple[object, float]], mode: str) -> list[float]:
    """Compare each number with those of its group."""
    groups: dict[object, list[float]] = {}
    for group, number in turns:
        groups.setdefault(group, []).append(number)
    spread = {
        group: stdev(one) + 1e-6 if mode == "mean_std_norm" and len(one) > 1 else 1.0 for group, one in groups.items()
    }
    return [(number - mean(groups[group])) / spread[group] for group, number in turns]


def kl(logprobs: Tensor, ref: Tensor, kind: str) -> Tensor:
    """Estimate the divergence from the reference by token."""
    apart = logprobs - ref
    if kind in ("kl", "k1"):
        return apart
    if kind == "abs":
        return apart.abs()
    return 0.5 * apart**2 if kind in ("mse", "k2") else ((-apart).exp() + apart - 1).clamp(-10, 10)


def aggregated(by_token: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Take the mean of a mini-batch's tokens [N, R]."""
    by_row, lengths = (by_token * mask).sum(1), mask.sum(1)
    if mode == "token-mean":
        return by_row.sum() / lengths.sum()
    by_row = by_row / lengths if mode == "seq-mean-token-mean" else by_row
    return by_row.sum() / (lengths > 0).sum()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999), weight_decay=0.01)


def _ids(rows: Sequence[Row]) -> tuple[Tensor, list[int]]:
    """Whole sequences, padded at their ends, and where their responses begin."""
    whole = [torch.tensor(row.prompt + row.response) for row in rows]
    return nn.utils.rnn.pad_sequence(whole, batch_first=True), [len(row.prompt) for row in rows]


def _responses(shifted: Tensor, starts: Sequence[int], rows: Sequence[Row], further: int = 0) -> Tensor:
    """Take responses [N, R] out of columns whose entry t belongs to token t + 1; with `further`, entries after them."""
    parts = [
        shifted[i, start - 1 : start - 1 + len(row.response) + further]
        for i, (start, row) in enumerate(zip(starts, rows, strict=True))
    ]
    return nn.utils.rnn.pad_sequence(parts, batch_first=True)


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def _unpadded(columns: Tensor, rows: Sequence[Row]) -> list[list[float]]:
    return [columns[i, : len(row.response)].tolist() for i, row in enumerate(rows)]
