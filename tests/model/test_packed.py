"""Packed forward against transformers' own attention, one sequence at a time."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.errors import ConfigError
from agentrl.model.attend import Rule, attend_by_node, attend_part, attend_part_plainly, join_parts
from agentrl.model.attention import attend_flex, block_mask, compiled_flex
from agentrl.model.layout import flat_layout
from agentrl.model.packed import hidden_states, load_model, longest_context, token_logprobs, use_packed_attention
from agentrl.model.scores import Needs
from agentrl.model.tree_layout import tree_layout
from tests.model.families import SIZES, batch, make_model
from tests.naming import naming

BUT_ENTROPY: Needs = frozenset({"squared_probs", "varentropy"})
ALL: Needs = frozenset({"entropy", "squared_probs", "varentropy"})


def test_sequences_do_not_see_each_other() -> None:
    model = use_packed_attention(make_model("qwen3"))
    ids, offsets = batch()
    changed = ids.clone()
    changed[offsets[3] : offsets[4]] = 5
    before, after = hidden_states(model, ids, offsets), hidden_states(model, changed, offsets)
    same = torch.ones(len(ids), dtype=torch.bool)
    same[offsets[3] : offsets[4]] = False
    assert torch.allclose(before[same], after[same], atol=1e-5)
    assert not torch.allclose(before[~same], after[~same], atol=1e-2)


def test_hidden_states_are_the_models_last() -> None:
    own, model = make_model("qwen3"), use_packed_attention(make_model("qwen3"))
    ids, offsets = batch()
    got = hidden_states(model, ids, offsets)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        want = own.base_model(input_ids=ids[None, start:end]).last_hidden_state[0]
        assert torch.allclose(got[start:end], want, atol=1e-5)


def test_only_what_is_needed_is_scored() -> None:
    model = use_packed_attention(make_model("qwen3"))
    ids, offsets = batch()
    needed = torch.rand(len(ids), generator=torch.Generator().manual_seed(0)) < 0.4
    needed[offsets[2]] = True  # a first token has no log-prob even when asked for
    everything, *_ = token_logprobs(model, ids, offsets)
    rows = []
    model.get_output_embeddings().register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    logprobs, entropy, *_ = token_logprobs(model, ids, offsets, needed=needed)
    firsts = torch.zeros_like(needed)
    firsts[offsets[:-1]] = True
    assert entropy is None
    assert torch.allclose(logprobs, everything * needed * ~firsts, atol=1e-6)
    assert logprobs[offsets[2]] == 0
    assert rows == [int((needed & ~firsts).sum())]
    nothing, *_ = token_logprobs(model, ids, offsets, needed=torch.zeros_like(needed))
    assert not nothing.any()
    nothing.sum().backward()


def test_chunks_change_nothing_but_memory() -> None:
    model = use_packed_attention(make_model("qwen3"))
    ids, offsets = batch()
    results = []
    for chunk in (None, 7):
        model.zero_grad()
        logprobs, entropy, *_ = token_logprobs(model, ids, offsets, needs=frozenset({"entropy"}), chunk_tokens=chunk)
        assert entropy is not None
        (logprobs.square().sum() + entropy.sum()).backward()
        results.append((logprobs, entropy, [p.grad for p in model.parameters()]))
    (a, b, grads), (c, d, others) = results
    assert torch.allclose(a, c, atol=1e-6) and torch.allclose(b, d, atol=1e-6)
    for one, two in zip(grads, others, strict=True):
        assert one is not None and two is not None
        assert torch.allclose(one, two, atol=1e-5 * float(one.abs().max()) + 1e-8)


def test_squared_probabilities_and_the_varentropy_come_with_or_without_the_entropy() -> None:
    model = make_model("qwen3")
    ids, offsets = batch()
    first = ids[: int(offsets[1])]
    probs = (model(first[None]).logits[0, :-1] / 0.7).double().softmax(-1)
    surprise = -probs.log()
    variance = (probs * (surprise - (probs * surprise).sum(-1, keepdim=True)) ** 2).sum(-1).float()
    use_packed_attention(model)
    alone, both = (token_logprobs(model, ids, offsets, temperature=0.7, needs=needs) for needs in (BUT_ENTROPY, ALL))
    assert alone.entropy is None and alone.squared_probs is not None and both.squared_probs is not None
    assert torch.equal(alone.squared_probs, both.squared_probs)
    assert alone.varentropy is not None and both.varentropy is not None
    assert torch.equal(alone.varentropy, both.varentropy)
    assert torch.allclose(alone.logprobs, both.logprobs, atol=1e-6)
    assert torch.allclose(both.squared_probs[1 : len(first)], probs.square().sum(-1).float(), atol=1e-5)
    assert torch.allclose(both.varentropy[1 : len(first)], variance, rtol=1e-3, atol=1e-5)
    assert variance.min() > 1e-3, "a wrong formula would be seen"
    assert not both.squared_probs[offsets[:-1]].any() and not both.varentropy[offsets[:-1]].any()


def test_temperature_zero_means_plain_logprobs() -> None:
    model = use_packed_attention(make_model("qwen3"))
    ids, offsets = batch()
    assert torch.equal(token_logprobs(model, ids, offsets, temperature=0.0)[0], token_logprobs(model, ids, offsets)[0])


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    ids, offsets = batch()
    gradients = []
    for checkpointing in (False, True):
        model = use_packed_attention(make_model("qwen3"))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        token_logprobs(model, ids, offsets)[0].sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        assert one is not None and two is not None
        assert torch.allclose(one, two, atol=1e-5 * float(one.abs().max()))


def test_autocast_computes_in_bfloat16() -> None:
    model = use_packed_attention(make_model("qwen3"))
    ids, offsets = batch()
    exact, *_ = token_logprobs(model, ids, offsets)
    with torch.autocast("cpu", torch.bfloat16):
        rough, *_ = token_logprobs(model, ids, offsets)
        rough.sum().backward()
    assert rough.dtype == torch.float32
    assert 1e-5 < float((rough - exact).detach().abs().max()) < 0.5
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_autocast_holds_for_experts(name: str) -> None:
    model = use_packed_attention(make_model(name))
    ids, offsets = batch()
    exact, *_ = token_logprobs(model, ids, offsets)
    made = set()
    experts = [module for name, module in model.named_modules() if name.endswith("mlp.experts")]
    for module in experts:
        module.register_forward_hook(lambda _, __, output: made.add(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        rough, *_ = token_logprobs(model, ids, offsets)
        rough.sum().backward()
    assert made == {torch.bfloat16}
    assert float((rough - exact).detach().abs().mean()) < 0.05
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rule", [Rule(0.3), Rule(0.3, 4), Rule(0.3, 4, 2.0), Rule(0.3, None, 2.0, torch.ones(4))])
def test_what_gpus_run_for_other_rules(rule: Rule) -> None:
    """Forward only: flex attention has no backward pass on the CPU."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(heads, 20, 16, generator=generator) for heads in (4, 2, 2))
    layout = flat_layout(torch.tensor([0, 1, 9, 20]), query.device)
    mask = block_mask(layout, rule.window)
    expected = attend_by_node(layout, query, key, value, rule)
    assert torch.allclose(attend_flex(query, key, value, rule, mask), expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", [Rule(0.3, 4, 2.0), Rule(0.3, None, 2.0), Rule(0.3, None, None, torch.ones(4))])
def test_the_backward_pass_of_other_rules_is_traced(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for a GPU: torch refuses flex attention's backward pass on a CPU, though its plain functions have it.

    A score's cap once was a symbolic number of the compiled function, and Gemma 2 could not be trained.
    """
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    rows = [[*range(60), *range(100, 140)], [*range(60), *range(200, 290)], [300]]
    offsets = torch.tensor([0, *itertools.accumulate(map(len, rows))])
    layout = tree_layout(torch.tensor([id for row in rows for id in row]), offsets)
    assert len(layout.spans) == 4
    mask = block_mask(layout, rule.window)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(heads, len(layout.stored), 16, generator=generator) for heads in (4, 2, 2)]
    results = []
    for compiled in (True, False):
        query, key, value = inputs = [one.clone().requires_grad_() for one in given]
        if compiled:
            output = attend_flex(query, key, value, rule, mask, compiled_flex("aot_eager"))
        else:
            output = attend_by_node(layout, query, key, value, rule)
        output.square().sum().backward()
        results.append([output.detach(), *(one.grad for one in inputs if one.grad is not None)])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=1e-4)


def test_sequences_too_long_for_longrope_are_refused() -> None:
    """One such sequence would change the rotation of all others."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    sizes = {**SIZES, "original_max_position_embeddings": 40}
    config = AutoConfig.for_model("phi3", **sizes, rope_parameters=rope)
    model = use_packed_attention(AutoModelForCausalLM.from_config(config))
    ids, offsets = batch()
    assert int(offsets.diff().max()) == 44
    with pytest.raises(ConfigError, match=r"44 tokens.*up to 40: set actor_rollout_ref\.rollout\.max_model_len"):
        token_logprobs(model, ids, offsets)
    assert longest_context(model) == 40


def test_common_beginnings_are_stored_once() -> None:
    ids, offsets = batch()
    layout = tree_layout(ids, offsets)
    flat = flat_layout(offsets, ids.device)
    rows = [ids[a:b].tolist() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    for row, start in zip(rows, offsets[:-1].tolist(), strict=True):
        places = layout.expand[start : start + len(row)]
        assert ids[layout.stored][places].tolist() == row
        assert layout.positions[places].tolist() == list(range(len(row)))
    # system (all 12 tokens but one, since "system" alone is a sequence, whose last token is its own) once for seven.
    distinct = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert len(distinct) <= len(layout.stored) < len(distinct) + 20
    assert len(flat.stored) == len(ids) > 1.5 * len(layout.stored)
    assert layout.longest == flat.longest == max(map(len, rows))


def test_nothing_in_common_makes_a_flat_layout() -> None:
    ids = torch.arange(60)
    layout = tree_layout(ids, torch.tensor([0, 10, 25, 60]))
    assert layout.is_flat
    assert layout.spans == [(0, 10), (10, 25), (25, 60)]
    assert torch.equal(layout.stored, ids)


def test_deeply_nested_sequences() -> None:
    """Each sequence begins with the one before: a tree as deep as there are sequences."""
    model = use_packed_attention(make_model("qwen3"))
    words = torch.randint(0, 61, (8 * 25,), generator=torch.Generator().manual_seed(2))
    lengths = [8 * (i + 1) for i in range(25)]
    ids = torch.cat([words[:n] for n in lengths])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    logprobs, *_ = token_logprobs(model, ids, offsets)
    longest = logprobs[offsets[-2] :]
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        assert torch.allclose(logprobs[start:end], longest[: end - start], atol=1e-5)


def test_dropout_is_off() -> None:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=61, n_embd=32, n_head=4, n_layer=2, resid_pdrop=0.5, attn_pdrop=0.5
    )
    model = use_packed_attention(AutoModelForCausalLM.from_config(config))
    ids, offsets = batch()
    calm = token_logprobs(model, ids, offsets)[0]
    model.train()
    assert torch.equal(token_logprobs(model, ids, offsets)[0], calm)


def test_the_probe_computes_in_float32_where_the_process_allows_tf32() -> None:
    model, seen = make_model("qwen3"), set()
    torch.set_float32_matmul_precision("high")
    try:
        model.model.layers[0].register_forward_hook(lambda *_: seen.add(torch.get_float32_matmul_precision()))
        use_packed_attention(model)
        assert (seen, torch.get_float32_matmul_precision()) == ({"highest"}, "high")
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("mamba", {}, "differ"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "differ"),
        ("gpt_neox_japanese", {"intermediate_multiple_size": 2}, "only 0 of its 2 layers"),
        ("nemotron", {}, "do not hand"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary"),
    ],
)
def test_other_architectures_are_refused(family: str, options: dict[str, Any], why: str) -> None:
    config = AutoConfig.for_model(family, **{**SIZES, **options})
    with naming(ConfigError, "packed sequences", why):
        use_packed_attention(AutoModelForCausalLM.from_config(config))


def test_a_window_that_only_masks_know_is_refused_where_sequences_reach_it() -> None:
    """Qwen2-MoE does not name its window to the attention; the sequences that are compared have 16 tokens."""
    with naming(ConfigError, "packed sequences", "differ"):
        use_packed_attention(make_model("qwen2-moe", use_sliding_window=True, sliding_window=24))
    use_packed_attention(make_model("qwen2-moe", use_sliding_window=True, sliding_window=256))
    model = use_packed_attention(make_model("mistral, window 7", sliding_window=24))
    widths = [model.config.sliding_window, *(layer.self_attn.config.sliding_window for layer in model.model.layers)]
    assert widths == [24] * 3, "as before"
    ids, offsets = torch.arange(60), torch.tensor([0, 60])
    own = make_model("mistral, window 7", sliding_window=24)(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    found = token_logprobs(model, ids, offsets).logprobs[1:]
    assert torch.allclose(found, own.gather(1, ids[1:, None])[:, 0], atol=1e-4)


def test_a_saved_model_does_not_name_our_attention(tmp_path: Any) -> None:
    make_model("qwen3").save_pretrained(tmp_path / "a")
    model = load_model(str(tmp_path / "a"))
    model.save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert again.config._attn_implementation == "sdpa"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    bfloat = load_model(str(tmp_path / "b"), dtype="bfloat16")
    assert bfloat.dtype == torch.bfloat16


def test_a_missing_model_says_where_and_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)cannot load .*nowhere.*model\.path"):
        load_model(str(tmp_path / "nowhere"))


def test_quantized_weights_are_refused(tmp_path: Any) -> None:
    make_model("gpt-oss").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with naming(ConfigError, "(mxfp4)"):
        load_model(str(tmp_path))


def test_called_without_a_layout_it_says_so() -> None:
    model = use_packed_attention(make_model("qwen3"))
    with pytest.raises(ValueError, match=r"agentrl\.model\.packed"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))


