"""Causal language models on packed sequences, without padding: hidden states and log-probs of tokens.

T tokens of N sequences lie in a row; offsets [N + 1] say where each begins. No sequence sees another, and positions
restart in each. Shared prefixes of sequences are computed once (see `agentrl.model.layout`); the result and the
gradient equal those from separate sequences.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from agentrl.config.declaration import Computed
from agentrl.errors import ConfigError
from agentrl.model.attend import Rule
from agentrl.model.attention import IMPLEMENTATION, LAYOUT, AttentionLayout, PackedAttention
from agentrl.model.experts import route_in_float32
from agentrl.model.head_product import HeadScale, head_of, keep_scale
from agentrl.model.layout import PackedLayout, flat_layout
from agentrl.model.read_config import OVERRIDE_KEY, read_config
from agentrl.model.routing import ROUTES, Routes
from agentrl.model.scores import Compare, Needs, TokenScores
from agentrl.model.stateful import KEEPS_STATE, keeps_state, separate_states, stateful_mixers, unbound_time_steps
from agentrl.model.tree_layout import pays, tree_layout
from agentrl.model.ulysses import Slice
from agentrl.model.vision import (
    PlacedFeatures,
    auto_class,
    features_of,
    forward_images,
    image_probe,
    image_rows,
    own_logits,
    rope_positions,
    told_apart,
)
from agentrl.system.json_value import JSON
from agentrl.trajectory.images import Images

if TYPE_CHECKING:
    from transformers.modeling_rope_utils import RopeParameters

_FURTHER: tuple[Computed, ...] = ("entropy", "varentropy", "squared_probs")
"""Scores of a distribution in addition to the log-prob, in the order of `TokenScores`."""
CHUNK_LOGITS, CHUNK_LOGITS_ON_GPU = 1 << 24, 1 << 27
"""Logits kept for the backward pass at once (64 MiB in fp32, on a GPU 512 MiB); more are computed in chunks and again
in backward. Each chunk reads all weights of the head and adds up a gradient as large, which for small chunks would take
a GPU longer than the products."""

_WINDOW = 8
"""Tokens of a window while a model's packed attention is compared with its own."""
_LAYER = re.compile(r"([^0-9]*\.)(\d{1,9})(\..*)")
"""Name of a weight of a layer: the text before its number, the number, the text after."""


def load_model(
    path: str,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    override: Mapping[str, JSON] = {},
) -> PreTrainedModel:
    """Load a Hugging Face causal LM, or a vision-language model, with packed attention and without dropout.

    override: see `read_config`. Raises ConfigError when there is no such model, or when its packed forward does not
    equal its own.
    """
    with loading(path, override):
        config = plain_config(path, trust_remote_code, override)
        read = auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    # What output_loading_info makes of the answer.
    model, report = cast(tuple[PreTrainedModel, Mapping[str, Collection[object]]], read)
    # A critic needs no head, and a folder that was saved without one says so.
    head = None if type(model).__name__ in (config.architectures or ()) else model.get_output_embeddings()
    aside = set() if head is None else {id(weight) for weight in head.parameters()}
    check_fits(path, model, report, {name for name, weight in model.named_parameters() if id(weight) not in aside})
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper loses the signature
    return use_packed_attention(model)


def empty_model(
    path: str, *, dtype: str = "float32", trust_remote_code: bool = False, override: Mapping[str, JSON] = {}
) -> PreTrainedModel:
    """Make the model of `load_model` on the device `meta`, without weights and with its own attention.

    Call `check_packed_attention` once it has its weights. Raises ConfigError when there is no such model.
    """
    with loading(path, override), torch.device("meta"):
        config = plain_config(path, trust_remote_code, override)
        model = auto_class(config).from_config(config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code)
    prepare_own(model)
    return model


def plain_config(path: str, trust_remote_code: bool, override: Mapping[str, JSON]) -> PretrainedConfig:
    """Read the model's config. Raises ConfigError when the weights are quantized."""
    config = read_config(path, override, trust_remote_code=trust_remote_code)
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = dict(quantization).get("quant_method", "quantized")
        raise ConfigError(
            f"{path!r} has weights that cannot be trained ({method}): give a copy of the model in bfloat16 or float32 "
            "(actor_rollout_ref.model.path)"
        )
    return config


