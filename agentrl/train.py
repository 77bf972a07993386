"""`python -m agentrl.train [key=value ...]`: reinforcement learning of a tool-using policy, the main job."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

# Threads that spin while they wait would take the cores from each other. Must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from agentrl.config import Config, load_config
from agentrl.errors import UserError
from agentrl.trainer.display import Display


def run(config: Config, display: Display) -> dict[str, float]:
    """The whole job: prepare what is `quickstart`, build, train, validate. Returns the last validation's metrics."""
    # Imported late, so that --help and config errors do not wait for torch.
    from agentrl.trainer.build import build
    from agentrl.trainer.loop import Trainer

    if "quickstart" in (config.data.train_files, config.data.val_files, config.actor_rollout_ref.model.path):
        from agentrl.quickstart import with_quickstart

        config = with_quickstart(config, display)
    with build(config, display) as parts:
        metrics = Trainer(parts).fit()
        display.note(f"done: {parts.dir} holds metrics.jsonl, reward.png, trajectories/, checkpoints/ and policy/")
    return metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 something the user can mend, 130 interrupted."""
    try:
        config = load_config(list(sys.argv[1:] if argv is None else argv))
        with Display.create(f"{config.trainer.project_name} · {config.trainer.experiment_name}") as display:
            run(config, display)
    except UserError as error:
        return complain(str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return complain(f"the disk is full: writing {error.filename or 'a file'} failed; earlier files are intact")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
