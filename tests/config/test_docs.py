"""docs/config.md says what the schema says."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.docs import page

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def test_the_page_of_keys_is_the_schemas() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == page(), "run: python -m agentrl.config.docs > docs/config.md"
    assert "| `algorithm.lam` | number | `1.0` |" in page()
    assert "| `trainer.total_training_steps` | integer or null | null |" in page()
