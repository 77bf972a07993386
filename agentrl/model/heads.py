"""Policy, value and score models: Hugging Face models from packed sequences to log-probs, values, or scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel

from agentrl.config.sections.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.model.checkpoint_names import CheckpointNames
from agentrl.model.packed import (
    check_packed_attention,
    empty_model,
    predicting_states,
    score_states,
    stored_hidden_states,
    token_logprobs,
)
from agentrl.model.routing import Routes, follow_routes
from agentrl.model.scores import Compare, Needs, TokenScores
from agentrl.model.sharded_load import open_model
from agentrl.model.vision import features_of, sample_image, takes_images, vision_tower
from agentrl.parallel.collectives import full, world_size
from agentrl.system.json_value import JSON
from agentrl.trajectory.images import Images

if TYPE_CHECKING:
    from agentrl.model.lora import Lora

Params = Mapping[str, nn.Parameter]


class PolicyModel(nn.Module):
    """Log-probs of tokens under `base`, a causal language model.

    With `autocast` the forward pass computes in bfloat16 on float32 weights. `lora`: the adapters in `base`. `group`:
    the ranks that split the tokens of each forward pass; all must be given the same tokens. `experts`: the result of
    `follow_routes` for `base`.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        *,
        autocast: bool = False,
        lora: Lora | None = None,
        group: dist.ProcessGroup | None = None,
        experts: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.lora = lora
        self.experts = experts
        self.autocast = autocast
        self._group = group

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        *,
        needed: torch.Tensor,
        temperature: float,
        needs: Needs = frozenset(),
        compare: Compare | None = None,
        images: Images | None = None,
        experts: torch.Tensor | None = None,
    ) -> TokenScores:
        """Score tokens as `token_logprobs` does; ids [T] int64, offsets [N + 1] int64, needed [T] bool, experts
        [T, L, k] of an integer type.
        """
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.autocast):
            nothing = step_of_vision(self.base, images)
            scores = token_logprobs(
                self.base,
                ids,
                offsets,
                temperature=temperature,
                needs=needs,
                compare=compare,
                needed=needed,
                images=images,
                experts=experts,
                group=self._group,
            )
        return scores if nothing is None else scores._replace(logprobs=scores.logprobs + nothing)

    def states(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        *,
        needed: torch.Tensor,
        images: Images | None = None,
        experts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the last hidden states [M, H] from which the needed tokens are predicted, where the model is whole.

        `forward` is these states and then `score`.
        """
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.autocast):
            routes = None if experts is None else Routes(experts, with_sums=False)
            return predicting_states(self.base, ids, offsets, needed, images, None, routes)[0]

    def score(
        self,
        states: torch.Tensor,
        ids: torch.Tensor,
        places: torch.Tensor,
        *,
        temperature: float,
        needs: Needs = frozenset(),
        compare: Compare | None = None,
    ) -> TokenScores:
        """Score the tokens at places [M] int64 of ids [T] int64 by their states [M, H]."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.autocast):
            return score_states(self.base, states, ids, places, temperature=temperature, needs=needs, compare=compare)

    def check_attention(self) -> None:
        """Raise ConfigError when the packed forward pass differs from the model's own."""
        with torch.autocast(self.base.device.type, torch.bfloat16, enabled=self.autocast):
            check_packed_attention(self.base)

    def tensors(self, params: Params) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight [S], whole in its shape S and with its adapters merged, by its name in the model.

        `params`: all parameters. One weight is made at a time, in its own precision; every rank must read together.
        """
        if self.lora is not None:
            return self.lora.merged(params)
        return ((name, full(param.detach())) for name, param in params.items())

    def named_tensors(self, params: Params, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights [S] of `tensors` with names and shapes S as in checkpoints (see `CheckpointNames`).

        merged: with their adapters.
        """
        tensors = self.tensors(params) if merged or self.lora is None else self.lora.unmerged(params)
        return CheckpointNames(self.base, self._plain(params)).named(tensors)

    def shapes(self, params: Params) -> dict[str, tuple[int, ...]]:
        """Find the names and shapes that `named_tensors` would yield."""
        plain = self._plain(params)
        return CheckpointNames(self.base, plain).shapes({name: tuple(param.shape) for name, param in plain.items()})

    def _plain(self, params: Params) -> Params:
        return params if self.lora is None else self.lora.plain(params)

    def mark(self, params: Params) -> dict[str, JSON]:
        """Describe the frozen part of the model, which a checkpoint of the trained parameters needs, too.

        See `save_state`. Empty without adapters.
        """
        return {} if self.lora is None else self.lora.mark(params)


def step_of_vision(base: PreTrainedModel, images: Images | None) -> torch.Tensor | None:
    """Run the vision tower of a sharded model on a made-up image where a rank's share has no image.

    All ranks gather the tower's weights together, and other ranks may have images: a rank that left it out would make
    them wait forever. Returns a scalar 0 with the tower's gradient, or None where nothing had to be run.
    """
    if images is not None or world_size() == 1 or not takes_images(base):
        return None
    blank = sample_image(base)
    return 0.0 * features_of(base, blank.patches, np.array([blank.grid])).rows.float().sum()


def freeze_vision(base: PreTrainedModel) -> None:
    """Freeze the vision tower of a model. Raises ConfigError for a model without one."""
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
    follows_routes: bool = False,
    group: dist.ProcessGroup | None = None,
) -> PolicyModel:
    """Load the policy to be trained, with adapters drawn by `seed` if the config has them. Raises ConfigError.

    Trained weights are float32. Frozen weights next to adapters stay in the config's dtype.
    """
    base = open_model(
        config.path,
        dtype=config.dtype if config.lora_rank else "float32",
        device=device,
        trust_remote_code=config.trust_remote_code,
        override=config.override_config,
    )
    if freeze_vision_tower:
        freeze_vision(base)
    experts = follow_routes(base) if follows_routes else None
    lora = None
    if config.lora_rank:
        from agentrl.model.lora import Lora  # peft costs half a second

        lora = Lora(base, config, seed)
    return PolicyModel(base, autocast=config.dtype == "bfloat16", lora=lora, group=group, experts=experts)


