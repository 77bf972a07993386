"""The embedded engine on a real model: tokens a CPU-second over those of transformers' generate, and what bounds them.

    python -m benchmarks.real.engine --model FOLDER [--cases 64x48 8x128]

Both sample the same number of tokens at temperature 1 for the same prompts, in turn, on one thread. The engine is made
once, as the model is loaded once, and forgets all keys and values between two calls. Generate gets all prompts in one
batch of equal length, so that it pads nothing. The engine computes a prompt once for its group, so
decoding is also given alone: a whole run less a run of one token. The linear layers alone, called with as many rows as
a step has, are the least that a step can take. Then weights are sent to the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.engines.contract import RolloutEngine, SamplingParams
from agentrl.engines.embedded.blocked import BlockedLayers
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import Weights
from agentrl.model.packed import load_model
from agentrl.quickstart.tiny_policy import make_tiny_policy

Ids = list[list[int]]


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def made_prompts(model: PreTrainedModel, count: int, group: int, length: int) -> Ids:
    """Prompts of random tokens, each for `group` requests."""
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    kinds = [torch.randint(0, vocab, (length,), generator=generator).tolist() for _ in range(-(-count // group))]
    return [kinds[index // group] for index in range(count)]


def by_engine(engine: RolloutEngine, prompts: Ids, tokens: int) -> None:
    asyncio.run(sample(engine, prompts, tokens))


async def sample(engine: RolloutEngine, prompts: Ids, tokens: int) -> None:
    """Sample `tokens` tokens for each prompt, all at once, and forget the sessions."""
    params = [SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=seed) for seed in range(len(prompts))]
    calls = [engine.generate(ids, one, str(one.seed)) for ids, one in zip(prompts, params, strict=True)]
    found = await asyncio.gather(*calls)
    assert sum(len(one.ids) for one in found) == tokens * len(prompts)
    for one in params:
        await engine.release(str(one.seed))
    await engine.flush_cache()


def by_generate(model: PreTrainedModel, prompts: Ids, tokens: int) -> None:
    ids = torch.tensor(prompts)
    generate = cast(Callable[..., torch.Tensor], model.generate)
    found = generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert found.shape == (len(prompts), ids.shape[1] + tokens)


@torch.inference_mode()
def products_seconds(model: PreTrainedModel, rows: int, blocked: BlockedLayers) -> tuple[float, float]:
    """CPU-seconds of one pass over all linear layers with `rows` rows: as torch has them, with blocked weights."""
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    inputs = {width: torch.randn(rows, width) for width in {layer.in_features for layer in layers}}

    def run() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    plain = min(cpu_seconds(run) for _ in range(3))
    with blocked.used():
        run()
        return plain, min(cpu_seconds(run) for _ in range(3))


def compare(ours: PreTrainedModel, theirs: PreTrainedModel, prompts: Ids, tokens: int, rounds: int) -> None:
    """Print the two ways' tokens a CPU-second, their ratio, and the part of a step that products alone take."""
    engine = EmbeddedEngine(ours, max_num_seqs=len(prompts), max_model_len=len(prompts[0]) + tokens)
    ways = {"engine": partial(by_engine, engine), "generate": partial(by_generate, theirs)}
    by_engine(engine, prompts, 1)  # makes the blocked copies of the weights, once for all answers by them
    whole: dict[str, list[float]] = {name: [] for name in ways}
    first: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            first[name].append(cpu_seconds(partial(way, prompts, 1)))
            whole[name].append(cpu_seconds(partial(way, prompts, tokens)))
    count = len(prompts)
    all_of, prompt_of = ({n: statistics.median(found[n]) for n in ways} for found in (whole, first))
    decoding = {name: max(all_of[name] - prompt_of[name], 1e-9) for name in ways}
    for name in ways:
        print(
            f"{count} x {tokens}, {name}: {count * tokens / all_of[name]:.1f} tokens a CPU-second, decoding alone "
            f"{count * (tokens - 1) / decoding[name]:.1f}; prompts {prompt_of[name]:.2f} CPU-seconds"
        )
    print(
        f"{count} x {tokens}, engine over generate: {all_of['generate'] / all_of['engine']:.2f}, decoding alone "
        f"{decoding['generate'] / decoding['engine']:.2f}"
    )
    plain, blocked = products_seconds(ours, count, BlockedLayers(ours))
    step = decoding["engine"] / (tokens - 1)
    print(
        f"{count} x {tokens}, a step of the engine: {step * 1e3:.0f} ms; linear layers alone {blocked * 1e3:.0f} ms, "
        f"{blocked / step:.0%} of it; as torch calls them {plain * 1e3:.0f} ms",
        flush=True,
    )


def send_weights(model: PreTrainedModel) -> None:
    """Print what sending all weights to an engine costs, over a copy of the same bytes."""
    engine = EmbeddedEngine(model, max_num_seqs=1, max_model_len=16)
    tensors = {name: param.detach().clone() for name, param in model.named_parameters()}
    targets = [torch.empty_like(tensor) for tensor in tensors.values()]

    def copy() -> None:
        for target, tensor in zip(targets, tensors.values(), strict=True):
            target.copy_(tensor)

    blocked = BlockedLayers(model)

    def make_copies() -> None:
        blocked.drop()
        with blocked.used():
            pass

    def send() -> None:
        asyncio.run(engine.update_weights(Weights.from_tensors(tensors.items()), 1))

    sent, copied, made = (min(cpu_seconds(call) for _ in range(3)) for call in (send, copy, make_copies))
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(
        f"weights: {size / 1e6:.1f} MB in {sent:.3f} CPU-seconds, {sent / copied:.1f} copies of the same "
        f"bytes; blocked copies of them for the next steps {made:.3f}"
    )


def options_of(about: str | None) -> argparse.ArgumentParser:
    """Make the parser of the options of a comparison of engines; `about`: its description."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal language model in float32")
    parser.add_argument("--tiny", action="store_true", help="a made-up model of 0.3 million parameters, few tokens")
    parser.add_argument("--cases", nargs="+", default=["64x48", "8x128"], help="requests x new tokens")
    parser.add_argument("--group", type=int, default=8, help="requests of one prompt")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def read_options(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Read the options from the command line."""
    asked = parser.parse_args(words)
    if asked.tiny == (asked.model is not None):
        parser.error("give --model FOLDER, or --tiny")
    return asked


def main(words: Sequence[str] | None = None) -> None:
    asked = read_options(options_of(__doc__), words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = make_tiny_policy(place, 0) if asked.tiny else asked.model
        ours = load_model(str(folder))
        theirs = cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()
        theirs.generation_config.eos_token_id = None
        for case in ["8x6"] if asked.tiny else asked.cases:
            count, tokens = map(int, case.split("x"))
            prompts = made_prompts(ours, count, asked.group, 16 if asked.tiny else asked.prompt)
            compare(ours, theirs, prompts, tokens, asked.rounds)
        send_weights(ours)


if __name__ == "__main__":
    main()