def check_fits(
    path: str, model: PreTrainedModel, report: Mapping[str, Collection[object]], wanted: Collection[str]
) -> None:
    """Raise ConfigError where config.json describes another model than the weights of its folder are.

    report: the loader's report on the weights' names. wanted: names of the required weights. Weights of further layers
    are refused, and others that the model has not are left.
    """
    names, config = dict(model.named_parameters()).keys(), model.config.get_text_config()
    layers = config.num_hidden_layers
    known = layers + (getattr(config, "num_nextn_predict_layers", 0) or 0)
    differing = cast(Collection[tuple[str, Sequence[int], Sequence[int]]], report["mismatched_keys"])
    missing = [name for name in cast(Collection[str], report["missing_keys"]) if name in wanted]
    further = [name for name in cast(Collection[str], report["unexpected_keys"]) if _is_of_layer(name, known, names)]
    if differing:
        name, found, expected = min(differing, key=itemgetter(0))
        what = (
            f"{name}: {list(expected)} by config.json, {list(found)} in the weights ({len(differing)} weights differ)"
        )
    elif missing or further:
        there, wants = ("not there", "one") if missing else ("there", "none")
        what = (
            f"{min(missing or further, key=dot_natural_key)}: {wants} by config.json, which has "
            f"num_hidden_layers={layers}, and {there} in the weights ({len(missing or further)} such weights)"
        )
    else:
        return
    raise ConfigError(
        f"{path}: config.json does not fit the weights. {what}. Give the config.json that was saved with these "
        f"weights, and check {OVERRIDE_KEY}"
    )


def _is_of_layer(name: str, first: int, names: Collection[str]) -> bool:
    """Check whether a name belongs to a weight of layer `first` or later, as `names` have one of layer 0."""
    found = _LAYER.fullmatch(name)
    return found is not None and int(found[2]) >= first and f"{found[1]}0{found[3]}" in names


@contextlib.contextmanager
def loading(path: str, override: Mapping[str, JSON] = {}) -> Iterator[None]:
    """Turn errors of loading inside the block into a ConfigError that names `path`, and the overrides of its config."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise ConfigError(
            f"cannot load a causal language model from {path!r}"
            f"{f' with {OVERRIDE_KEY}={dict(override)}' if override else ''}: {error}\n"
            "Give a directory with config.json and safetensors weights (actor_rollout_ref.model.path)."
        ) from error


def use_packed_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Select packed attention for a model made elsewhere, switch dropout off, and check the model for it.

    Raises ConfigError when the packed forward would not compute the same as the model's own forward.
    """
    if model.config.get_text_config()._attn_implementation == IMPLEMENTATION:
        return model
    prepare_own(model)
    check_packed_attention(model)
    return model


