"""The date that chat templates write: of the run's first day."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config, SFTConfig, load_config, write_config
from agentrl.config.dated import dated


@pytest.mark.parametrize(
    ("command", "kind", "section"), [("train", Config, "actor_rollout_ref.model"), ("sft", SFTConfig, "model")]
)
def test_a_run_that_resumes_keeps_its_date(tmp_path: Path, command: str, kind: Any, section: str) -> None:
    def found(*words: str) -> str | None:
        given = [] if command == "train" else ["data.train_files=a.parquet", "model.path=m"]
        config = dated(load_config([f"trainer.default_local_dir={tmp_path}", *given, *words], command, kind))
        if "trainer.logger=[]" in words:
            write_config(config, tmp_path / "config.yaml")
        model = config.actor_rollout_ref.model if isinstance(config, Config) else config.model
        return model.chat_template_date

    today = date.today().isoformat()
    assert found() == today
    assert found(f"{section}.chat_template_date=2024-02-29", "trainer.logger=[]") == "2024-02-29"
    assert found() == "2024-02-29"
    assert found(f"{section}.chat_template_date=today") == "today"
    assert found("trainer.resume_mode=disable") == today
    (tmp_path / "config.yaml").write_text("- {")
    assert found() == today
