"""What is trained: a Hugging Face model as a map from packed sequences to log-probs, or to values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from agentrl.config.sections.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.model.checkpoint_names import CheckpointNames
from agentrl.model.packed import check_packed_attention, stored_hidden_states, token_logprobs
from agentrl.model.sharded_load import open_model
from agentrl.model.vision import features_of, sample_image, takes_images, vision_tower
from agentrl.parallel.collectives import full, world_size
from agentrl.trajectory.images import Images

if TYPE_CHECKING:
    from agentrl.model.lora import Lora

Params = Mapping[str, nn.Parameter]


class PolicyModel(nn.Module):
    """Log-probs of tokens under `base`, a causal language model.

    With `autocast` the forward pass computes in bfloat16 on float32 weights. `lora`: the adapters that are in `base`.
    `group`: the ranks that split the tokens of each forward, all of which must be given the same.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        *,
        autocast: bool = False,
        lora: Lora | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.lora = lora
        self.autocast = autocast
        self._group = group

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        *,
        needed: torch.Tensor,
        temperature: float,
        with_entropy: bool = False,
        images: Images | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `token_logprobs`: ids [T], offsets [N + 1], needed [T] bool -> log-probs [T], entropies [T] or None."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.autocast):
            nothing = _step_of_vision(self.base, images)
            logprobs, entropy = token_logprobs(
                self.base,
                ids,
                offsets,
                temperature=temperature,
                with_entropy=with_entropy,
                needed=needed,
                images=images,
                group=self._group,
            )
        return logprobs if nothing is None else logprobs + nothing, entropy

    def check_attention(self) -> None:
        """Raises ConfigError when the packed forward does not compute what the model's own does."""
        with torch.autocast(self.base.device.type, torch.bfloat16, enabled=self.autocast):
            check_packed_attention(self.base)

    def tensors(self, params: Params) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, whole, by its name in the model, from all parameters `params`; adapters are merged into theirs.

        Made one at a time, in the precision they are computed in. Every rank must read together.
        """
        if self.lora is not None:
            return self.lora.merged(params)
        return ((name, full(param.detach())) for name, param in params.items())

    def named_tensors(self, params: Params) -> Iterator[tuple[str, torch.Tensor]]:
        """As `tensors`, by the names and in the shapes that checkpoints have (see `CheckpointNames`)."""
        return CheckpointNames(self.base, self._plain(params)).named(self.tensors(params))

    def shapes(self, params: Params) -> dict[str, tuple[int, ...]]:
        """Of what `named_tensors` gives."""
        plain = self._plain(params)
        return CheckpointNames(self.base, plain).shapes({name: tuple(param.shape) for name, param in plain.items()})

    def _plain(self, params: Params) -> Params:
        return params if self.lora is None else self.lora.plain(params)

    def mark(self, params: Params) -> dict[str, Any]:
        """What a checkpoint of the trained parameters alone means nothing without (see `save_state`)."""
        return {} if self.lora is None else self.lora.mark(params)


def _step_of_vision(base: PreTrainedModel, images: Images | None) -> torch.Tensor | None:
    """Where the model is sharded and takes images: run its vision tower also without any; 0 with its gradient.

    All ranks gather its weights together, and other ranks may have images.
    """
    if images is not None or world_size() == 1 or not takes_images(base):
        return None
    blank = sample_image(base)
    return 0.0 * features_of(base, blank.patches, np.array([blank.grid])).rows.float().sum()


def freeze_vision(base: PreTrainedModel) -> None:
    """Train nothing of its vision tower. Raises ConfigError where it has none."""
    tower = vision_tower(base)
    if tower is None:
        raise ConfigError(
            f"actor_rollout_ref.actor.freeze_vision_tower=true has no effect: {type(base).__name__} takes no images"
        )
    tower.requires_grad_(False)


def load_policy(
    config: ModelConfig,
    *,
    device: str | torch.device,
    seed: int,
    freeze_vision_tower: bool = False,
    group: dist.ProcessGroup | None = None,
) -> PolicyModel:
    """The policy to be trained, with adapters (`seed`: of their start) if the config has them. Raises ConfigError.

    What is trained is float32; weights beside adapters are not, and stay as the config has them.
    """
    base = open_model(
        config.path,
        dtype=config.dtype if config.lora_rank else "float32",
        device=device,
        trust_remote_code=config.trust_remote_code,
    )
    if freeze_vision_tower:
        freeze_vision(base)
    lora = None
    if config.lora_rank:
        from agentrl.model.lora import Lora  # peft costs half a second

        lora = Lora(base, config, seed)
    return PolicyModel(base, autocast=config.dtype == "bfloat16", lora=lora, group=group)


class ValueModel(nn.Module):
    """The critic: the backbone of a causal language model, without its vocabulary head, and one value a token.

    The value head starts at zero, so the first values are 0.
    """

    def __init__(
        self, base: PreTrainedModel, *, autocast: bool = False, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        backbone = base.base_model
        assert isinstance(backbone, PreTrainedModel)
        self.base = backbone
        config = base.config.get_text_config()
        device = None if base.device.type == "meta" else base.device  # no checkpoint has a value head to read
        self.value_head = nn.Linear(config.hidden_size, 1, bias=False, device=device)
        nn.init.zeros_(self.value_head.weight)
        self.autocast = autocast
        self._group = group

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor, images: Images | None = None) -> torch.Tensor:
        """[T] float32: entry t is the value of the state before ids[t], the tokens that come before it in its
        sequence; 0 at each sequence's first token. Aligned as log-probs are: the value that a policy token's
        advantage is measured against stands beside it.
        """
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.autocast):
            nothing = _step_of_vision(self.base, images)
            hidden, layout, part = stored_hidden_states(self.base, ids, offsets, images, self._group)
        after = part.spread(self.value_head(hidden.float())[:, 0])[layout.expand]
        after = after if nothing is None else after + nothing
        before = torch.cat([after.new_zeros(1), after[:-1]])
        first = torch.zeros_like(ids, dtype=torch.bool)
        first[offsets[:-1]] = True
        return before.masked_fill(first, 0.0)

    def check_attention(self) -> None:
        """As `PolicyModel.check_attention`."""
        with torch.autocast(self.base.device.type, torch.bfloat16, enabled=self.autocast):
            check_packed_attention(self.base)
