"""What is trained: a Hugging Face model as a map from packed sequences to log-probs, or to values."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.model.packed import hidden_states, token_logprobs


class PolicyModel(nn.Module):
    """Log-probs of tokens under `base`, a causal language model.

    With `autocast` the forward pass computes in bfloat16 on float32 weights.
    """

    def __init__(self, base: PreTrainedModel, *, autocast: bool = False) -> None:
        super().__init__()
        self.base = base
        self._autocast = autocast

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        *,
        needed: torch.Tensor,
        temperature: float,
        with_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `token_logprobs`: ids [T], offsets [N + 1], needed [T] bool -> log-probs [T], entropies [T] or None."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._autocast):
            return token_logprobs(
                self.base, ids, offsets, temperature=temperature, with_entropy=with_entropy, needed=needed
            )


class ValueModel(nn.Module):
    """The critic: the backbone of a causal language model, without its vocabulary head, and one value a token.

    The value head starts at zero, so the first values are 0.
    """

    def __init__(self, base: PreTrainedModel, *, autocast: bool = False) -> None:
        super().__init__()
        backbone = base.base_model
        assert isinstance(backbone, PreTrainedModel)
        self.base = backbone
        config = base.config.get_text_config()
        self.value_head = nn.Linear(config.hidden_size, 1, bias=False, device=base.device)
        nn.init.zeros_(self.value_head.weight)
        self._autocast = autocast

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[T] float32: entry t is the value of the state before ids[t], the tokens that come before it in its
        sequence; 0 at each sequence's first token. Aligned as log-probs are: the value that a policy token's
        advantage is measured against stands beside it.
        """
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._autocast):
            hidden = hidden_states(self.base, ids, offsets)
        after = self.value_head(hidden.float())[:, 0]
        before = torch.cat([after.new_zeros(1), after[:-1]])
        first = torch.zeros_like(ids, dtype=torch.bool)
        first[offsets[:-1]] = True
        return before.masked_fill(first, 0.0)
