"""Stages of more than a few seconds say how far they are: the list, and each with its line."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
from transformers.utils import logging as bars

from agentrl.environments import interpreter
from agentrl.errors import ConfigError
from agentrl.model.packed import load_model
from agentrl.observe.bars import bars_as_stages
from agentrl.observe.plain import PlainDisplay

STAGES = {
    "trainer/build.py": ["load models"],
    "trainer/run_sft.py": ["load model", "check rows", "read transcripts", "read pairs", "reference"],
    "engines/embedded/build.py": ["load engine"],
    "checkpoint/export.py": ["export policy", "upload"],
    "checkpoint/remote.py": ["download {name} (MB)"],
    "quickstart/assets.py": ["quickstart data"],
    "rollouts/context.py": ["check prompts"],
    "suites/run.py": ["score"],
    "offline/generate.py": ["generate"],
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


def test_an_environment_that_is_made_shows_pips_newest_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(interpreter, "_SHOWN_EVERY", 0.0)
    program = "print('Collecting a'); print('Downloading a-1.whl (3 MB)')"
    with caplog.at_level(logging.WARNING):
        interpreter._install("puzzles", [sys.executable, "-c", program], "key: pip fails")
    assert [record.getMessage().partition(" s, ")[2] for record in caplog.records] == [
        "Collecting a",
        "Downloading a-1.whl (3 MB)",
    ]
    with pytest.raises(ConfigError, match=r"key: pip fails; its last lines:\nno such package"):
        interpreter._install("puzzles", [sys.executable, "-c", "raise SystemExit('no such package')"], "key: pip fails")
