"""`python -m agentrl.sft data.train_files=... model.path=...`: supervised training on multi-turn transcripts.

Only the assistant's tokens are learnt. The order of the data follows from the config alone, so a run can be repeated.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.chat import Chat
from agentrl.command import exit_status
from agentrl.config import SFTConfig, load_config, write_config
from agentrl.data.sft import SFTSample, load_transcripts
from agentrl.publish import published_directory
from agentrl.trainer.display import Display
from agentrl.trainer.tracking import Tracker

if TYPE_CHECKING:
    from agentrl.workers.supervised import SupervisedLearner


def train_sft(config: SFTConfig, display: Display) -> dict[str, float]:
    """The whole job: read, train, validate, and write `<trainer.default_local_dir>/policy` in Hugging Face format.

    An older run in that directory is replaced. Returns the metrics of the last step (sft/..., and val/loss with
    validation data). Raises UserError.
    """
    # Imported late, so that --help and config errors do not wait for torch.
    from agentrl.workers.device import resolve_device
    from agentrl.workers.supervised import SupervisedLearner

    model, out = config.model, Path(config.trainer.default_local_dir)
    device = resolve_device(config.trainer.device)
    chat = Chat.from_pretrained(
        model.path,
        format=config.format,
        chat_template=model.chat_template,
        chat_template_kwargs=model.chat_template_kwargs,
        trust_remote_code=model.trust_remote_code,
    )
    train = read(config.data.train_files, config, chat, display)
    validation = None if config.data.val_files is None else read(config.data.val_files, config, chat, display)
    total = config.trainer.total_training_steps or config.trainer.total_epochs * steps_per_epoch(config, train)
    learner = SupervisedLearner(config, device=device, total_steps=total)
    out.mkdir(parents=True, exist_ok=True)
    write_config(config, out / "config.yaml")
    metrics = fit(config, learner, train, validation, total, display)
    write_policy(learner, chat, out / "policy")
    display.note(f"{out / 'policy'}: trained on {len(train)} transcripts in {total} steps")
    return metrics


def read(files: str | list[str], config: SFTConfig, chat: Chat, display: Display) -> list[SFTSample]:
    """The transcripts of `files`; says how many were too long."""
    with display.stage("read transcripts") as stage:
        transcripts = load_transcripts(files, config.data, chat, stage.advance)
    if transcripts.too_long:
        display.warn(
            f"{transcripts.too_long} transcripts are longer than data.max_length={config.data.max_length} and left out"
        )
    return transcripts.samples


def fit(
    config: SFTConfig,
    learner: SupervisedLearner,
    train: Sequence[SFTSample],
    validation: Sequence[SFTSample] | None,
    total: int,
    display: Display,
) -> dict[str, float]:
    """`total` optimizer steps; returns the last one's metrics."""
    trainer = config.trainer
    tracker = Tracker(
        trainer.logger, Path(trainer.default_local_dir), config, trainer.project_name, trainer.experiment_name, display
    )
    tracker.truncate_after(0)
    metrics: dict[str, float] = {}
    try:
        with display.stage("sft", total=total) as stage:
            for step, samples in zip(range(1, total + 1), batches(config, train), strict=False):
                metrics = learner.step(samples, step)
                if validation is not None and (
                    step == total or (trainer.test_freq > 0 and step % trainer.test_freq == 0)
                ):
                    metrics["val/loss"] = learner.mean_loss(validation)
                    display.validation(step, metrics)
                tracker.log(metrics, step)
                stage.advance(1, loss=metrics["sft/loss"], lr=metrics["sft/lr"])
    finally:
        tracker.close()
    return metrics


def steps_per_epoch(config: SFTConfig, samples: Sequence[SFTSample]) -> int:
    """The last batch of an epoch may be smaller: no transcript is left out."""
    return -(-len(samples) // config.data.train_batch_size)


def batches(config: SFTConfig, samples: Sequence[SFTSample]) -> Iterator[list[SFTSample]]:
    """Batches of epoch after epoch, each shuffled anew by (data.seed, epoch), or all in the order of the files."""
    size, epoch = config.data.train_batch_size, 0
    while True:
        order = list(range(len(samples)))
        if config.data.shuffle:
            random.Random(f"{config.data.seed}/{epoch}").shuffle(order)
        for start in range(0, len(order), size):
            yield [samples[index] for index in order[start : start + size]]
        epoch += 1


def write_policy(learner: SupervisedLearner, chat: Chat, directory: Path) -> None:
    """Write the policy in Hugging Face format, whole or not at all. Raises TrainingError when the disk is full."""
    from agentrl.workers.export import export_model

    with published_directory(directory) as partial:
        export_model(learner.model, learner.learner.tensors, learner.dtype, partial, chat.tokenizer)
        if chat.vision is not None:
            chat.vision.save(partial)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status (see `agentrl.command`)."""

    def work() -> None:
        config = load_config(list(sys.argv[1:] if argv is None else argv), "sft", SFTConfig)
        trainer = config.trainer
        with Display.create(f"{trainer.project_name} · {trainer.experiment_name}") as display:
            train_sft(config, display)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