def prepare_own(model: PreTrainedModel) -> None:
    """Switch dropout off, and have transformers' own layers compute as they are trained and served."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.eval()
    route_in_float32(model)
    unbound_time_steps(model)


def check_packed_attention(model: PreTrainedModel) -> None:
    """Compare the model's own forward with the packed one: logits, or the hidden states of a backbone.

    The model has packed attention from then on. Raises ConfigError when the two differ.
    """
    if any(rope.get("rope_type") == "dynamic" for rope in _rotations(model)):
        raise ConfigError(_unsupported(model, "its dynamic rotary embedding depends on the longest sequence beside it"))
    head = model.get_output_embeddings()
    ids = torch.arange(40, device=model.device) * 7 % model.config.get_text_config().vocab_size
    ids[24:36] = ids[8:20]  # two of the sequences begin alike, so that they share a node of the layout
    offsets = torch.tensor([0, 8, 24, 40])
    layout = flat_layout(offsets, ids.device) if keeps_state(model.config) else make_layout(ids, offsets)
    attention = _RecordingAttention(layout)
    probe = None if head is None else image_probe(model)
    with torch.no_grad(), _exact_products(), _narrow_windows(model):
        select_attention(model, "eager")  # the default, sdpa, leaves out score caps
        own_with_image = None if probe is None else _own_with_image(model, probe)
        given = {"input_ids": ids[8:].view(2, 16), "use_cache": False}
        states = model.base_model(**given).last_hidden_state.flatten(0, 1)
        own = states if head is None else model(**given).logits.flatten(0, 1)
        if head is not None:
            made = head(states)  # not what the head was given, which some models scale before
            keep_scale(model, HeadScale.measured(model.config.get_text_config(), made, own))
        select_attention(model, IMPLEMENTATION)
        run = partial(forward_packed, model, ids[layout.stored], layout.positions, attention)
        try:
            if keeps_state(model.config) and not stateful_mixers(model):
                separate_states(model, run, attention.layers)
            packed = run()[layout.expand[8:]]
            difference = _difference(own, packed if head is None else token_logits(model, packed))
            if probe is not None and own_with_image is not None:
                _check_with_image(model, probe, own_with_image)
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise ConfigError(_unsupported(model, str(error))) from error
    # Written so that a difference of NaN fails, too.
    if not difference <= _tolerance(model):
        layers = model.config.get_text_config().num_hidden_layers
        found = len({*attention.layers, *(mixer.layer_idx for mixer in stateful_mixers(model))})
        why = f"its logits differ by {difference:.2g} of their size"
        if found < layers:
            why += f"; only {found} of its {layers} layers keep sequences apart"
        raise ConfigError(_unsupported(model, why))


@contextlib.contextmanager
def _narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Narrow the model's windows to `_WINDOW` tokens inside the block, so that they act on the sequences compared.

    Some families have the window in the mask that transformers makes, and do not name it to the attention. A window
    that no sequence reaches stays.
    """
    config, limit = model.config.get_text_config(), longest_context(model)
    width = getattr(config, "sliding_window", None)
    owners: list[object] = []
    if isinstance(width, int) and width > _WINDOW and (limit is None or width < limit):
        owners = [one for one in (config, *model.modules()) if vars(one).get("sliding_window") == width]
    try:
        for one in owners:
            setattr(one, "sliding_window", _WINDOW)  # noqa: B010  # mypy knows of no such attribute
        yield
    finally:
        for one in owners:
            setattr(one, "sliding_window", width)  # noqa: B010


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Compute products of float32 matrices in float32 where the process allows TF32, whose rounding hides a leak."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def select_attention(model: PreTrainedModel, name: str) -> None:
    """Select an attention function for the text model. A vision tower keeps its own, which is not causal."""
    parts = [part for part in model.config.sub_configs if getattr(model.config, part) is model.config.get_text_config()]
    model.set_attn_implementation({parts[0]: name} if parts else name)


def _own_with_image(model: PreTrainedModel, probe: tuple[torch.Tensor, Images]) -> torch.Tensor:
    try:
        return own_logits(model, *probe)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(_unsupported(model, f"its own forward takes no image as Qwen2-VL's does: {error}")) from error


def _check_with_image(model: PreTrainedModel, probe: tuple[torch.Tensor, Images], own: torch.Tensor) -> None:
    """Raise ValueError when the packed logits of the probe differ from `own` [24, V]."""
    ids, images = probe
    packed = token_logits(model, hidden_states(model, ids, torch.tensor([0, 8, len(ids)]), images))[8:]
    if not _difference(own, packed) <= _tolerance(model):
        raise ValueError(f"its logits with an image differ by {_difference(own, packed):.2g} of their size")


def _difference(own: torch.Tensor, packed: torch.Tensor) -> float:
    return float((own - packed).abs().max() / own.abs().max().clamp(min=1e-6))


def _tolerance(model: PreTrainedModel) -> float:
    exact = model.dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type)
    return 1e-4 if exact else 0.05


