"""A real tokenizer in whose tokens tool answers are measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.tool.toolset import ToolSet
from tests.remote.conftest import server as faulty

__all__ = ["faulty"]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE, so that characters outside ASCII take several tokens and may be cut in the middle."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    text = ["Error (arguments): argument is missing", "tokens cut the answer of the tool is 12 34 56", "aaaa bbbb \n\n"]
    tokenizer.train_from_iterator(text * 20, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def bound(tokenizer: Tokenizer) -> Callable[[ToolSet], ToolSet]:
    """Binds a tool set to the tokenizer."""

    def bind(toolset: ToolSet) -> ToolSet:
        toolset.bind(lambda text: tokenizer.encode(text).ids, tokenizer.decode)
        return toolset

    return bind
