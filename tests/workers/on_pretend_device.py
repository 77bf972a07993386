"""What `test_pretend_device` runs in a process of its own: the workers and the embedded engine on a pretend device."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests import pretend_device

if __name__ == "__main__":
    pretending = pretend_device.install()  # before the engine is imported, which is in inference mode otherwise

from agentrl.config.sections.actor import ActorConfig, CriticConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.engines.contract import SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.model import packed
from agentrl.model.packed import load_model
from agentrl.model.scores import TokenScores
from agentrl.model.vision import sample_image
from agentrl.trajectory import PlacedImage
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.images import Images
from agentrl.workers import PolicyWorker
from agentrl.workers.backend import MiniBatch
from tests.trained import trained_batch
from tests.vision.tiny import make_tiny_vision_policy
from tests.workers.conftest import fsdp
from tests.workers.made import critic_worker, policy_worker

OPTIM = OptimConfig(lr=1e-2)


def batch_of(vocab: int) -> RaggedBatch:
    """Two prompts, two sequences each."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([24, 31, 20, 27])
    ids = torch.randint(3, vocab, (int(lengths.sum()),), generator=generator)
    mask = torch.rand(ids.shape, generator=generator) < 0.5
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    advantages = torch.randn(ids.shape, generator=generator) * mask
    return trained_batch(offsets, ids, mask, torch.tensor([0, 0, 1, 1]), advantages=advantages)


def policy(path: str, dtype: str, model: dict[str, Any] | None = None, **actor: Any) -> PolicyWorker:
    return policy_worker(
        ModelConfig(path=path, dtype=dtype, **(model or {})),
        ActorConfig(**{"ppo_mini_batch_size": 2, "ppo_max_token_len_per_gpu": 80, "optim": OPTIM} | actor),
        device=pretend_device.NAME,
        temperature=0.7,
        log_prob_max_tokens=200,
        total_steps=10,
        seed=1,
    )


def mistakes_are_seen(path: str, batch: RaggedBatch) -> None:
    there = torch.ones(2, 8, 4, device=pretend_device.NAME)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    attention = torch.ops.torch_attn._varlen_attn
    for mistake, message in (
        (lambda: there + torch.ones(4), "on one device"),
        (lambda: torch.stack([there.sum(), torch.tensor(1.0)]), "on one device"),
        (lambda: torch.ones(4)[there.long()[0, 0]], "on one device"),
        (lambda: there.numpy(), "copy it to host memory"),
        (lambda: attention(there, there, there, starts.to(there.device), starts.to(there.device), 8, 8), "float32"),
    ):
        try:
            mistake()
        except (RuntimeError, TypeError) as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"not seen: {message}")


def update(path: str, batch: RaggedBatch) -> None:
    """And what comes before and after it: log-probs of policy and reference, a checkpoint, weights for the engine."""
    worker = policy(path, "bfloat16", use_kl_loss=True, entropy_coeff=0.1, loss_agg_mode="seq-mean-token-mean")
    logprobs, _ = worker.compute_log_probs(batch)
    assert not isinstance(logprobs, pretend_device.PretendTensor)
    seen = batch.with_fields(old_logprobs=logprobs, ref_logprobs=logprobs - 0.1)
    worker.update(seen, step=1)
    with tempfile.TemporaryDirectory() as folder:
        worker.save(Path(folder), background=True)
        worker.finish_save()
        worker.load(Path(folder))
    worker.update(seen, step=2)
    assert all(tensor.is_cuda for _, tensor in fsdp(worker).named_tensors())


def update_with_the_head_in_parts(path: str, batch: RaggedBatch) -> None:
    worker = policy(path, "bfloat16", use_kl_loss=True, entropy_coeff=0.1, loss_agg_mode="seq-mean-token-mean")
    logprobs, _ = worker.compute_log_probs(batch)
    fsdp(worker).by_parts = True
    longest = int(batch.policy_tokens.max())
    packed.CHUNK_LOGITS = longest * fsdp(worker).model.base.config.vocab_size
    batch = batch.with_fields(old_logprobs=logprobs, ref_logprobs=logprobs - 0.1)
    mini: MiniBatch[TokenScores] = MiniBatch("here", batch, lambda found, micro: (found.logprobs.sum(), {}))
    with fsdp(worker).on_device():
        assert len(fsdp(worker).make_pass(batch, mini).parts) > 1
    worker.update(batch, step=1, by_token=True)


