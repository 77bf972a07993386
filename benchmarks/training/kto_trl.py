"""Compares the losses of judged conversations with those of TRL's KTOTrainer, and records TRL's numbers for the tests.

By case of `CASES`: the same tiny policy and rows, TRL's model in float64. Prints our loss, KL and gradient norm and
TRL's, at the start and after a step of plain descent. The record also has TRL's losses of given log-probs, with their
gradients by conversation. TRL stays in a folder of its own:

    pip install --no-deps --target /tmp/trl trl==1.16.0 datasets accelerate dill multiprocess xxhash pandas
    PYTHONPATH=/tmp/trl:. python -m benchmarks.training.kto_trl
    PYTHONPATH=/tmp/trl:. python -m benchmarks.training.kto_trl --record tests/recorded_kto.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from agentrl.config import PreferencesConfig
from agentrl.data.judged import add_mismatched, load_judged
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.workers.preferences import PolicyPreferenceWorker, to_batch

RATE = 0.5
"""Learning rate of the step of descent."""
CASES: dict[str, dict[str, Any]] = {
    "kto": {"beta": 0.3, "undesirable_weight": 0.2},
    "kto, weighted": {"beta": 0.1, "desirable_weight": 0.7, "undesirable_weight": 1.9},
    "apo_zero_unpaired": {"beta": 0.3, "undesirable_weight": 1.5},
}
"""By name, which begins with the loss, its options."""
ROWS = [
    {"prompt": "How much is 12 times 3?", "completion": " It is 36, of course.", "label": True},
    {"prompt": "How much is 12 times 3?", "completion": " No idea.", "label": False},
    {"prompt": "Add 40 and 2.", "completion": " 42", "label": True},
    {"prompt": "What is 9 minus 4, please?", "completion": " 6. Or 7? I would not know.", "label": False},
    {"prompt": "Say hi.", "completion": " Hi.", "label": True},
]


def make_policy(folder: Path) -> Path:
    """Make the tiny policy of both sides."""
    shape = TinyShape(vocab=400, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128)
    return make_tiny_policy(folder, seed=0, shape=shape)


def theirs(policy: Path, case: str, out: str) -> dict[str, Any]:
    """Return TRL's sequences and mismatched sequences, and loss, KL and gradient norm at the start and after a step."""
    from datasets import Dataset
    from torch.optim import SGD
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import KTOConfig, KTOTrainer

    config = KTOConfig(
        output_dir=out,
        loss_type=case.partition(",")[0],
        per_device_train_batch_size=len(ROWS),
        precompute_ref_log_probs=False,
        use_cpu=True,
        report_to=[],
        gradient_checkpointing=False,
        bf16=False,
        **CASES[case],
    )
    model, reference = (AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    trainer = KTOTrainer(
        model, reference, args=config, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer
    )
    batch = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.eval()
    optimizer, steps = SGD(model.parameters(), lr=RATE), []
    for _ in range(2):
        optimizer.zero_grad()
        value = trainer.compute_loss(model, batch)
        value.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm().item()
        steps.append({"loss": value.item(), "kl": trainer._metrics["eval"]["kl"][-1], "grad_norm": norm})
        if len(steps) == 1:
            optimizer.step()
    found: dict[str, Any] = {"steps": steps}
    for name, prefix in (("sequences", ""), ("mismatched", "KL_")):
        if f"{prefix}input_ids" in batch:
            kept = batch[f"{prefix}attention_mask"].bool()
            found[name] = [
                {"ids": ids[own].tolist(), "learnt": learnt[own].tolist()}
                for ids, own, learnt in zip(
                    batch[f"{prefix}input_ids"], kept, batch[f"{prefix}completion_mask"], strict=True
                )
            ]
    return found


def of_given(case: str) -> dict[str, Any]:
    """Return made-up sums of log-probs, and TRL's loss and its gradient by each, without a model."""
    from trl import KTOTrainer

    loss, random = case.partition(",")[0], torch.Generator().manual_seed(7)
    drawn = 5 * torch.randn(4, 8, generator=random, dtype=torch.float64) - 20
    drawn[2] += 4  # so that the KL is above 0
    logps = drawn[0].clone().requires_grad_()
    label = torch.rand(8, generator=random) < 0.6
    forward = SimpleNamespace(training=True)

    def model(input_ids: torch.Tensor, **_: object) -> object:
        """Give the log-probs of rows that were asked for: the first token names whose."""
        by_token = (logps if input_ids[0, 0] == 0 else drawn[2])[:, None]
        return SimpleNamespace(log_probs=by_token, entropy=torch.zeros(8, 1), mean_logits=torch.zeros(8, 1))

    options = {"desirable_weight": 1.0, "undesirable_weight": 1.0, **CASES[case]}
    trainer = SimpleNamespace(
        **options,
        loss_type=loss,
        model=forward,
        calculate_KL=loss == "kto",
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch)
    two = torch.ones(8, 2, dtype=torch.int64)
    batch = {
        **{"input_ids": 0 * two, "attention_mask": two, "completion_mask": two, "label": label},
        **{"KL_input_ids": two, "KL_attention_mask": two, "KL_completion_mask": two},
        **{"ref_logps": drawn[1], "ref_KL_logps": drawn[3]},
    }
    value = KTOTrainer._compute_loss(trainer, model, batch, return_outputs=False)
    value.backward()
    assert logps.grad is not None
    found = {"ratios": (logps - drawn[1]).detach(), "mismatched": drawn[2] - drawn[3], "good": label}
    found |= {"loss": value.detach(), "gradient": logps.grad}
    return {name: one.tolist() for name, one in found.items()}


def ours(policy: Path, case: str, file: Path) -> list[dict[str, float]]:
    """Return loss, KL and gradient norm at the start and after a step of descent, by the rows in a file."""
    from torch.optim import SGD

    from agentrl.chat import Chat

    config = PreferencesConfig.model_validate(
        {
            "data": {"train_files": str(file), "max_token_len_per_gpu": 30},
            "model": {"path": str(policy)},
            "loss": case.partition(",")[0],
            "loss_options": CASES[case],
            "grad_clip": 1e9,
        }
    )
    rows = load_judged(str(file), config.data, Chat.from_pretrained(str(policy)), lambda done: None).samples
    if config.rows == "mismatched":
        add_mismatched([rows], config.data.max_length)
    worker, batch = PolicyPreferenceWorker(config, device="cpu", total_steps=2), to_batch(rows)
    batch = batch.with_fields(ref_logprobs=worker.compute_scores(batch)[0])
    learner: Any = worker.backend
    descent = SGD(learner.params.values(), lr=RATE)
    learner.optim.step = lambda step: (descent.step(), RATE)[1]
    found = [worker.update(batch, step) for step in (1, 2)]
    return [{name: one[f"preferences/{name}"] for name in ("loss", "kl", "grad_norm")} for one in found]


def write_rows(file: Path) -> Path:
    """Write the rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write TRL's numbers, for tests/test_kto.py")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policy, file = make_policy(Path(folder) / "policy"), write_rows(Path(folder) / "rows.jsonl")
        expected = {case: {**theirs(policy, case, f"{folder}/out"), "given": of_given(case)} for case in CASES}
        for case, of_trl in expected.items():
            for place, mine, other in zip(
                ("start", "after a step"), ours(policy, case, file), of_trl["steps"], strict=True
            ):
                print(f"{case:18} {place:13}" + "".join(f" {name} {mine[name]:.8g} {other[name]:.8g}" for name in mine))
        if asked.record is not None:
            asked.record.write_text(json.dumps(expected) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