class _RecordingAttention(PackedAttention):
    """Records which layers attend."""

    def __init__(self, layout: PackedLayout) -> None:
        super().__init__(layout)
        self.layers: list[int] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Attend as `PackedAttention.attend`: query [H, P, D], key and value [K, P, D] -> [P, H, D]."""
        self.layers.append(layer)
        return super().attend(layer, query, key, value, rule)


def _unsupported(model: PreTrainedModel, why: str) -> str:
    return (
        f"{type(model).__name__} cannot be run on packed sequences: {why}\n"
        "Supported are causal language models of transformers with softmax attention (Qwen2, Qwen3, Llama, Mistral, "
        "Gemma, gpt-oss, DeepSeek-V3 and alike, dense or mixture of experts), and with layers that have a state "
        "(Qwen3.5, Qwen3-Next, LFM2, Nemotron-H, Granite 4, Falcon-H1, Kimi-Linear, OLMo hybrid); see docs/models.md."
    )


def _rotations(model: PreTrainedModel) -> list[RopeParameters]:
    """List the parameters of the model's rotary embeddings. Some models have one for each type of layer."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return cast("list[RopeParameters]", [one for one in rope.values() if isinstance(one, dict)] or [rope])


def longest_context(model: PreTrainedModel) -> int | None:
    """Find the longest sequence in tokens that the config allows; None where it sets no limit."""
    limits = (getattr(model.config.get_text_config(), "max_position_embeddings", None), _longrope_limit(model))
    return min((limit for limit in limits if limit), default=None)


def _longrope_limit(model: PreTrainedModel) -> int | None:
    """Length beyond which LongRoPE (arXiv:2402.13753) rotates all sequences of a batch in another way, or None."""
    ropes = [rope for rope in _rotations(model) if rope.get("rope_type") == "longrope"]
    limits = (rope["original_max_position_embeddings"] for rope in ropes)
    return min((limit for limit in limits if limit is not None), default=None)


def hidden_states(
    model: PreTrainedModel, ids: torch.Tensor, offsets: torch.Tensor, images: Images | None = None
) -> torch.Tensor:
    """Compute the last hidden states, after the final norm. Differentiable.

    ids [T] int64, offsets [N + 1] int64 -> [T, H] in the model's dtype.
    """
    stored, layout, _ = stored_hidden_states(model, ids, offsets, images)
    return stored if layout.is_flat else stored.index_select(0, layout.expand)


def make_layout(ids: torch.Tensor, offsets: torch.Tensor) -> PackedLayout:
    """Lay out a batch, with common beginnings stored once: on the CPU always, on a device where that saves enough.

    ids [T] int64, offsets [N + 1] int64.
    """
    layout = tree_layout(ids, offsets)
    return layout if pays(len(ids), len(layout.stored), on_gpu=ids.is_cuda) else flat_layout(offsets, ids.device)


def shares_beginnings(model: PreTrainedModel) -> bool:
    """Say whether the model computes common beginnings once: not where layers carry a state through a sequence."""
    return not getattr(model.base_model, KEEPS_STATE, False)


def stored_hidden_states(
    model: PreTrainedModel,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    images: Images | None,
    group: dist.ProcessGroup | None = None,
    routes: Routes | None = None,
) -> tuple[torch.Tensor, PackedLayout, Slice]:
    """Compute the hidden states of stored tokens, each common beginning once.

    ids [T] int64, offsets [N + 1] int64. With a `group`, whose ranks all must call it, each rank has a slice of the
    stored tokens. `routes`: of a model that has been given to `follow_routes`; they are placed.

    Returns the hidden states [width, H] of this rank's slice, the layout, and the slice. Raises ConfigError when a
    sequence is too long.
    """
    placed = None
    names = ids if images is None else told_apart(ids, *image_rows(images, offsets))
    experts = None if routes is None else routes.given
    if shares_beginnings(model):
        layout = make_layout(names if experts is None else named_apart(names, experts), offsets)
    else:
        layout = flat_layout(offsets, ids.device)
    limit = _longrope_limit(model)
    if limit is not None and layout.longest > limit:
        raise ConfigError(
            f"a sequence has {layout.longest} tokens, and {type(model).__name__} with LongRoPE can be trained on up to "
            f"{limit}: set actor_rollout_ref.rollout.max_model_len"
        )
    positions = layout.positions
    if images is not None:
        placed, positions = place_features(model, ids, offsets, images, layout)
    part = Slice.from_group(len(layout.stored), group)
    if placed is not None and group is not None:
        mine = part.holds(placed.places)
        placed = replace(placed, places=placed.places[mine] - part.first, which=placed.which[mine])
    attention = part.attention(PackedAttention(layout))
    if routes is not None:
        routes.place(layout, part)
    row = part.cut(ids[layout.stored])
    return forward_packed(model, row, part.cut(positions), attention, placed, routes), layout, part


