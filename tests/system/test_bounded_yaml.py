"""Texts that PyYAML fails at without a YAMLError: each reader names the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from agentrl.config import load_config
from agentrl.config.dated import dated
from agentrl.errors import ConfigError, DataError
from agentrl.system.bounded_yaml import load_yaml
from agentrl.system.entries import read_entries
from agentrl.view.run import _config
from data_prep.traces.scrub import read_rules
from tools.retriever.milvus import read_spec

TEXTS = {
    "number": "!!int abc",
    "digits": "9" * 5000,
    "date": "!!timestamp x",
    "depth": "[" * 5000 + "]" * 5000,
}

each = pytest.mark.parametrize("value", TEXTS.values(), ids=list(TEXTS))


@each
def test_a_document_is_no_yaml(value: str) -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml(f"a: {value}")


@each
def test_the_viewer_shows_no_config_of_it(value: str) -> None:
    assert _config(f"a: {value}\n...\n".encode()) == {}


@each
def test_readers_of_users_files_name_the_file(value: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"tools: [{{class_name: a.B, config: {value}}}]\n")
    for reader, error in ((read_spec, ConfigError), (read_rules, DataError)):
        with pytest.raises(error, match=r"mine\.yaml"):
            reader(file)
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        read_entries(file, "tools")


@each
@pytest.mark.parametrize("is_of_a_run", [False, True], ids=["own", "run's"])
def test_a_config_names_the_file(value: str, is_of_a_run: bool, tmp_path: Path) -> None:
    ends = "every_key: true\n...\n" if is_of_a_run else ""
    (tmp_path / "config.yaml").write_text(f"data: {{train_files: {value}}}\n{ends}")
    if is_of_a_run:
        (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_config([f"--config-path={tmp_path}", "--config-name=config"])


def test_a_text_like_a_date_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\ntrainer: {experiment_name: 2020-99-99}\n")
    config = load_config([f"--config-path={tmp_path}", "--config-name=mine"])
    assert config.trainer.experiment_name == "2020-99-99"


@each
def test_a_run_is_dated_without_it(value: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"data: {{train_files: {value}}}\n")
    config = load_config([f"trainer.default_local_dir={tmp_path}"])
    assert dated(config).actor_rollout_ref.model.chat_template_date is not None
