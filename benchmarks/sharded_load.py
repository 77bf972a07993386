"""Peak memory of a rank while it loads a model that is sharded: by slices, against reading it whole first.

    python -m benchmarks.sharded_load [--ranks 2 4]

Writes a random model of 230 million parameters in bfloat16 (several files) to a temporary folder. Each rank of a gloo
group makes its part of a float32 policy from it, in processes of their own for each way, and tries its attention out,
for which each layer is gathered once. Given is the anonymous memory above what a rank held before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.config.schema import ModelConfig
from agentrl.model.packed import load_model
from agentrl.workers.models import PolicyModel, load_policy
from agentrl.workers.shard import shard
from agentrl.workers.sharded_load import read_weights
from benchmarks.peak_memory import peak_memory


def write_model(folder: Path) -> int:
    """Bytes of its parameters in float32."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder, max_shard_size="200MB")
    return sum(4 * param.numel() for param in model.parameters())


def load(rank: int, ranks: int, folder: Path, whole: bool) -> tuple[float, float]:
    """(peak MiB, seconds) of one rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder / f'meeting-{ranks}-{whole}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    began = time.perf_counter()
    with peak_memory() as peak:
        if whole:
            root = PolicyModel(load_model(str(folder)))
        else:
            root = load_policy(ModelConfig(path=str(folder)), device="cpu", seed=0)
        shard(root, root.base)
        read_weights(root, root.base)
    seconds = time.perf_counter() - began
    dist.barrier()
    dist.destroy_process_group()
    return peak.bytes / 2**20, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(Path(folder)) / 2**20
        print(f"model {size:.0f} MiB in float32")
        for ranks in args.ranks:
            found = {}
            for whole in (True, False):
                with multiprocessing.get_context("spawn").Pool(ranks, maxtasksperchild=1) as pool:
                    jobs = [(rank, ranks, Path(folder), whole) for rank in range(ranks)]
                    results = pool.starmap(load, jobs, chunksize=1)
                found[whole] = max(peak for peak, _ in results), max(seconds for _, seconds in results)
            (whole_peak, whole_seconds), (peak, seconds) = found[True], found[False]
            print(
                f"{ranks} ranks, share {size / ranks:5.0f} MiB | whole first: {whole_peak:5.0f} MiB, {whole_seconds:4.1f} s"
                f" | by slices: {peak:5.0f} MiB, {seconds:4.1f} s | {whole_peak / peak:.1f} times less",
                flush=True,
            )


if __name__ == "__main__":
    main()
