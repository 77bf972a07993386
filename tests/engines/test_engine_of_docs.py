"""The engine of docs/extending.md is held to the contract."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from agentrl.engines.contract import RolloutEngine
from agentrl.system.targets import load_file
from tests.conftest import PROJECT
from tests.engines.contract import MAX_MODEL_LEN, EngineContract

pytestmark = pytest.mark.slice(4, "documents")


@pytest.fixture(scope="module")
def page_engine(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The page's my_engine.py."""
    found = re.search(r"```python\n(# my_engine\.py\n.*?)```", (PROJECT / "docs/extending.md").read_text(), re.DOTALL)
    assert found
    file = tmp_path_factory.mktemp("page") / "my_engine.py"
    file.write_text(found.group(1))
    return load_file(str(file))


class TestThePagesEngine(EngineContract):
    @pytest.fixture
    async def engine(
        self, page_engine: ModuleType, model_dir: Path, tokenizer: PreTrainedTokenizerBase
    ) -> AsyncIterator[RolloutEngine]:
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        engine: RolloutEngine = page_engine.PlainEngine(model, MAX_MODEL_LEN, lambda ids: str(tokenizer.decode(ids)))
        yield engine
        await engine.close()
