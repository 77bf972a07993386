"""Attention of packed sequences: the function that Hugging Face models call, and how it runs on each device.

The model is fed one row of packed tokens. A layout object travels to every layer through the forward's keyword
arguments; unlike a context variable, they are still there when gradient checkpointing runs the layer again. The name is
registered with transformers as an attention implementation but not as a mask implementation, for which transformers
makes no mask at all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad
from transformers import AttentionInterface, Cache

from agentrl.model.attend import Rule, attend_by_node, sink_share
from agentrl.model.cpu.tree_attention import TreeAttention
from agentrl.model.layout import PackedLayout

IMPLEMENTATION = "agentrl_packed"
LAYOUT = "agentrl_layout"
"""Name of the forward's keyword argument that carries the layout."""
BLOCK = 128
"""Tokens of a block of flex attention's masks."""
PROGRAMS = 64
"""Most programs that torch compiles of one piece of code before it runs it as it is.

All roles of a process share the code of their layers, and each needs programs with and without a gradient, and for a
few ranges of sizes.
"""

# Keyword arguments of attention functions that change the result and that this one does not implement.
_UNSUPPORTED = ("position_bias", "indices")

# torch 2.11 takes fewer heads of keys than of queries without a flag; later versions need the flag.
_varlen = (
    functools.partial(varlen_attn, enable_gqa=True)
    if "enable_gqa" in inspect.signature(varlen_attn).parameters
    else functools.partial(varlen_attn)
)

ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of a score, its batch, head, query and key, all scalars."""


class Flex(Protocol):
    """torch's flex attention, compiled or not."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: ScoreMod | None,
        block_mask: BlockMask,
        scale: float,
        enable_gqa: bool,
        *,
        return_aux: AuxRequest,
    ) -> tuple[torch.Tensor, AuxOutput]:
        """Attend: query [B, H, P, D], key and value [B or 1, K, L, D] -> [B, H, P, D]."""
        ...


class Mixer(Protocol):
    """A mixer of a layer with a state that runs on from token to token (see `agentrl.model.stateful`)."""

    layer_idx: int
    """Number of its layer, and of the layer's states in a cache of transformers."""

    def run(self, hidden: torch.Tensor, states: Cache | None = None) -> torch.Tensor:
        """Mix the tokens of B sequences of one length, [B, L, W] -> [B, L, W], by the model's own code.

        states: a cache of transformers for these sequences. Its layer `layer_idx` holds the states before the tokens,
        and afterwards the states after them. None: the sequences begin here.
        """
        ...


