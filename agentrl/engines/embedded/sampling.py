"""Sampling of one token a row, for all rows at once, from random numbers that depend on seed and position alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentrl.engines.contract import SamplingParams

Words = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Words, positions: Words) -> npt.NDArray[np.float64]:
    """Hash (seed, position) to a number in [0, 1): both uint64 [N] -> float64 [N].

    The mixing function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) applied to the seed and then to the seed's
    stream at the position. 40 bits are kept, so that u * total < total holds in float64.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Sampler:
    """Samples one token for each of N rows, with the parameters of each, step after step."""

    def __init__(self, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> None:
        """`seeds`: one a row; only their lowest 64 bits count."""
        self.device = device
        self.seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
        greedy = [p.temperature == 0 for p in params]
        self.greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self.all_greedy = all(greedy)
        temperatures = [p.temperature or 1.0 for p in params]
        self.temperatures = None
        if any(t != 1.0 for t in temperatures):
            self.temperatures = torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
        cut = [i for i, p in enumerate(params) if (p.top_p < 1 or p.top_k > 0) and not greedy[i]]
        self.cut = torch.tensor(cut, device=device) if cut else None
        self.top_p = torch.tensor([params[i].top_p for i in cut], dtype=torch.float64, device=device)[:, None]
        self.top_k = torch.tensor([params[i].top_k for i in cut], device=device)[:, None]

    def sample(self, logits: torch.Tensor, positions: Sequence[int]) -> tuple[list[int], list[float]]:
        """Sample N tokens; return them and their log-probs.

        logits: [N, V] float32. positions: N places of the new tokens in their sequences. Log-probs are log
        softmax(logits / temperature), not renormalised for top-p and top-k; greedy rows have temperature 1.
        """
        if self.temperatures is not None:
            logits = logits / self.temperatures
        logprobs = logits.log_softmax(-1)
        if self.all_greedy:
            tokens = logits.argmax(-1)
        else:
            numbers = uniforms(self.seeds, np.array(positions, dtype=np.uint64))
            tokens = self._draw(logprobs, torch.from_numpy(numbers).to(self.device)[:, None])
            if self.greedy is not None:
                tokens = torch.where(self.greedy, logits.argmax(-1), tokens)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        return tokens.tolist(), chosen.tolist()

    def _draw(self, logprobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Find the token at which the cumulated probability first exceeds the row's number: [N, V], [N, 1] -> [N]."""
        if self.cut is None:
            return _invert(logprobs.exp(), numbers)
        tokens = _invert(logprobs.exp(), numbers)
        ranked, order = logprobs[self.cut].sort(stable=True, dim=-1, descending=True)
        weights = ranked.double().exp()
        # A token stays while the more probable ones before it have not reached top_p, so the first always stays.
        outside = weights.cumsum(-1) - weights >= self.top_p
        ranks = torch.arange(weights.shape[1], device=self.device)
        outside |= (self.top_k > 0) & (ranks >= self.top_k)
        place = _invert(weights.masked_fill(outside, 0.0), numbers[self.cut])
        tokens[self.cut] = order.gather(1, place[:, None])[:, 0]
        return tokens


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Invert the cumulated weights [N, V] at the fractions [N, 1] of their sums -> [N]. In float64: V may be large."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(cumulated, numbers * cumulated[:, -1:], right=True)
    return place[:, 0].clamp_(max=weights.shape[1] - 1)
