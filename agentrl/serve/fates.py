"""The fate of each session of a run, and of each feedback on it: the store, joined with the run's ledger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import DataError
from agentrl.rollouts.ledger import LedgerFile
from agentrl.serve.store import STORE_FILE, Store
from agentrl.system.json_value import JSON


def fates(folder: Path) -> Iterator[dict[str, JSON]]:
    """List each session's fate, and the prompt and the step that trained on it, where one did.

    Raises DataError for a folder without a store of this version.
    """
    path = folder / STORE_FILE
    if not path.is_file():
        raise DataError(f"{path}: expected the store of live sessions of a run, found no such file")
    steps = {
        prompt: (batch.step, status) for batch in LedgerFile(folder).read() for prompt, status in batch.statuses.items()
    }
    store = Store(path)
    try:
        for one in store.sessions():
            told: dict[str, JSON] = {"session": one.id, "score": one.score, "feedback": store.feedback_on(one.id)}
            if one.prompt is not None:
                step, status = steps.get(one.prompt, (None, "taken"))
                told |= {"fate": str(status), "prompt": one.prompt, "step": step}
            else:
                told["fate"] = "open" if one.fate is None else str(one.fate)
            yield told
    finally:
        store.close()
