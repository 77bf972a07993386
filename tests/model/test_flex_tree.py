"""Shared beginnings by block masks of flex attention, as devices compute them, against the tree of the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from agentrl.model import packed
from agentrl.model.attend import Rule
from agentrl.model.attention import BLOCK, PackedAttention, attend_flex, block_mask
from agentrl.model.layout import PackedLayout, flat_layout
from agentrl.model.packed import make_layout, token_logprobs, use_packed_attention
from agentrl.model.tree_layout import tree_layout
from tests.model.families import make_model

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class FlexAttention(PackedAttention):
    """Attention as a device runs it, not compiled."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        return attend_flex(query, key, value, rule, block_mask(self.layout, rule.window))


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a device."""

    is_cuda = True


@pytest.fixture(autouse=True)
def backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses flex attention's backward pass on a CPU, though its plain functions have it."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)


def branches(seed: int = 0, unit: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts of one beginning, three answers each, of which two branch again; and a sequence of its own."""
    generator = torch.Generator().manual_seed(seed)

    def made(count: int) -> torch.Tensor:
        return torch.randint(1, 60, (count * unit,), generator=generator)

    system, rows = made(20), [made(17)]
    for length in (31, 9):
        prompt = torch.cat([system, made(length)])
        turn = torch.cat([prompt, made(24)])
        rows += [torch.cat([prompt, made(13)]), torch.cat([turn, made(11)]), torch.cat([turn, made(5)])]
    return torch.cat(rows), torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)


def pairs_seen(layout: PackedLayout, window: int | None) -> torch.Tensor:
    """[P, P] bool, from the nodes and those above them."""
    seen = torch.zeros(len(layout.stored), len(layout.stored), dtype=torch.bool)
    for (start, end), above in zip(layout.spans, layout.ancestors, strict=True):
        seen[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        for first, last in (layout.spans[node] for node in above):
            seen[start:end, first:last] = True
    distance = layout.positions[:, None] - layout.positions
    return seen if window is None else seen & (distance < window)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("window", [None, 3, 150])
def test_masks_of_blocks_are_those_of_pairs(window: int | None, shared: bool) -> None:
    ids, offsets = branches(unit=7)
    layout = tree_layout(ids, offsets) if shared else flat_layout(offsets, ids.device)
    assert len(layout.spans) == (12 if shared else 7) and len(layout.stored) % BLOCK
    mask = block_mask(layout, window)
    expected = pairs_seen(layout, window)
    size = len(expected)
    places = torch.arange(size)
    assert torch.equal(mask.mask_mod(places[:, None] * 0, places[:, None] * 0, places[:, None], places), expected)
    blocks = -(-size // BLOCK)
    padded = torch.nn.functional.pad(expected, (0, blocks * BLOCK - size) * 2)
    tiles = padded.unflatten(1, (blocks, BLOCK)).unflatten(0, (blocks, BLOCK)).transpose(1, 2).flatten(2)
    counts, listed, whole_counts, whole_listed = mask.as_tuple()[2:6]
    assert isinstance(listed, torch.Tensor) and isinstance(whole_listed, torch.Tensor)
    assert isinstance(counts, torch.Tensor) and isinstance(whole_counts, torch.Tensor)
    whole, some = torch.zeros(blocks, blocks, dtype=torch.bool), torch.zeros(blocks, blocks, dtype=torch.bool)
    for row in range(blocks):
        some[row, listed[0, 0, row, : counts[0, 0, row]]] = True
        whole[row, whole_listed[0, 0, row, : whole_counts[0, 0, row]]] = True
    assert not (whole & some).any()
    assert tiles[whole].all() and not tiles[~(whole | some)].any()
    if window is None:
        assert torch.equal(whole, tiles.all(2)) and torch.equal(some, tiles.any(2) & ~tiles.all(2))
        assert whole.any() and some.any() and not (whole | some).all()


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("name", ["qwen3", "mistral, window 7", "gemma2", "gpt-oss"])
def test_scores_and_gradients_equal_the_tree_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, offsets = branches()
    assert not tree_layout(ids, offsets).is_flat
    weights = torch.rand(len(ids), generator=torch.Generator().manual_seed(1))
    results = []
    for attention in (PackedAttention, FlexAttention):
        model = use_packed_attention(make_model(name))
        with monkeypatch.context() as patched:
            patched.setattr(packed, "PackedAttention", attention)
            found = token_logprobs(model, ids, offsets, needs=frozenset({"entropy"}))
        assert found.entropy is not None
        (weights * (found.logprobs + found.entropy)).sum().backward()
        gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        results.append((found.logprobs.detach(), found.entropy.detach(), torch.cat(gradients)))
    for by_tree, by_mask in zip(*results, strict=True):
        assert float((by_mask - by_tree).norm()) < 1e-6 * float(by_tree.norm())


def test_a_device_shares_where_that_saves_enough() -> None:
    prompt = torch.arange(600)

    def stored(prompt: torch.Tensor, answers: list[int]) -> int:
        rows = [torch.cat([prompt, 1000 * n + torch.arange(length)]) for n, length in enumerate(answers, start=1)]
        offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
        layout = make_layout(torch.cat(rows).as_subclass(OnDevice), offsets)
        assert torch.equal(torch.cat(rows)[layout.stored][layout.expand], torch.cat(rows))
        return len(layout.stored)

    assert stored(prompt, [200, 200, 200]) == 600 + 3 * 200
    assert stored(prompt, [200, 200]) == 2 * 600 + 2 * 200, "600 tokens are too few"
    assert stored(prompt, [300] * 12) == 600 + 12 * 300
    assert stored(prompt, [900] * 12) == 12 * 1500, "66 of 180 hundreds are too few"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "mistral, window 7"])
def test_shared_beginnings_equal_separate_sequences_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    model = use_packed_attention(make_model(name, head_dim=16).to(dtype).cuda())  # type: ignore[arg-type]
    ids, offsets = branches(unit=16)
    assert not make_layout(ids.cuda(), offsets).is_flat
    shared = token_logprobs(model, ids.cuda(), offsets.cuda())[0]
    for start, end in itertools.pairwise(offsets.tolist()):
        alone = token_logprobs(model, ids[start:end].cuda(), torch.tensor([0, end - start]).cuda())[0]
        assert torch.allclose(shared[start:end], alone, atol=1e-4 if dtype == torch.float32 else 0.15)
    shared.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
