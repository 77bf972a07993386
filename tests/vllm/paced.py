"""A worker of a vLLM server whose steps take a while: a tiny model's answers would end before a test can end them."""

from __future__ import annotations

import time

from agentrl.engines.vllm import receiver
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's derives from it

STEP = 0.005
"""Seconds that a step waits before it is computed."""

_execute = GPUModelRunner.execute_model


def _execute_later(self: GPUModelRunner, *arguments: object, **named: object) -> object:
    time.sleep(STEP)
    return _execute(self, *arguments, **named)


GPUModelRunner.execute_model = _execute_later


class Extension(receiver.Extension):
    """The methods of agentrl's extension."""
