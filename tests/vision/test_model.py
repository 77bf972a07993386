"""The packed forward with images against transformers' own, one sequence at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.model.packed import token_logprobs, use_packed_attention
from agentrl.trajectory import Image, PlacedImage
from agentrl.trajectory.images import Images
from tests.naming import naming
from tests.vision.tiny import make_model

VOCAB = 90
TOKENS = {"vision_start_token_id": 81, "vision_end_token_id": 82, "image_token_id": 83, "video_token_id": 84}
WIDTH = 3 * 2 * 4**2


def image(number: int, rows: int, columns: int) -> Image:
    patches = np.random.default_rng(number).standard_normal((rows * columns, WIDTH)).astype(np.float32)
    return Image(patches, (1, rows, columns), rows * columns // 4, bytes([number]), b"")


def sequences() -> tuple[list[list[int]], list[list[PlacedImage]]]:
    """A beginning shared with its image; the same ids with another image; two images; no image; a sampled image
    token."""
    generator = torch.Generator().manual_seed(3)

    def words(count: int) -> list[int]:
        return torch.randint(0, 80, (count,), generator=generator).tolist()

    one, other, tall = image(1, 4, 4), image(2, 4, 4), image(3, 8, 2)
    beginning = words(10) + [81] + [83] * 4 + [82] + words(9)
    plain = words(12)
    ids = [
        beginning + words(5),
        beginning + words(7),
        beginning + words(4),
        beginning + [81] + [83] * 4 + [82] + words(6),
        plain + words(4),
        plain + words(3) + [83] + words(2),
        [81] + [83] * 4 + [82] + words(3) + [83] + words(4),
    ]
    placed = [
        [PlacedImage(11, one)],
        [PlacedImage(11, one)],
        [PlacedImage(11, other)],
        [PlacedImage(11, one), PlacedImage(26, tall)],
        [],
        [],
        [PlacedImage(1, tall)],
    ]
    return ids, placed


def own_logprobs(model: Any, ids: list[int], placed: list[PlacedImage]) -> torch.Tensor:
    """By the model's own forward; where an image token was sampled, by its embedding, as any other token's."""
    tokens = torch.tensor(ids)
    kinds = torch.zeros_like(tokens)
    for one in placed:
        kinds[one.start : one.start + one.image.tokens] = 1
    arguments = {}
    if placed:
        grids = torch.tensor([one.image.grid for one in placed])
        pixels = torch.cat([torch.from_numpy(one.image.patches) for one in placed])
        arguments = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds[None]}
    if placed and int((tokens == 83).sum()) > int(kinds.sum()):
        features = torch.cat(list(model.base_model.get_image_features(pixels, grids).pooler_output))
        embeddings = model.get_input_embeddings()(tokens).masked_scatter(kinds[:, None].bool(), features)
        positions, _ = model.base_model.get_rope_index(
            tokens[None], mm_token_type_ids=kinds[None], image_grid_thw=grids
        )
        logits = model(inputs_embeds=embeddings[None], position_ids=positions).logits[0]
    else:
        logits = model(input_ids=tokens[None], use_cache=False, **arguments).logits[0]
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def test_a_model_that_takes_images_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here its own forward has other positions than its `get_rope_index` says."""
    model: Any = make_model("qwen2_5_vl", VOCAB, **TOKENS)
    monkeypatch.setattr(model.model, "compute_3d_position_ids", lambda **kwargs: None)
    with naming(ConfigError, "logits", "image"):
        use_packed_attention(model)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_packed_equals_the_models_own_forward(family: str) -> None:
    ids, placed = sequences()
    if family == "qwen3_vl":  # its features are also added behind decoder layers, which embeddings cannot say
        ids, placed = ids[:-1], placed[:-1]
    model = make_model(family, VOCAB, **TOKENS)
    expected = [own_logprobs(model, *one) for one in zip(ids, placed, strict=True)]
    torch.cat(expected).sum().backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    assert any("visual" in name for name in gradients)
    model.zero_grad()

    use_packed_attention(model)
    offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
    flat = torch.tensor([token for one in ids for token in one])
    logprobs, *_ = token_logprobs(model, flat, offsets, images=Images.from_sequences(placed))
    for number, own in enumerate(expected):
        start, end = offsets[number : number + 2].tolist()
        torch.testing.assert_close(logprobs[start + 1 : end], own, atol=1e-5, rtol=1e-5)
    logprobs.sum().backward()
    for name, param in model.named_parameters():
        if name in gradients:
            assert param.grad is not None
            difference = (param.grad - gradients[name]).abs().max()
            assert difference <= 1e-4 * gradients[name].abs().max() + 1e-5, f"{name}: {difference}"