def check_options(config: ModelConfig, *, freeze_vision_tower: bool = False, follows_routes: bool = False) -> None:
    """Raise the ConfigError that `load_policy` would raise for its options; no weights are read."""
    if not (freeze_vision_tower or follows_routes or config.lora_rank):
        return
    base = empty_model(config.path, trust_remote_code=config.trust_remote_code, override=config.override_config)
    if freeze_vision_tower:
        freeze_vision(base)
    if follows_routes:
        follow_routes(base)
    if config.lora_rank:
        from agentrl.model.lora import Lora

        Lora(base, config, 0, quiet=True)


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
        """Compute values: ids [T] int64, offsets [N + 1] int64 -> [T] float32.

        Entry t is the value of the state before ids[t], that is, of the tokens before it in its sequence; 0 at each
        sequence's first token. So values are aligned with log-probs: a token's baseline has the token's index.
        """
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.autocast):
            nothing = step_of_vision(self.base, images)
            hidden, layout, part = stored_hidden_states(self.base, ids, offsets, images, self._group)
        after = part.spread(self.value_head(hidden.float())[:, 0])[layout.expand]
        after = after if nothing is None else after + nothing
        before = torch.cat([after.new_zeros(1), after[:-1]])
        first = torch.zeros_like(ids, dtype=torch.bool)
        first[offsets[:-1]] = True
        return before.masked_fill(first, 0.0)

    def check_attention(self) -> None:
        with torch.autocast(self.base.device.type, torch.bfloat16, enabled=self.autocast):
            check_packed_attention(self.base)


class ScoreModel(nn.Module):
    """A reward model: the backbone of a language model, and a linear head that scores whole conversations."""

    def __init__(
        self,
        base: PreTrainedModel,
        score: nn.Linear,
        *,
        autocast: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """base: the backbone; the others as of `PolicyModel`."""
        super().__init__()
        self.base, self.score, self.autocast, self._group = base, score, autocast, group

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Score ids [T] int64, offsets [N + 1] int64: [T] float32, the score at each sequence's last token, else 0."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.autocast):
            hidden, layout, part = stored_hidden_states(self.base, ids, offsets, None, self._group)
        found = part.spread(self.score(hidden.to(self.score.weight.dtype))[:, 0].float())[layout.expand]
        last = torch.zeros_like(ids, dtype=torch.bool)
        last[offsets[1:] - 1] = True
        return torch.where(last, found, 0.0)

    def check_attention(self) -> None:
        with torch.autocast(self.base.device.type, torch.bfloat16, enabled=self.autocast):
            check_packed_attention(self.base)


def make_score_model(base: PreTrainedModel, *, autocast: bool, group: dist.ProcessGroup | None) -> ScoreModel:
    """Put a head on the backbone of a causal language model. It starts at zero, so the first scores are 0.

    Raises ConfigError when transformers has no class that such a model could be read by.
    """
    classifier_class(base)
    backbone = base.base_model
    assert isinstance(backbone, PreTrainedModel)
    device = None if base.device.type == "meta" else base.device  # no checkpoint has such a head to read
    score = nn.Linear(base.config.get_text_config().hidden_size, 1, bias=False, device=device)
    nn.init.zeros_(score.weight)
    return ScoreModel(backbone, score, autocast=autocast, group=group)


def classifier_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Find the class of sequence classifiers that the model's config belongs to. Raises ConfigError."""
    found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ConfigError(
            f"model.path={model.config.name_or_path}: transformers has no sequence classifier for "
            f"{type(model.config).__name__}, as which a reward model is read. Take another model"
        )
    return found
