"""Part of a device's peak that an update reaches: model FLOP utilisation, memory, and log-probs against padded batches.

    python -m benchmarks.training.update_utilization [--shape 1.5B] [--tokens 16384] [--compile] [--profile out]

A policy of random weights in one of Qwen2.5's shapes learns from made-up sequences (log-normal lengths, no two alike)
in micro-batches of `--tokens`, with AdamW, gradient checkpointing and, on a GPU, bfloat16. FLOPs are those of the
model, once forward and twice backward (arXiv:2001.08361), without what is computed again; the peak is the GPU's, or
what one large matrix product reaches on a CPU. Padded is transformers' own forward with an attention mask over the same
sequences, as many a micro-batch as fit into its tokens; it scores all tokens, where the policy's pass scores those that
it sampled, and their entropies. `--profile` also writes a trace and says which kernels lead.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agentrl.config.sections.actor import ActorConfig, ActorRolloutRefConfig
from agentrl.config.sections.model import PolicyModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.parallel import ActorFSDPConfig
from agentrl.config.sections.rollout import TrainingRolloutConfig
from agentrl.config.sections.training import Config
from agentrl.plan.sizing import ModelShape, Work, forward_flops, update_flops
from agentrl.plan.speeds import CARDS
from agentrl.runtime.device import resolve_device
from agentrl.runtime.profiler import Profile, profiled
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers import PolicyWorker
from agentrl.workers.fsdp import FSDPPolicy
from benchmarks.gpu.part import seconds
from benchmarks.training.made_batches import ragged_batch
from benchmarks.training.peak_memory import peak_memory

SHAPES = {
    "tiny": ModelShape(2, 64, 4, 2, 16, 128, 512, tied=True),
    "0.5B": ModelShape(24, 896, 14, 2, 64, 4864, 151936, tied=True),
    "1.5B": ModelShape(28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    "7B": ModelShape(28, 3584, 28, 4, 128, 18944, 152064),
}
PEAKS = {card: flops for card, (flops, _) in CARDS.items()}
"""Dense bfloat16 FLOPs a second, by what a GPU's name contains (NVIDIA's data sheets)."""
MICRO_BATCHES = 4
KERNELS = 12


def make_policy(shape: ModelShape, folder: Path, device: str) -> None:
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32768,
        initializer_range=shape.hidden**-0.5,  # what each layer adds counts
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(0)
    with torch.device(device):
        Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def made_batch(shape: ModelShape, tokens: int, longest: int) -> RaggedBatch:
    """About so many tokens, as an update takes them."""
    batch = ragged_batch(max(8, tokens // 300))
    batch = batch.select([row for row, length in enumerate(batch.lengths.tolist()) if length <= longest])
    batch = batch.select(range(int((batch.lengths.cumsum(0) <= tokens).sum())))
    generator = torch.Generator().manual_seed(2)
    return batch.with_fields(
        ids=torch.randint(0, shape.vocab, (batch.num_tokens,), generator=generator),
        old_logprobs=torch.zeros(batch.num_tokens),
        advantages=torch.randn(batch.num_tokens, generator=generator) * batch.mask,
    )


def peak_flops(device: str, given: float | None) -> float:
    """FLOPs a second at the device's peak; on a CPU what a product of matrices of 1,024 x 1,024 reaches."""
    if given is not None:
        return given
    if device == "cpu":
        left = torch.randn(1024, 1024)
        return 2.0 * 1024**3 / min(seconds(lambda: left @ left, device) for _ in range(5))
    name = torch.cuda.get_device_name()
    known = [peak for part, peak in PEAKS.items() if part in name]
    if not known:
        raise SystemExit(f"the peak of {name} is not known here: give it, in FLOPs a second, with --peak")
    return known[0]


def padded_batches(batch: RaggedBatch, tokens: int) -> Iterator[list[torch.Tensor]]:
    """Sequences in their order, as many as fit into `tokens` when all are as long as the longest."""
    rows: list[torch.Tensor] = []
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        row = batch.ids[start:end]
        if rows and max(len(row), *(len(one) for one in rows)) * (len(rows) + 1) > tokens:
            yield rows
            rows = []
        rows.append(row)
    yield rows


@torch.no_grad()
def padded_log_probs(model: PreTrainedModel, batch: RaggedBatch, tokens: int) -> torch.Tensor:
    """[T - N] of all tokens but each sequence's first."""
    found = []
    for rows in padded_batches(batch, tokens):
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(ids.device)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        found.append(logprobs[mask[:, 1:].bool()].cpu())
    return torch.cat(found)


