"""Chunks of responses scored in the processes of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from agentrl.config.sections.offline import EvaluateConfig
from agentrl.errors import ConfigError, TrainingError, install_extra
from agentrl.offline.scores import RUN, Responses, Scores, score_chunk
from agentrl.reward import make_reward_manager
from agentrl.runtime.ray.session import Surroundings, start_ray

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ImportError as error:
    raise ConfigError(f"ray_init.* needs Ray: {install_extra('ray')}") from error

AHEAD = 2
"""Chunks that are sent for each CPU, so that none waits for rows."""


def score_with_ray(chunks: Iterable[list[Responses]], config: EvaluateConfig) -> Iterator[list[Scores]]:
    """Yield the scores of all chunks, in order. Starts Ray, or connects to a cluster, and leaves it at the end.

    Raises ConfigError when the cluster does not answer, TrainingError when Ray's processes die.
    """
    start_ray(config.ray_init.address, config.ray_init.num_cpus)
    try:
        function = ray.remote(_score).options(num_cpus=1, max_retries=2)
        shared = ray.put(config), ray.put(Surroundings.here())
        most = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        running: list[ray.ObjectRef] = []
        for chunk in chunks:
            running.append(function.remote(chunk, *shared))
            if len(running) >= most:
                yield _next(running)
        while running:
            yield _next(running)
    finally:
        ray.shutdown()


def _score(chunk: list[Responses], config: EvaluateConfig, surroundings: Surroundings) -> list[Scores]:
    """Score one chunk, in a process of Ray."""
    surroundings.enter()

    async def work() -> list[Scores]:
        reward = make_reward_manager(config.reward_model, config.custom_reward_function)
        try:
            await reward.start(RUN)
            return await score_chunk(chunk, reward, count=config.data.on_code_error == "count")
        finally:
            await reward.close()

    return asyncio.run(work())


def _next(running: list[ray.ObjectRef]) -> list[Scores]:
    """Pop and await the first of `running`: in the order of the rows, so that sums come out the same."""
    try:
        scores: list[Scores] = ray.get(running.pop(0))
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        raise TrainingError(f"scoring in Ray's processes failed: {error}") from error
    return scores