def update_with_everything_offloaded(path: str, batch: RaggedBatch) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)  # as CUDA does, a moved parameter stays what it is
    again = {"enable_gradient_checkpointing": True, "enable_activation_offload": True}
    worker = policy(path, "float32", again, fsdp_config={"param_offload": True})
    for step in (1, 2):
        worker.update(batch, step=step)
    held = [*fsdp(worker).tensors.values(), *fsdp(worker).optim.state().values()]
    assert not any(tensor.is_cuda for tensor in held if tensor.ndim)
    torch.__future__.set_swap_module_params_on_conversion(False)


def update_of_adapters(path: str, batch: RaggedBatch) -> None:
    worker = policy(path, "bfloat16", {"lora_rank": 2, "lora_alpha": 4})
    worker.compute_reference_log_probs(batch)
    worker.update(batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0]), step=1)
    assert all(tensor.is_cuda for _, tensor in fsdp(worker).named_tensors())


def critic(path: str, batch: RaggedBatch) -> None:
    worker = critic_worker(
        ModelConfig(path=path, dtype="bfloat16"),
        CriticConfig(optim=OPTIM, ppo_max_token_len_per_gpu=200),
        ActorConfig(ppo_mini_batch_size=2),
        device=pretend_device.NAME,
        total_steps=10,
        seed=1,
    )
    values = worker.compute_values(batch)[0]
    worker.update(batch.with_fields(values=values, returns=torch.ones_like(values)), step=1)


def update_with_images(path: str, batch: RaggedBatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        worker = policy(str(make_tiny_vision_policy(Path(folder))), "bfloat16")
    image = sample_image(fsdp(worker).model.base)
    at = [int(batch.offsets[sequence]) + 4 for sequence in (1, 3)]
    ids, mask = batch.ids.clone(), batch.mask.clone()
    for start in at:
        ids[start : start + image.tokens] = fsdp(worker).model.base.config.image_token_id
        mask[start : start + image.tokens] = False
    placed = [PlacedImage(4, image)]
    seen = replace(batch.with_fields(ids=ids, mask=mask), images=Images.from_sequences([[], placed, [], placed]))
    worker.update(seen.with_fields(old_logprobs=worker.compute_log_probs(seen)[0]), step=1)


def engine(path: str, batch: RaggedBatch) -> None:
    """Prompts, one step of decoding after the other, and turns that go on by few tokens and by many."""
    model = load_model(path, dtype="bfloat16", device=pretend_device.NAME)
    embedded = EmbeddedEngine(model, max_num_seqs=3, max_model_len=200, max_cache_bytes=1 << 26)

    async def dialogue(number: int) -> None:
        ids = [*range(5, 17), 20 + number // 2]
        sampling = {"temperature": (0.0, 0.7)[number % 2], "top_p": (1.0, 0.9)[number // 2], "seed": number}
        for more in ((4, 40)[number // 2], 0):
            said = await embedded.generate(ids, SamplingParams(3, **sampling), f"{number}")  # type: ignore[arg-type]
            ids = ids + said.ids + list(range(30, 30 + more))

    async def run() -> None:
        await asyncio.gather(*(dialogue(number) for number in range(4)))
        await embedded.update_weights(policy(path, "bfloat16").weights().alone(), 1)
        await embedded.close()

    asyncio.run(run())


CHECKS: tuple[Callable[[str, RaggedBatch], None], ...] = (
    mistakes_are_seen,
    update,
    update_with_the_head_in_parts,
    update_with_everything_offloaded,
    update_of_adapters,
    update_with_images,
    critic,
    engine,
)


def main(path: str) -> None:
    """Print, as JSON, what each check raised."""
    raised = {}
    batch = batch_of(int(json.loads((Path(path) / "config.json").read_text())["vocab_size"]))
    for check in CHECKS:
        try:
            with pretending:
                check(path, batch)
        except Exception:
            raised[check.__name__] = traceback.format_exc()
    print(json.dumps(raised))


if __name__ == "__main__":
    main(sys.argv[1])