def named_apart(ids: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Number tokens so that only those with equal ids and equal experts look equal.

    ids [T] int64, experts [T, L, k] of an integer type -> [T] int64.
    """
    rows = torch.cat([ids[:, None], experts.flatten(1).long()], dim=1)
    return torch.unique(rows, dim=0, return_inverse=True)[1]


def place_features(
    model: PreTrainedModel, ids: torch.Tensor, offsets: torch.Tensor, images: Images, layout: PackedLayout
) -> tuple[PlacedFeatures, torch.Tensor]:
    """Run the vision tower, and find the stored tokens that its features belong to.

    ids [T] int64, offsets [N + 1] int64. Returns the features with their places, and the positions of the P stored
    tokens, [P] or [3, P] int64.
    """
    places, rows = (one.to(ids.device) for one in image_rows(images, offsets))
    row_of = torch.full_like(ids, -1)
    row_of[places] = rows
    stored = row_of[layout.stored]
    at = (stored >= 0).nonzero()[:, 0]
    placed = PlacedFeatures(features_of(model, images.patches, images.grid), at, stored[at])
    rope = rope_positions(model, ids, offsets, images)
    return placed, layout.positions if rope is None else rope.to(ids.device)[:, layout.stored]


def forward_packed(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionLayout,
    images: PlacedFeatures | None = None,
    routes: Routes | None = None,
) -> torch.Tensor:
    """Compute the last hidden states [P, H] of packed tokens: ids [P] int64, positions [P] or [3, P] int64.

    routes: of a model that has been given to `follow_routes`.
    """
    arguments: dict[str, object] = {LAYOUT: attention}
    if routes is not None:
        arguments[ROUTES] = routes
    if images is not None:
        return forward_images(model, ids, positions, images, arguments)
    output = model.base_model(input_ids=ids[None], position_ids=positions[..., None, :], use_cache=False, **arguments)
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def token_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Apply the model's head: hidden [M, H] -> logits [M, V] float32."""
    return head_of(model)(hidden)


def token_logprobs(
    model: PreTrainedModel,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    *,
    temperature: float = 1.0,
    needs: Needs = frozenset(),
    compare: Compare | None = None,
    needed: torch.Tensor | None = None,
    chunk_tokens: int | None = None,
    images: Images | None = None,
    experts: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> TokenScores:
    """Compute log p(ids[t] | the tokens before it in its sequence) under softmax(logits / temperature), and the further
    scores in `needs`.

    Args:
        ids: [T] int64. offsets: [N + 1] int64.
        temperature: above 0; 0 means greedy sampling, whose log-probs are taken at temperature 1.
        compare: called with the distributions of a chunk of tokens at a time; again in the backward pass.
        needed: [T] bool, the tokens whose log-prob is wanted; None: all. Others cost no vocabulary projection.
        chunk_tokens: tokens whose logits are alive at once; None: chosen by `CHUNK_LOGITS`.
        images: of the sequences, if they have any.
        experts: [T, L, k] of an integer type, the k experts of each token in the model's L layers with experts, which
            has been given to `follow_routes`; None: as the routers choose.
        group: the ranks that split the tokens; all must call it with the same, and all get the whole result.

    Returns:
        numbers of the distribution that ids[t] was drawn from; 0 where not needed and at each sequence's first token.
        Differentiable in the weights.
    """
    routes = None
    if experts is not None or not needs.isdisjoint(("experts", "router")):
        routes = Routes(experts, with_sums="router" in needs)
    chosen, places, part = predicting_states(model, ids, offsets, needed, images, group, routes)
    found = score_states(
        model,
        chosen,
        ids,
        places,
        temperature=temperature,
        needs=needs,
        compare=compare,
        chunk_tokens=chunk_tokens,
        part=part,
    )
    if routes is None:
        return found
    return found._replace(
        experts=routes.of_tokens() if "experts" in needs else None, router=routes.sums() if "router" in needs else None
    )


def score_states(
    model: PreTrainedModel,
    states: torch.Tensor,
    ids: torch.Tensor,
    places: torch.Tensor,
    *,
    temperature: float,
    needs: Needs,
    compare: Compare | None,
    chunk_tokens: int | None = None,
    part: Slice | None = None,
) -> TokenScores:
    """Score some of the tokens `ids` [T] by the states that predict them, as `token_logprobs` does.

    states [M, H] and places [M] int64 as `predicting_states` returns them, of this rank's `part` of the tokens. Logits
    of more tokens than a chunk are computed again in the backward pass.
    """
    size = chunk_tokens or chunk_size(model)
    single = len(places) <= size
    parts = []
    # With nothing needed there is one empty chunk, and the zeros still have a gradient.
    for some, there in zip(states.split(size), places.split(size), strict=True):
        arguments = (model, some, ids[there], there, temperature or 1.0, needs, compare)
        recompute = not single and torch.is_grad_enabled()
        parts.append(checkpoint(_score, *arguments, use_reentrant=False) if recompute else _score(*arguments))
    scores = torch.cat(parts, dim=1)
    spread = torch.zeros(len(scores), len(ids), dtype=scores.dtype, device=ids.device).index_copy(1, places, scores)
    rows = spread if part is None else part.sum_over_ranks(spread)
    names = ["logprobs", *(name for name in _FURTHER if name in needs)] + ["divergence"] * (compare is not None)
    # Copies, as FSDP warns of views.
    return TokenScores(**{name: row.clone() for name, row in zip(names, rows, strict=True)})


def predicting_states(
    model: PreTrainedModel,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    needed: torch.Tensor | None,
    images: Images | None,
    group: dist.ProcessGroup | None,
    routes: Routes | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Slice]:
    """Compute the last hidden states from which the needed tokens are predicted. See `token_logprobs`.

    Returns the states [M, H] that predict the needed tokens of this rank's slice, their places [M] int64, the slice.
    """
    hidden, layout, part = stored_hidden_states(model, ids, offsets, images, group, routes)
    places = predicted(torch.ones_like(ids, dtype=torch.bool) if needed is None else needed, offsets)
    rows = layout.expand[places - 1]
    if group is not None:
        mine = part.holds(rows)
        places, rows = places[mine], rows[mine] - part.first
    # Once: in backward each selection costs as much as all of `hidden`.
    return hidden.index_select(0, rows), places, part


def predicted(needed: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """List the places [M] int64 of the needed tokens [T] bool that are predicted by a state, the one before them.

    Nothing predicts a sequence's first token. offsets [N + 1] int64.
    """
    wanted = needed.clone()
    wanted[offsets[:-1].to(needed.device)] = False
    return wanted.nonzero()[:, 0]


def chunk_size(model: PreTrainedModel) -> int:
    """Count the tokens whose logits may be alive at once, on the device of the model."""
    logits = CHUNK_LOGITS_ON_GPU if model.device.type == "cuda" else CHUNK_LOGITS
    return max(1, logits // model.config.get_text_config().vocab_size)


def _score(
    model: PreTrainedModel,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    places: torch.Tensor,
    temperature: float,
    needs: Needs,
    compare: Compare | None,
) -> torch.Tensor:
    """Score M states: [1 to 5, M] float32.

    The rows are log-probs of the targets, the scores in `needs` in the order of `_FURTHER`, and the results of
    `compare`. hidden [M, D], targets and their places [M] int64.
    """
    logits = token_logits(model, hidden)
    if temperature != 1.0:
        logits = logits / temperature
    if needs.isdisjoint(_FURTHER) and compare is None:
        return -cross_entropy(logits, targets, reduction="none")[None]
    logprobs = logits.log_softmax(-1)
    found = [logprobs.gather(1, targets[:, None])[:, 0]]
    if not needs.isdisjoint(("entropy", "varentropy")):
        weighted = logprobs.exp() * logprobs
        entropy = -weighted.sum(-1)
        if "entropy" in needs:
            found.append(entropy)
        if "varentropy" in needs:
            found.append(((weighted * logprobs).sum(-1) - entropy.square()).clamp(min=0.0))
    if "squared_probs" in needs:
        found.append((2 * logprobs).exp().sum(-1))
    if compare is not None:
        found.append(compare(logprobs, places).float())
    return torch.stack(found)
