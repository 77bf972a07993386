"""`python -m agentrl.sft data.train_files=... model.path=...`: supervised training on multi-turn transcripts.

Only the assistant's tokens are learnt. The order of the data follows from the config alone, so a run can be repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from agentrl.chat import Chat
from agentrl.config import SFTConfig, load_config
from agentrl.data.sft import SFTSample, load_transcripts
from agentrl.observe.display import Display
from agentrl.system.command import exit_status


def train_sft(config: SFTConfig, display: Display) -> dict[str, float]:
    """The whole job: read, train, validate, and write `<trainer.default_local_dir>/policy` in Hugging Face format.

    An older run in that directory is gone on with if it left checkpoints, and replaced if not. Returns the metrics of
    the last step (sft/..., and val/loss with validation data). Raises UserError.
    """
    # Imported late, so that --help and config errors do not wait for torch.
    from agentrl.observe.tracking import Tracker
    from agentrl.runtime.device import resolve_device
    from agentrl.runtime.profiler import check_profile_steps
    from agentrl.runtime.ray.session import ray_session
    from agentrl.trainer.build import open_store
    from agentrl.trainer.run_folder import RunFolder
    from agentrl.trainer.sft import SupervisedTrainer, steps_per_epoch
    from agentrl.workers.roles import open_sft_workers, processes

    model, trainer, out = config.model, config.trainer, Path(config.trainer.default_local_dir)
    device = resolve_device(trainer.device, display.warn)
    chat = Chat.from_pretrained(
        model.path,
        format=config.format,
        chat_template=model.chat_template,
        chat_template_kwargs=model.chat_template_kwargs,
        trust_remote_code=model.trust_remote_code,
    )
    train = read(config.data.train_files, config, chat, display)
    validation = None if config.data.val_files is None else read(config.data.val_files, config, chat, display)
    total = trainer.total_training_steps or trainer.total_epochs * steps_per_epoch(config, train)
    check_profile_steps(trainer, total)
    store = open_store(trainer, display)
    folder = RunFolder(config, store, display)
    tracker = Tracker(trainer.logger, out, config, trainer.project_name, trainer.experiment_name, display)
    with ExitStack() as stack:
        stack.callback(tracker.close)
        if config.uses_ray:
            stack.enter_context(ray_session(config.ray_init, processes(config)))
        with display.stage("load model"):
            workers = open_sft_workers(config, device, total)
        stack.callback(workers.executor.close)
        trained = SupervisedTrainer(config, workers, chat, train, validation, total, folder, tracker, store, display)
        metrics = trained.fit()
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


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status (see `agentrl.system.command`)."""

    def work() -> None:
        config = load_config(list(sys.argv[1:] if argv is None else argv), "sft", SFTConfig)
        trainer = config.trainer
        with Display.create(f"{trainer.project_name} · {trainer.experiment_name}") as display:
            train_sft(config, display)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
