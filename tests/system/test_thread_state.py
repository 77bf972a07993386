"""Threads compute as the one that captured torch's state."""

from __future__ import annotations

import threading
from typing import Any

import torch

from agentrl.system.thread_state import torch_state


def seen() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cached": torch.is_autocast_cache_enabled(),
        "device": torch.empty(1).device.type,
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def seen_elsewhere() -> dict[str, Any]:
    entered, found = torch_state(), list[dict[str, Any]]()

    def work() -> None:
        with entered():
            found.append(seen())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_has_the_state_of_the_one_that_made_it() -> None:
    usual = seen()
    assert seen_elsewhere() == usual
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, cache_enabled=False), torch.device("meta"):
        assert seen() != usual
        assert seen_elsewhere() == seen()
    with torch.inference_mode():
        assert seen_elsewhere() == seen()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert seen_elsewhere()["threads"] == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert seen() == seen_elsewhere() == usual
