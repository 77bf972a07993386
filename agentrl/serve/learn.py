"""Training by live sessions: a run whose loop is `agentrl.serve.loop`, with the store's numbers among its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config import Config
from agentrl.config.load import load_config
from agentrl.serve.check import check_config
from agentrl.serve.loop import LOOP, LiveLoop
from agentrl.serve.options import LiveOptions
from agentrl.serve.store import STORE_FILE, Store
from agentrl.train import train
from agentrl.trainer.observer import Step, StepObserver


class Totals(StepObserver):
    """Adds the store's totals to each step's metrics, as `live/NAME`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store: Store | None = None

    def on_rollout(self, step: Step) -> None:
        if self._store is None:
            self._store = Store(self._path)
        totals = self._store.totals()
        step.metrics |= {f"live/{name}": float(number) for name, number in totals.items()}
        step.shown |= {name: float(totals.get(f"sessions_{name}", 0)) for name in ("waiting", "ready", "taken")}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def learn(overrides: Sequence[str], options: LiveOptions) -> dict[str, float]:
    """Serve and train until the last step. Raises UserError, before the first step for what cannot work."""
    config = load_config(list(overrides))
    check_config(config)
    path = store_of(config)
    if path.exists() and config.trainer.resume_mode != "disable":
        Store(path).close()  # whose version may be another one
    return train(config, loops={LOOP: LiveLoop(options)}, observers=[Totals(path)])


def store_of(config: Config) -> Path:
    """Return the file of a run's store."""
    return Path(config.trainer.default_local_dir) / STORE_FILE
