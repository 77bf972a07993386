"""Rows from an environment's task list: `python -m data_prep.environment --config FILE.yaml --out DIR`.

FILE.yaml is a file of agent loops (`actor_rollout_ref.rollout.agent.agent_loop_config_path`) with an environment in it.
Written are train.parquet and validation.parquet. No task for validation is among those for training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl.agent_loop.limits import seed_of
from agentrl.agent_loop.registry import get_loop, load_agent_loops
from agentrl.environments.loop import COLUMN, EnvironmentLoop, roles_of, tools_of
from agentrl.environments.sidecar import EnvironmentOptions, Fields, Sidecar
from agentrl.errors import ConfigError, DataError, InfrastructureError, UserError
from agentrl.observe.open import open_display
from agentrl.system.json_value import JSON
from agentrl.system.visible import complain
from data_prep.files import write_splits
from data_prep.options import positive


def main(arguments: list[str] | None = None) -> int:
    """Write the files and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.environment", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML of agent loops, with the environment's entry")
    parser.add_argument("--name", help="the entry; needed where the file has several environments")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the two files to")
    parser.add_argument("--train-rows", type=positive, default=1000, help="at most so many")
    parser.add_argument("--validation-rows", type=positive, default=100, help="at most so many")
    parser.add_argument("--seed", type=int, default=1, help="of the tasks and of their episodes")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for one list")
    given = parser.parse_args(arguments)
    try:
        name, options = entry(given.config, given.name)
        counts = {"train": given.train_rows, "validation": given.validation_rows}
        with open_display(f"{name} · {given.out}") as display, display.stage("list tasks"):
            listed = asyncio.run(list_tasks(Sidecar(options), given.seed, counts, given.timeout))
        seen: dict[str, Fields] = {}
        files: dict[Path, list[dict[str, JSON]]] = {}
        remarks: list[str] = []
        for split, tasks in listed.items():
            new = [task for task in tasks if seen.setdefault(content_of(task), task) is task]
            path = given.out / f"{split}.parquet"
            if not new:
                why = "that was not listed before" if tasks else "with its task_options"
                raise DataError(f"{path}: environment {name} lists no task for {split} {why}")
            files[path] = rows(name, new, split, given.seed)
            left = f"; {len(tasks) - len(new)} were listed before and are left out" if len(new) < len(tasks) else ""
            remarks.append(f"{path}: {len(new)} tasks{left}")
        write_splits(files)
        print(*remarks, sep="\n", flush=True)
    except (UserError, InfrastructureError) as error:
        return complain(error)
    return 0


def entry(file: Path, name: str | None) -> tuple[str, EnvironmentOptions]:
    """Find the environment's entry. Raises ConfigError."""
    found = {
        one: EnvironmentOptions.model_validate(options)
        for one, options in load_agent_loops(file).items()
        if issubclass(get_loop(one), EnvironmentLoop)
    }
    if name is None and len(found) == 1:
        name = next(iter(found))
    if name not in found:
        raise ConfigError(
            f"{file}: expected --name with one of its environments ({', '.join(found) or 'it has none'}), found "
            f"{name or 'no --name'}"
        )
    return name, found[name]


async def list_tasks(sidecar: Sidecar, seed: int, counts: Mapping[str, int], timeout: float) -> dict[str, list[Fields]]:
    """Ask for the tasks of each split."""
    try:
        return {split: await sidecar.tasks(split, seed, count, timeout) for split, count in counts.items()}
    finally:
        await sidecar.close()


def content_of(task: Fields) -> str:
    """Return what makes a task the same as another: all but its id."""
    return json.dumps({key: value for key, value in task.items() if key != "id"}, sort_keys=True)


def rows(name: str, tasks: Iterable[Fields], split: str, seed: int) -> list[dict[str, JSON]]:
    """Make a row of each task. Raises DataError for a task without a prompt, or with tools of another form."""
    made: list[dict[str, JSON]] = []
    for index, task in enumerate(tasks):
        place, prompt = f"environment {name}: task {task.get('id', index)} of split {split}", task.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{place}: expected a text or a list of messages as `prompt`, found {prompt!r:.80}")
        try:
            tools_of(task)
            roles_of(task)
        except ValueError as error:
            raise DataError(f"{place}: {error}") from error
        # The prompt has a column of its own.
        kept: Fields = {"id": f"{split}/{index}", **{key: value for key, value in task.items() if key != "prompt"}}
        row = {"entry": name, "index": index, "seed": seed_of(seed, name, split, index) % 2**31, "data": kept}
        text = json.dumps(row, ensure_ascii=False)
        made.append(
            {
                "data_source": "/".join(["environment", name, *([str(task["source"])] if "source" in task else [])]),
                "prompt": messages,
                "agent_name": name,
                "extra_info": {"split": split, "index": index, COLUMN: text},
            }
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
