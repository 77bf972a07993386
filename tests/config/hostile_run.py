"""A run's folder that somebody sent, whose config names code that lies in it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.config import load_config
from agentrl.config.load import config_to_yaml
from agentrl.errors import ConfigError
from tests.config.loading import load
from tests.view.made import make_run


class Hostile:
    """A run's folder that somebody sent: code lies in it, and its config may name it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marker = make_run(folder), folder / "code_ran"
        self.module = folder / "evil.py"
        self.module.write_text(
            f"import pathlib\npathlib.Path({str(self.marker)!r}).touch()\n"
            "class Thing:\n    pass\ndef compute_score(**more):\n    return 1.0\n"
        )
        self.tools = folder / "tools.yaml"
        self.tools.write_text("tools: [{class_name: evil.Thing, config: {}}]\n")

    def config(self, *overrides: str, **values: Any) -> Path:
        """Write its config: one of a run, with values by dotted key."""
        tree = yaml.safe_load(config_to_yaml(load(*overrides)))
        for key, value in values.items():
            *sections, name = key.split(".")
            inner = tree
            for section in sections:
                inner = inner[section]
            inner[name] = value
        (self.folder / "config.yaml").write_text(yaml.safe_dump(tree))
        return self.folder

    @property
    def words(self) -> list[str]:
        return ["--config-path", str(self.folder), "--config-name", "config"]

    def refused(self, *more: str) -> str:
        with pytest.raises(ConfigError) as error:
            load_config([*self.words, *more])
        assert not self.marker.exists()
        return str(error.value)


@pytest.fixture(name="hostile")
def hostile_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hostile:
    """Such a folder, next to the working directory."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(folder)  # the worst case: its modules can be imported
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    return Hostile(folder)
