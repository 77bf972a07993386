"""A whole run of supervised training: read, check, build, train. The data's order follows from the config alone."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from agentrl.chat import Chat
from agentrl.config import SFTConfig
from agentrl.data.sft import SFTSample, check_transcripts, load_transcripts
from agentrl.model.folder import check_folder
from agentrl.observe.display import Display


def train_sft(config: SFTConfig, display: Display) -> dict[str, float]:
    """Read, train, validate, and write `<trainer.default_local_dir>/policy` in Hugging Face format.

    An older run in that directory is gone on with if it left checkpoints, and replaced if not. Returns the metrics of
    the last step (sft/..., and val/loss with validation data). Raises UserError.
    """
    trainer, out = config.trainer, Path(config.trainer.default_local_dir)
    check_folder("model.path", config.model.path)
    # The rows are read twice: a mistake in the last one waits neither for torch nor for tokenising all before it.
    train_rows, val_rows = (check(files, config, display) for files in (config.data.train_files, config.data.val_files))
    from agentrl.observe.tracking import Tracker
    from agentrl.runtime.device import resolve_device
    from agentrl.runtime.profiler import check_profile_steps
    from agentrl.runtime.ray.session import ray_session
    from agentrl.trainer.build import open_store
    from agentrl.trainer.run_folder import RunFolder
    from agentrl.trainer.sft import SupervisedTrainer, build_checkpoints, find_beginning, steps_per_epoch
    from agentrl.workers.roles import open_sft_workers, processes

    device = resolve_device(trainer.device, display.warn)
    chat = Chat.of_model(config.model, config.format)
    train = read(config.data.train_files, train_rows, config, chat, display)
    validation = None
    if config.data.val_files is not None:
        validation = read(config.data.val_files, val_rows, config, chat, display)
    total = trainer.total_training_steps or trainer.total_epochs * steps_per_epoch(config, train)
    check_profile_steps(trainer, total)
    store = open_store(trainer, display)
    folder = RunFolder(config, store, display)
    checkpoints = build_checkpoints(config, train, store, display, validates=validation is not None)
    begun_from = find_beginning(config, checkpoints, total, display)
    tracker = Tracker.of(trainer, out, config, display)
    with ExitStack() as stack:
        stack.callback(tracker.close)
        if config.uses_ray:
            stack.enter_context(ray_session(config.ray_init, processes(config)))
        with display.stage("load model"):
            workers = open_sft_workers(config, device, total)
        stack.callback(workers.executor.close)
        trained = SupervisedTrainer(
            config, workers, chat, train, validation, total, folder, tracker, checkpoints, begun_from, display
        )
        metrics = trained.fit()
    display.note(f"{out / 'policy'}: trained on {len(train)} transcripts in {total} steps")
    return metrics


def check(files: str | list[str] | None, config: SFTConfig, display: Display) -> int:
    """Check the rows of `files`; return their number, 0 without files."""
    if files is None:
        return 0
    with display.stage("check transcripts") as stage:
        return check_transcripts(files, config.data, stage.advance)


def read(files: str | list[str], rows: int, config: SFTConfig, chat: Chat, display: Display) -> list[SFTSample]:
    """Read the transcripts of `files`; say how many were too long, and how many are learnt in part."""
    with display.stage("read transcripts", total=rows) as stage:
        transcripts = load_transcripts(files, config.data, chat, stage.advance)
    if transcripts.too_long:
        display.warn(
            f"{transcripts.too_long} transcripts are longer than data.max_length={config.data.max_length} and left out"
        )
    for what, count in sorted(transcripts.unlearnt.items()):
        display.warn(f"{count} of {len(transcripts.samples)} transcripts of {files} have {what}")
    return transcripts.samples