def test_parts_of_attention_join_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, 2, n, 8, generator=generator) for n in (5, 20, 20))
    mask = torch.zeros(3, 1, 1, 20)
    mask[1, ..., 15:] = -torch.inf
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3)
    for attend in (attend_part, attend_part_plainly):
        out, lse = attend(query, key[:, :, :12], value[:, :, :12], None, Rule(0.3))
        join_parts(out, lse, *attend(query, key[:, :, 12:], value[:, :, 12:], mask[..., 12:], Rule(0.3)))
        assert torch.allclose(out, whole, atol=1e-6)
        assert torch.allclose(lse, (query @ key.mT * 0.3 + mask).logsumexp(-1), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "mistral, window 7"])
def test_packed_equals_one_by_one_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    own = make_model(name).to(dtype).cuda()  # type: ignore[arg-type]
    model = use_packed_attention(make_model(name).to(dtype).cuda())  # type: ignore[arg-type]
    ids, offsets = batch()
    ids, offsets = ids.cuda(), offsets.cuda()
    got = hidden_states(model, ids, offsets)
    for start, end in itertools.pairwise(offsets.tolist()):
        want = own.base_model(input_ids=ids[None, start:end]).last_hidden_state[0]
        assert torch.allclose(got[start:end], want, atol=1e-4 if dtype == torch.float32 else 0.15)
    token_logprobs(model, ids, offsets)[0].sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
