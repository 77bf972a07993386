"""The tiny vision-language policy, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat import Chat
from tests.vision.tiny import make_tiny_vision_policy


@pytest.fixture(scope="session")
def vision_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_policy(tmp_path_factory.mktemp("vision-policy"))


@pytest.fixture(scope="session")
def chat(vision_policy: Path) -> Chat:
    return Chat.from_pretrained(str(vision_policy))
