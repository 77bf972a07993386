"""The benchmarks that are for real models, at a size for a test: they run, and count the same work for both sides."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.real import engine, update


def test_engine_and_generate_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    engine.main(["--tiny", "--rounds=1"])
    torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert re.search(r"^8 x 6, engine: [\d.]+ tokens a CPU-second, decoding alone [\d.]+", said, re.M)
    assert re.search(r"^8 x 6, engine over generate: [\d.]+, decoding alone [\d.]+", said, re.M)
    assert re.search(r"linear layers alone \d+ ms", said) and re.search(r"weights: \d\.\d MB in [\d.]+ CPU-sec", said)


def test_an_update_is_compared_with_its_products(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    update.main(["--tiny", "--updates=1"])
    torch.set_num_threads(threads)
    said = capsys.readouterr().out
    for name in ("update", "log-probs"):
        assert re.search(
            rf"^{name}: [\d.]+ CPU-seconds, [\d.]+ GFLOP a second: \d+% of one large product, \d+%", said, re.M
        )
    assert re.search(r"^memory: [\d.]+ GB more than at rest, [\d.]+ of what the formula", said, re.M)


def test_a_model_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for program in (engine, update):
        with pytest.raises(SystemExit):
            program.main([])
        assert "give --model FOLDER, or --tiny" in capsys.readouterr().err