def make_worker(
    folder: Path,
    device: str,
    dtype: str,
    tokens: int,
    *,
    compiled: bool = False,
    checkpointing: bool = True,
    offload_params: bool = False,
    offload_activations: bool = False,
) -> PolicyWorker:
    """A policy whose updates are one optimizer step, in micro-batches of `tokens`."""
    model = PolicyModelConfig(
        path=str(folder),
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        enable_gradient_checkpointing=checkpointing,
        enable_activation_offload=offload_activations,
    )
    actor = ActorConfig(
        ppo_mini_batch_size=1_000_000,
        ppo_max_token_len_per_gpu=tokens,
        use_torch_compile=compiled,
        optim=OptimConfig(lr=1e-6),
        fsdp_config=ActorFSDPConfig(param_offload=offload_params),
    )
    rollout = TrainingRolloutConfig(log_prob_max_token_len_per_gpu=tokens)
    roles = ActorRolloutRefConfig(model=model, actor=actor, rollout=rollout)
    return PolicyWorker(Config(actor_rollout_ref=roles), device=device, total_steps=100)


def fsdp(worker: PolicyWorker) -> FSDPPolicy:
    """The worker's backend."""
    assert isinstance(worker.backend, FSDPPolicy)
    return worker.backend


def measured(
    args: argparse.Namespace, folder: Path, device: str, dtype: str, batch: RaggedBatch
) -> tuple[float, float]:
    """Seconds of a log-prob pass and of an update, medians; prints memory, and with --profile the leading kernels."""
    checkpointing = not args.no_checkpointing
    worker = make_worker(folder, device, dtype, args.tokens, compiled=args.compile, checkpointing=checkpointing)
    passes = [seconds(partial(worker.compute_log_probs, batch), device) for _ in range(1 + args.updates)]
    worker.update(batch, step=1)
    steps = range(2, 2 + args.updates)
    with peak_memory() as host:
        updates = [seconds(partial(worker.update, batch, step=step), device) for step in steps]
    memory = host.bytes if device == "cpu" else torch.cuda.max_memory_allocated()
    print(f"memory: {memory / 1e9:.3f} GB{' more than at rest' if device == 'cpu' else ''}")
    if args.profile is not None:
        with profiled(Profile(args.profile, "update_actor"), 0):
            worker.update(batch, step=steps.stop)
        table = (args.profile / "rank0_update_actor.txt").read_text(encoding="utf-8")
        print("\n".join(table.splitlines()[: KERNELS + 3]))
    return statistics.median(passes[1:]), statistics.median(updates)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch; four of them are an update")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--updates", type=int, default=3, help="that are measured, after one that is not")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--peak", type=float, help="FLOPs a second of the device")
    parser.add_argument("--compile", action="store_true", help="use_torch_compile")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--profile", type=Path, help="a folder for torch.profiler's trace")
    args = parser.parse_args(words)
    device, shape = resolve_device(args.device, print), SHAPES[args.shape]
    peak, dtype = peak_flops(device, args.peak), "bfloat16" if device == "cuda" else "float32"
    batch = made_batch(shape, MICRO_BATCHES * args.tokens, min(args.longest, args.tokens))
    print(f"{args.shape} on {device} in {dtype}: {len(batch)} sequences of {batch.num_tokens} tokens", flush=True)
    with tempfile.TemporaryDirectory() as place:
        make_policy(shape, Path(place), device)
        forward, update = measured(args, Path(place), device, dtype, batch)
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        plain = Qwen2ForCausalLM.from_pretrained(place, dtype=getattr(torch, dtype))
        torch.nn.Module.to(plain, device)
    padded_log_probs(plain, batch.select(range(min(4, len(batch)))), args.tokens)
    padded = seconds(partial(padded_log_probs, plain, batch, args.tokens), device)
    work = Work.from_lengths(batch.lengths.tolist(), float(batch.policy_tokens.sum()))
    flops = update_flops(shape, work, recompute=False, recompute_head=False)
    print(f"peak: {peak / 1e12:.3g} TFLOP/s")
    print(
        f"update: {update:.3g} s, {batch.num_tokens / update:,.0f} tokens/s, {flops / update / peak:.1%} model FLOP "
        "utilisation"
    )
    print(
        f"log-probs: {forward:.3g} s, {forward_flops(shape, work) / forward / peak:.1%} of the peak; padded "
        f"{padded:.3g} s, {padded / forward:.2f} times as long"
    )


if __name__ == "__main__":
    main()
