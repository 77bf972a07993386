"""Collects the launch commands of verl's that a checkout's tests try, by running these tests: `harvest.py TREE OUT`.

Runs on the side's own code: imports nothing of benchmarks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config
from agentrl.config.overrides import as_override
from agentrl.errors import ConfigError
from agentrl.verl.launch import CONFIGS, arguments

PPO = "ppo_trainer"
TREE, OUT = (Path(word) for word in sys.argv[1:3])
Commands = dict[str, dict[str, Any]]
found: Commands = {}


def record(argv: Any, name: str, schema: type) -> None:
    """Keep a command, with the folder that its relative names are of."""
    if not isinstance(argv, (list, tuple)) or not all(isinstance(word, str) for word in argv):
        return
    folder = str(Path.cwd())
    one = {"argv": list(argv), "name": name, "schema": schema.__name__, "folder": folder}
    text = json.dumps(one, sort_keys=True).replace(str(TREE), "{tree}")
    found.setdefault(text, json.loads(text))


def listen(module: str, name: str, tell: Callable[..., None]) -> None:
    """Have a function say how it is called, before tests import it."""
    home = importlib.import_module(module)
    asked = getattr(home, name)

    def recorded(*words: Any, **named: Any) -> Any:
        tell(*words, **named)
        return asked(*words, **named)

    recorded.__wrapped__ = asked  # type: ignore[attr-defined]
    for loaded in list(sys.modules.values()):
        if getattr(loaded, "__name__", "").startswith("agentrl") and getattr(loaded, name, None) is asked:
            setattr(loaded, name, recorded)


def as_words(values: Any, schema: type, *rest: Any, **named: Any) -> None:
    """Keep keys with values that a test translates as a command of verl's trainer."""
    asking = str(sys._getframe(2).f_globals["__name__"])
    if schema.__name__ == "Config" and "test_" in asking:
        with contextlib.suppress(ConfigError):  # a value that no command can say
            record([as_override(key, one) for key, one in values.items()], PPO, schema)


def main() -> int:
    """Run the tests and write what they tried."""
    os.chdir(TREE)
    listen(
        "agentrl.config.load",
        "load_config",
        lambda argv=(), name="train", schema=Config, *rest, **named: record(argv, name, schema),
    )
    for module in ("agentrl.config.verl.translation", "agentrl.verl.keys.translation"):  # by commit
        with contextlib.suppress(ModuleNotFoundError):
            listen(module, "translate", as_words)
    listen("agentrl.verl.check", "judge", lambda launch: of_launch(launch.module, launch.words))
    folders = [TREE / "tests" / "config", TREE / "tests" / "verl"]
    about = [
        file for folder in folders for file in sorted(folder.glob("test_*.py")) if "verl" in str(file.relative_to(TREE))
    ]
    files = [file for file in about if PPO in file.read_text()]
    status = pytest.main(
        [
            *map(str, files),
            f"--rootdir={TREE}",
            f"--config-file={TREE}/pyproject.toml",
            f"--basetemp={OUT.parent}/files",
            "--override-ini=tmp_path_retention_policy=all",
            "--override-ini=addopts=--import-mode=importlib",
            "-pno:cacheprovider",
            "-q",
        ]
    )
    for name, case in importlib.import_module("tests.e2e.test_verl_commands").CASES.items():
        folder = OUT.parent / "cases" / name
        for file, text in case.files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        of_launch("verl.trainer.main_ppo", case.arguments)
    OUT.write_text(json.dumps(list(found.values()), indent=1))
    return int(status)


def of_launch(module: str, words: list[str]) -> None:
    """Keep a launch command."""
    if module in CONFIGS:
        record(arguments(words, CONFIGS[module]), PPO, Config)


sys.exit(main())
