"""Peak memory of a rank while it loads a model that is sharded: by slices, against reading it whole first.

    python -m benchmarks.training.sharded_load [--ranks 2 4]

Writes a random model of 230 million parameters in bfloat16 (several files) to a temporary folder. Each rank of a gloo
group makes its part of a float32 policy from it, in processes of their own for each way, and runs a few tokens through
it, for which FSDP gathers one layer after the other. Given is the anonymous memory above what a rank held before.
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
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.config.sections.parallel import Parallel
from agentrl.model.heads import PolicyModel
from agentrl.model.packed import load_model
from agentrl.model.sharded_load import open_model, read_weights
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.shard import shard
from benchmarks.training.peak_memory import Peak, peak_memory


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


class Watched(PolicyModel):
    """Notes how much was held before the first forward pass, which gathers weights."""

    def __init__(self, base: PreTrainedModel, peak: Peak) -> None:
        super().__init__(base)
        self.peak = peak
        self.read = 0

    def check_attention(self) -> None:
        self.read = self.peak.bytes
        super().check_attention()


def load(rank: int, ranks: int, folder: Path, whole: bool) -> tuple[float, float, float]:
    """Load the model on one rank; return its peak MiB until the weights are there, its peak MiB in all, and seconds."""
    torch.set_num_threads(1)
    meeting = f"file://{folder / f'meeting-{ranks}-{whole}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    mesh = Mesh(Parallel(), "cpu")
    began = time.perf_counter()
    with peak_memory() as peak:
        if whole:
            root = Watched(load_model(str(folder)), peak)
            shard(root, root.base, mesh)
            root.read = peak.bytes
            needed = torch.ones(32, dtype=torch.bool)
            with torch.no_grad():
                root(torch.arange(32), torch.tensor([0, 32]), needed=needed, temperature=1.0)
        else:
            root = Watched(open_model(str(folder), dtype="float32", device="cpu"), peak)
            shard(root, root.base, mesh)
            read_weights(root, root.base)
    seconds = time.perf_counter() - began
    dist.barrier()
    dist.destroy_process_group()
    return root.read / 2**20, peak.bytes / 2**20, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "MALLOC_MMAP_THRESHOLD_": "1048576",  # what is let go of goes back to the system
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(Path(folder)) / 2**20
        print(
            f"model {size:.0f} MiB in float32; MiB at most until the weights are there (until a forward pass is done)"
        )
        for ranks in args.ranks:
            found = {}
            for whole in (True, False):
                with multiprocessing.get_context("spawn").Pool(ranks, maxtasksperchild=1) as pool:
                    jobs = [(rank, ranks, Path(folder), whole) for rank in range(ranks)]
                    found[whole] = [max(column) for column in zip(*pool.starmap(load, jobs, chunksize=1), strict=True)]
            (first, after, took), (read, done, seconds) = found[True], found[False]
            print(
                f"{ranks} ranks, {size / ranks:4.0f} MiB each | whole first {first:5.0f} ({after:5.0f}), {took:4.1f} s "
                f"| by slices {read:5.0f} ({done:5.0f}), {seconds:4.1f} s | {first / read:.1f} times less",
                flush=True,
            )


if __name__ == "__main__":
    main()
