"""Compares the losses of pairs with those of TRL's DPOTrainer: the same tiny policy, the same tokens, two steps each.

Prints, for each loss, our value and gradient norm and TRL's, at the start and after a step of plain descent: where the
gradients differed in direction, the second ones would in size. TRL stays in a folder of its own:

    pip install --no-deps --target /tmp/trl trl==1.16.0 datasets accelerate dill multiprocess xxhash pandas
    PYTHONPATH=/tmp/trl python -m benchmarks.training.dpo_trl
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim import SGD
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from agentrl.config import PreferencesConfig
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.preferences import PolicyPreferenceWorker

LOSSES = {"sigmoid": ("sigmoid", 0.3, 0.5), "ipo": ("ipo", 0.3, 0.05), "sppo": ("sppo_hard", 0.05, 1e-4)}
"""By our name: TRL's, beta, and the learning rate."""
ROWS = [
    {"prompt": "How much is 12 times 3?", "chosen": " It is 36, of course.", "rejected": " No idea."},
    {"prompt": "Add 40 and 2.", "chosen": " 42", "rejected": " The sum of both is 41, I would say."},
    {"prompt": "What is 9 minus 4, please?", "chosen": " 5.", "rejected": " 6. Or 7?"},
]


def theirs(
    policy: Path, loss: str, beta: float, rate: float, out: str
) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    """Return (TRL's batch, its loss and gradient norm at the start and after a step)."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    config = DPOConfig(
        output_dir=out,
        loss_type=[loss],
        beta=beta,
        per_device_train_batch_size=len(ROWS),
        use_cpu=True,
        report_to=[],
        gradient_checkpointing=False,
        bf16=False,
    )
    trainer = DPOTrainer(model, args=config, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    model, found, optimizer = trainer.model.eval(), [], SGD(trainer.model.parameters(), lr=rate)
    for _ in range(2):
        optimizer.zero_grad()
        value = trainer.compute_loss(model, batch)
        value.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        found.append((value.item(), torch.stack([grad.norm() for grad in grads]).norm().item()))
        if len(found) == 1:
            optimizer.step()
    return batch, found


def ours(policy: Path, loss: str, beta: float, rate: float, batch: dict[str, Any]) -> list[tuple[float, float]]:
    """Return loss and gradient norm at the start and after a step, on TRL's tokens."""
    config = PreferencesConfig.model_validate(
        {
            "data": {"train_files": "none", "max_token_len_per_gpu": 30},
            "model": {"path": str(policy)},
            "loss": loss,
            "loss_options": {"beta": beta},
            "grad_clip": 1e9,
        }
    )
    worker = PolicyPreferenceWorker(config, device="cpu", total_steps=2)
    count = len(ROWS)
    order = [row for pair in range(count) for row in (pair, pair + count)]  # theirs: all chosen ones come first
    kept = [batch["attention_mask"][row].bool() for row in order]
    pairs = RaggedBatch.unsampled(
        offsets=torch.tensor([0, *(int(one.sum()) for one in kept)]).cumsum(0),
        ids=torch.cat([batch["input_ids"][row][one] for row, one in zip(order, kept, strict=True)]),
        mask=torch.cat([batch["completion_mask"][row][one].bool() for row, one in zip(order, kept, strict=True)]),
        group=torch.arange(count).repeat_interleave(2),
        trajectory=torch.arange(2 * count),
    )
    pairs = pairs.with_fields(side=torch.tensor([1, -1] * count, dtype=torch.int32))
    pairs = pairs.with_fields(ref_logprobs=worker.compute_scores(pairs)[0])
    learner: Any = worker.backend
    descent = SGD(learner.params.values(), lr=rate)
    learner.optim.step = lambda step: (descent.step(), rate)[1]
    found = [worker.update(pairs, step) for step in (1, 2)]
    return [(one["preferences/loss"], one["preferences/grad_norm"]) for one in found]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = TinyShape(vocab=400, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128)
        policy = make_tiny_policy(Path(folder) / "policy", seed=0, shape=shape)
        for name, (trl, beta, rate) in LOSSES.items():
            batch, expected = theirs(policy, trl, beta, rate, f"{folder}/out")
            found = ours(policy, name, beta, rate, batch)
            for place, mine, other in zip(("start", "after a step"), found, expected, strict=True):
                numbers = [f"{one:.7g}" for both in zip(mine, other, strict=True) for one in both]
                print(f"{name:8} {place:13} loss {' '.join(numbers[:2])}   gradient norm {' '.join(numbers[2:])}")


if __name__ == "__main__":
    main()
