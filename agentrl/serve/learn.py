"""Training by live sessions: a run whose loop is `agentrl.serve.loop`, with the store's numbers among its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from agentrl.checkpoint.manifest import CHECKPOINTS, steps_in
from agentrl.config import Config
from agentrl.config.load import load_config
from agentrl.openai_api.endpoint import listen
from agentrl.quickstart.assets import NAME as QUICKSTART
from agentrl.rollouts.ledger import LedgerFile
from agentrl.serve.check import check_config
from agentrl.serve.loop import LOOP, LiveLoop
from agentrl.serve.options import FLAGS, LiveOptions
from agentrl.serve.store import STORE_FILE, Store, facts_of
from agentrl.train import train
from agentrl.trainer.observer import Step, StepObserver


class StoreKeeper(StepObserver):
    """Adds the store's totals to each step's metrics, as `live/NAME`, and has it forget tokens that are done with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store: Store | None = None
        self._oldest = -1
        """Step of the oldest checkpoint that was seen."""

    def on_rollout(self, step: Step) -> None:
        if self._store is None:
            self._store = Store(self._path)
        totals = self._store.totals()
        step.metrics |= {f"live/{name}": float(number) for name, number in totals.items()}
        step.shown |= {name: float(totals.get(f"sessions_{name}", 0)) for name in ("waiting", "ready", "taken")}

    def on_published(self, step: Step) -> None:
        """Delete the tokens of sessions that were trained on before the oldest checkpoint."""
        oldest = min(steps_in(step.run_dir / CHECKPOINTS), default=-1)
        if self._store is not None and oldest > self._oldest:
            batches = (one for one in LedgerFile(step.run_dir).read() if one.step <= oldest)
            self._store.forget({prompt for batch in batches for prompt in batch.statuses})
            self._oldest = oldest

    def forget_after(self, step: int) -> None:
        self._oldest = -1

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def learn(overrides: Sequence[str], options: LiveOptions) -> dict[str, float]:
    """Serve and train until the last step. Raises UserError, before the first step for what cannot work."""
    config = load_config(list(overrides))
    check_config(config)
    path = store_of(config)
    if path.exists() and config.trainer.resume_mode != "disable":
        with closing(Store(path)) as store:  # whose version, or model, may be another one
            if config.actor_rollout_ref.model.path != QUICKSTART:  # which the run names otherwise when it has made it
                store.know(facts_of(config))
    listen(options.host, options.port, FLAGS).close()  # refused before models are loaded
    return train(config, loops={LOOP: LiveLoop(options)}, observers=[StoreKeeper(path)])


def store_of(config: Config) -> Path:
    """Return the file of a run's store."""
    return Path(config.trainer.default_local_dir) / STORE_FILE
