"""Sampling of one token a row, for all rows at once, from random numbers that depend on seed and position alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentrl.engines.contract import SamplingParams

Words = npt.NDArray[np.uint64]
_GOLDEN, *_FACTORS = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SIGNED = [int(word.astype(np.int64)) for word in (_GOLDEN, *_FACTORS)]
"""The same words as int64, in which products wrap alike."""


def uniforms(seeds: Words, positions: Words) -> npt.NDArray[np.float64]:
    """Hash (seed, position) to a number in [0, 1): both uint64 [N] -> float64 [N].

    The mixing function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) applied to the seed and then to the seed's
    stream at the position. 40 bits are kept, so that u * total < total holds in float64.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * _FACTORS[0]
    z = (z ^ (z >> np.uint64(27))) * _FACTORS[1]
    return z ^ (z >> np.uint64(31))


def uniforms_on_device(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hash as `uniforms` does, bit for bit, where the tensors are: both int64 [N] -> float64 [N]."""
    golden = _SIGNED[0]
    mixed = _mix_on_device(_mix_on_device(seeds + golden) + (positions + 1) * golden)
    return _shifted(mixed, 24).double() * 2.0**-40


def _mix_on_device(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, 30)) * _SIGNED[1]
    z = (z ^ _shifted(z, 27)) * _SIGNED[2]
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift the words of int64 [N] right, as if they had no sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


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
        tokens = _invert(logprobs.exp(), numbers)
        if self.cut is not None:
            tokens[self.cut] = _draw_among_likeliest(logprobs[self.cut], numbers[self.cut], self.top_p, self.top_k)
        return tokens


def sample_rows(
    logits: torch.Tensor,
    numbers: torch.Tensor,
    temperatures: torch.Tensor,
    greedy: torch.Tensor,
    likeliest: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample as `Sampler.sample` does, without a look at the parameters: tokens [N] int64, log-probs [N] float32.

    logits [N, V] float32, numbers [N, 1] float64, temperatures [N, 1] float32, greedy [N] bool. likeliest: top-p
    [N, 1] float64 and top-k [N, 1] int64 of each row; None where no row has one of them.
    """
    logits = logits / temperatures
    logprobs = logits.log_softmax(-1)
    tokens = _invert(logprobs.exp(), numbers)
    if likeliest is not None:
        top_p, top_k = likeliest
        cut = ((top_p < 1) | (top_k > 0))[:, 0]
        tokens = torch.where(cut, _draw_among_likeliest(logprobs, numbers, top_p, top_k), tokens)
    tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _draw_among_likeliest(
    logprobs: torch.Tensor, numbers: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """Draw from the tokens that top-p and top-k leave: log-probs [N, V], all others [N, 1] -> tokens [N]."""
    ranked, order = logprobs.sort(stable=True, dim=-1, descending=True)
    weights = ranked.double().exp()
    # A token stays while the more probable ones before it have not reached top_p, so the first always stays.
    outside = weights.cumsum(-1) - weights >= top_p
    ranks = torch.arange(weights.shape[1], device=weights.device)
    outside |= (top_k > 0) & (ranks >= top_k)
    place = _invert(weights.masked_fill(outside, 0.0), numbers)
    return order.gather(1, place[:, None])[:, 0]


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Invert the cumulated weights [N, V] at the fractions [N, 1] of their sums -> [N]. In float64: V may be large."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(cumulated, numbers * cumulated[:, -1:], right=True)
    return place[:, 0].clamp_(max=weights.shape[1] - 1)
