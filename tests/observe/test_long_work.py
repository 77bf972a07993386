"""Stages of more than a few seconds say how far they are: the list, and each with its line."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers.utils import logging as bars

from agentrl.environments import interpreter
from agentrl.errors import ConfigError
from agentrl.model.download import download_weights
from agentrl.model.packed import load_model
from agentrl.observe.bars import bars_as_stages
from agentrl.observe.plain import PlainDisplay
from agentrl.trl.trainer import _model_folder
from tests.naming import naming
from tests.observe.fake_hub import fake_hub

STAGES = {
    "model/download.py": ["download {path} (MB)"],
    "trainer/build.py": ["load models"],
    "trainer/run_sft.py": ["load model", "check rows", "read transcripts", "read {what}", "reference"],
    "engines/embedded/build.py": ["load engine"],
    "checkpoint/export.py": ["export policy", "upload"],
    "checkpoint/remote.py": ["download {name} (MB)"],
    "quickstart/assets.py": ["quickstart data"],
    "rollouts/context.py": ["check prompts"],
    "suites/run.py": ["score"],
    "trainer/run.py": ["load checkpoint"],
    "offline/generate.py": ["generate", "load model"],
    "replay/report.py": ["load engine"],
    "offline/evaluate.py": ["score"],
    "plan/__main__.py": ["staleness bounds"],
}
"""Stages of long work, by file. The weights and shards of a model are stages inside them."""


@pytest.mark.parametrize("file", STAGES)
def test_long_work_is_a_stage(file: str) -> None:
    text = (Path(interpreter.__file__).parents[1] / file).read_text(encoding="utf-8")
    assert [name for name in STAGES[file] if f'stage("{name}"' not in text and f'stage(f"{name}"' not in text] == []


class Impatient(PlainDisplay):
    """Shows every advance."""

    INTERVAL = 0.0


def test_weights_that_are_read_and_written_are_counted(policy_dir: Path, tmp_path: Path) -> None:
    said, before = io.StringIO(), bars.set_tqdm_hook(None)
    display = Impatient("run", said)
    with bars_as_stages(display), display.stage("load models"):
        load_model(str(policy_dir)).save_pretrained(tmp_path)
    assert bars.set_tqdm_hook(before) is None, "the hook that was there is back"
    lines = said.getvalue()
    assert "loading weights: 1/" in lines and " left" in lines and "loading weights: done" in lines
    assert "writing model shards: 1/1" in lines


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A hub's name of a model whose weights are two files of 3 and 2 MB, with other copies of them."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, megabytes in (("model-00001-of-00002", 3), ("model-00002-of-00002", 2), ("consolidated", 1)):
        (folder / f"{name}.safetensors").write_bytes(bytes([megabytes]) * (megabytes << 20))
    (folder / "config.json").write_text("{}")
    with fake_hub("someone/small", folder) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield "someone/small"


def test_weights_of_a_hub_are_counted_in_megabytes(hub: str, tmp_path: Path) -> None:
    said = io.StringIO()
    download_weights(hub, Impatient("run", said))
    lines = said.getvalue()
    assert "download someone/small (MB): begins, 5 to do" in lines and "download someone/small (MB): done  5/5" in lines
    assert " left" in lines
    there = sorted(path.name for path in (tmp_path / "cache").rglob("*.safetensors"))
    assert there == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    again = io.StringIO()
    download_weights(hub, Impatient("run", again))
    assert "download" not in again.getvalue(), "the cache has them"


def test_trls_trainer_downloads_what_it_reads(hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    there = sorted(path.name for path in _model_folder(hub).iterdir())
    assert there == ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert "download someone/small (MB): done  5/5" in capsys.readouterr().out


def test_a_model_that_no_hub_gives_is_left_to_its_reading(hub: str, tmp_path: Path) -> None:
    said = io.StringIO()
    download_weights("someone/other", Impatient("run", said))
    download_weights(str(tmp_path), Impatient("run", said))
    assert said.getvalue() == ""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Downloading a-1.whl (3 MB)", "Downloading a-1.whl (3 MB)"),
        ("Installing collected packages: " + "a, " * 100, "Installing collected packages: " + "a, " * 29 + "a, ..."),
    ],
)
def test_an_environment_that_is_made_shows_pips_newest_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, line: str, shown: str
) -> None:
    """Also while pip writes nothing: the program ends when its line was logged twice."""
    monkeypatch.setattr(interpreter, "_SHOWN_EVERY", 0.05)
    over = tmp_path / "over"
    program = (
        f"import pathlib, time\nprint({line!r}, flush=True)\n"
        f"while not pathlib.Path({str(over)!r}).exists(): time.sleep(0.01)"
    )

    def told(record: logging.LogRecord) -> bool:
        lines = [one.getMessage().partition(" s, ")[2] for one in [*caplog.records, record]]
        if lines.count(shown) == 2:
            over.touch()
        return True

    interpreter.logger.addFilter(told)
    try:
        interpreter._install("puzzles", [sys.executable, "-c", program], "key: pip fails")
    finally:
        interpreter.logger.removeFilter(told)
    assert over.exists()
    with naming(ConfigError, "key:"):
        interpreter._install("puzzles", [sys.executable, "-c", "raise SystemExit('no such package')"], "key: pip fails")