class AttentionLayout(Protocol):
    """Carries out the attention of one forward pass, whose tokens it knows the arrangement of."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Attend in one layer with P new tokens.

        query [H, P, D], key and value [K, P, D], H a multiple of K -> [P, H, D].
        """
        ...

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Run a mixer with a state over P new tokens: hidden [P, W] -> [P, W]."""
        ...


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks for it: query [1, H, P, D], key [1, K, P, D], value [1, K, P, E] -> [1, P, H, E].

    Keys and values of different width (multi-head latent attention) are filled up with zeros, which change nothing.
    Dropout is never applied: the log-probs of sampling and of the update must agree. Raises ValueError when the model
    wants a feature that is not implemented, or was called without a layout.
    """
    layout = cast(AttentionLayout | None, kwargs.get(LAYOUT))
    if layout is None:
        raise ValueError(
            f"{type(module).__name__}: attention {IMPLEMENTATION!r} was called without {LAYOUT}: either the model was "
            "not called through agentrl.model.packed (for that, model.set_attn_implementation('sdpa')), or its layers "
            "do not hand the forward's keyword arguments to their attention"
        )
    wanted = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None:
        wanted.append("attention_mask")
    if is_causal is False or not getattr(module, "is_causal", True):
        wanted.append("attention to later tokens")
    if wanted:
        raise ValueError(f"{type(module).__name__}: packed attention does not implement {', '.join(wanted)}")
    # Under autocast norms give float32 and projections bfloat16: query and key may have been normed, values are not.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if torch.is_autocast_enabled(query.device.type):  # a norm or a rotation in float32 comes before only some of them
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width, wide = value.shape[-1], max(key.shape[-1], value.shape[-1])
    query, key, value = (x if x.shape[-1] == wide else pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
    layer: int = getattr(module, "layer_idx", 0)
    rule = Rule(scale, sliding_window, softcap, s_aux)
    output = layout.attend(layer, query[0], key[0], value[0], rule)
    return output[None, ..., :width].contiguous(), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


class PackedAttention:
    """Causal attention within the sequences of a `PackedLayout`; differentiable."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self._block_masks: dict[int | None, BlockMask] = {}
        self._offsets: torch.Tensor | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Attend with the layout's P stored tokens: query [H, P, D], key and value [K, P, D] -> [P, H, D]."""
        if rule.window is not None and rule.window >= self.layout.longest:
            rule = Rule(rule.scale, None, rule.softcap, rule.sinks)
        if query.is_cuda:
            exact, width = query.dtype == torch.float32, query.shape[-1]
            capped = rule.softcap is not None or rule.sinks is not None
            if 16 <= width <= 256 and (not self.layout.is_flat or (capped and not exact)):
                return attend_flex(query, key, value, rule, self._block_mask(rule.window), compiled_flex())
            if self.layout.is_flat and not exact and not capped and width % 8 == 0 and width <= 256:
                return self._attend_cuda(query, key, value, rule)
        if query.is_cuda or rule.window is not None or rule.softcap is not None:
            return attend_by_node(self.layout, query, key, value, rule)
        return TreeAttention.apply(query, key, value, rule.sinks, self.layout, rule.scale)

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Run a mixer with a state over each sequence of a flat layout: hidden [P, W] -> [P, W]."""
        assert self.layout.is_flat, "models with such mixers share no beginnings"
        lengths = [end - start for start, end in self.layout.spans]
        return torch.cat([mixer.run(sequence[None])[0] for sequence in hidden.split(lengths)])

    def _attend_cuda(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> torch.Tensor:
        layout = self.layout
        if self._offsets is None:  # once for all layers: the copy waits until the device has done all work before it
            ends = [end for _, end in layout.spans]
            self._offsets = torch.tensor([0, *ends], dtype=torch.int32, device=query.device)
        output = _varlen(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            self._offsets,
            self._offsets,
            layout.longest,
            layout.longest,
            scale=rule.scale,
            window_size=(-1 if rule.window is None else rule.window - 1, 0),
        )
        assert isinstance(output, torch.Tensor)
        return output

    def _block_mask(self, window: int | None) -> BlockMask:
        if window not in self._block_masks:
            self._block_masks[window] = block_mask(self.layout, window)
        return self._block_masks[window]


def block_mask(layout: PackedLayout, window: int | None) -> BlockMask:
    """Build the mask of `attend_flex`: each token sees itself and, of its node and those above, the tokens before it.

    With a `window` it sees only that many of them, itself and those just before it in its sequence. Blocks of tokens
    are compared by their least and greatest numbers, so that no mask of all pairs is ever made.
    """
    positions, size = layout.positions, len(layout.stored)
    below = {start: last for _, last, start, _ in layout.shared}
    lasts = torch.tensor([below.get(start, end) for start, end in layout.spans])
    lengths = torch.tensor([end - start for start, end in layout.spans])
    # Everything below a node follows it: a token is seen from itself on, up to the end of all that is below its node.
    ends = lasts.repeat_interleave(lengths).to(positions.device)

    def seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Decide by places if a query may see a key: scalars int64 (flex attention maps them) -> scalar bool."""
        inside = (query >= key) & (query < ends[key])
        return inside if window is None else inside & (positions[query] - positions[key] < window)

    blocks = -(-size // BLOCK)
    by_block = [pad(numbers, (0, blocks * BLOCK - size)).view(blocks, BLOCK) for numbers in (ends, positions)]
    (least_end, most_end), (least, most) = (numbers.aminmax(dim=1) for numbers in by_block)
    first = torch.arange(0, size, BLOCK, device=positions.device)[:, None]
    earlier = first > first.T
    whole, some = earlier & (least_end >= first + BLOCK), earlier & (most_end > first)
    if window is not None:
        whole &= most[:, None] - least < window
        some &= least[:, None] - most < window
    some = (some & ~whole) | (first == first.T)
    return BlockMask.from_kv_blocks(
        *_listed(some), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(size, size)
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """List the True of each row, as `BlockMask` has them: [B, B] -> counts [1, 1, B], places [1, 1, B, B] int32."""
    places = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], places.int()[None, None]


@functools.cache
def compiled_flex(backend: str = "inductor") -> Flex:
    """Compile torch's flex attention once for all lengths."""
    compiled = torch.compile(flex_attention, dynamic=True, backend=backend)
    # A cap that is a symbolic number has no gradient, and torch 2.11 and 2.13 then fail to trace the backward pass.
    # Past the limit of programs torch would run the plain function, which holds the scores of all pairs of tokens.
    return cast(Flex, torch._dynamo.config.patch(specialize_float=True, recompile_limit=PROGRAMS)(compiled))


def attend_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: Rule,
    mask: BlockMask,
    flex: Flex = flex_attention,
) -> torch.Tensor:
    """Attend by any rule with torch's flex attention; `mask` holds the window.

    query [H, P, D], key and value [K, P, D] -> [P, H, D].
    """
    return attend_flex_rows(query[None], key[None], value[None], rule, mask, flex)[0].transpose(0, 1)


def attend_flex_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule, mask: BlockMask, flex: Flex
) -> torch.Tensor:
    """Attend with torch's flex attention: output [B, H, P, D].

    query [B, H, P, D], key and value [B or 1, K, L, D]; `mask` holds the window.
    """

    def capped(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        """Cap one score, a scalar, softly; flex attention maps this over all scores."""
        assert rule.softcap is not None
        return rule.softcap * torch.tanh(score / rule.softcap)

    output, aux = flex(
        query,
        key,
        value,
        score_mod=None if rule.softcap is None else capped,
        block_mask=mask,
        scale=rule.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=rule.sinks is not None),
    )
    if rule.sinks is None:
        return output
    assert aux.lse is not None
    sinks = rule.sinks.view(query.shape[1], -1)  # of heads, or of heads and the queries that stand for their groups
    return output * sink_share(aux.lse, sinks)[..., None].to(output.dtype)
