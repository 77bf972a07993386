"""What a step's trajectories say about it, as one flat dict of numbers. Pure functions.

A trajectory *succeeds* when its score is at least `SUCCESS_SCORE` (1.0, the most the ready scorers give). Rewards and
successes are over scored trajectories, lengths, turns and tools over those that did not fail, statuses over all.
Lengths are in tokens, times in seconds, rates and fractions between 0 and 1. A number that has nothing to be taken
over is left out.

Training (`step_metrics`):

| name | what it is |
|---|---|
| `reward/mean` `/std` `/min` `/max` | what is trained on: score, turn rewards, reward model (std is unbiased) |
| `reward/<source>/mean` | the same by data source |
| `score/mean`, `score/<extra>` | the reward function's value; the further numbers it gave |
| `success/rate`, `success/<source>` | fraction that succeeds |
| `group/zero_variance` | fraction of prompts whose trajectories all have the same reward |
| `prompt/mean` `/max` | tokens of the first prompt |
| `response/sampled_mean` `/sampled_max` | tokens that the policy sampled |
| `response/observed_mean` `/observed_max` | tokens after the first prompt that it did not sample |
| `response/mean` `/max` | both together |
| `turns/mean` `/max` | assistant turns |
| `tool/calls_mean` `/calls_max` | tool calls a trajectory |
| `tool/malformed_rate` | fraction of calls that name no tool, an unknown tool, or have unreadable or wrong arguments |
| `tool/error_rate`, `tool/error/<kind>` | fraction of calls that ended in an error, and in one of a kind |
| `tool/truncated_rate` | fraction of calls whose answer was cut |
| `tool/seconds_mean` `/seconds_p99` | latency of a call |
| `tool/<name>/calls` `/error_rate` `/error/<kind>` | by tool (known ones only) |
| `tool/<name>/seconds_mean` `/seconds_p50` `/seconds_p99` | latency of its calls |
| `tool/<name>/queue_seconds_mean` `/queue_seconds_p99` | how long its calls waited for their turn |
| `tool/<name>/faults` | calls that failed their trajectory, through no fault of the policy's |
| `tool/<name>/retries` `/fault/<kind>` | of a tool that asks a server: requests made again; failed requests by kind |
| `tool/<name>/breaker_open` `/breaker_opened` | whether its server is left alone now; how often that began |
| `status/<status>` | fraction that ended so; `status/length` is the truncation rate |
| `failure/<cause>` | number of failed trajectories by cause |
| `drift/<kind>` | fraction of the compared transcripts that drifted so from a full re-render |
| `trajectory/retries` | fresh tries, summed |
| `trajectory/<name>` | mean of whatever else the loop or a tool measured (`generate_seconds`, `tool_seconds`, ...) |

Validation (`validation_metrics`), with n sampled trajectories a prompt:

| name | what it is |
|---|---|
| `val/success_sampled`, `val/success_greedy` | fraction that succeeds |
| `val/reward_sampled`, `val/reward_greedy` | mean reward |
| `val/<source>/mean@n` | success of a sampled trajectory |
| `val/<source>/pass@k` | at least one of k succeeds, k = 1, 2, 4, ... up to n |
| `val/<source>/best@n` | mean over prompts of the best score of n |
| `val/<source>/greedy` | success of the greedy trajectory |
| `val/response_mean`, `val/turns_mean`, `val/calls_mean`, `val/malformed_rate` | as in training |
| `val/failed` | fraction of all validation trajectories that have no score |
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from agentrl.tool import MALFORMED, ErrorKind
from agentrl.toolset import percentile
from agentrl.trajectory import Outline, Status, ToolCallRecord

Metrics = dict[str, float]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

SUCCESS_SCORE = 1.0


def step_metrics(trajectories: Sequence[Outline], *, turn_reward_coef: float = 1.0) -> Metrics:
    """Metrics of one training step; names in the module's table."""
    lived = [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]
    return (
        _rewards(trajectories, turn_reward_coef)
        | _lengths(lived)
        | _tools([trajectory.calls for trajectory in lived])
        | _endings(trajectories)
        | _measured(trajectories)
    )


def validation_metrics(
    sampled: Sequence[Outline], greedy: Sequence[Outline], *, turn_reward_coef: float = 1.0
) -> Metrics:
    """Metrics of one validation; names in the module's table. `Trajectory.group` tells the prompts apart."""
    metrics: Metrics = {}
    for name, trajectories in (("sampled", sampled), ("greedy", greedy)):
        scored = [trajectory for trajectory in trajectories if trajectory.score is not None]
        if scored:
            metrics[f"val/success_{name}"] = _mean(map(succeeds, scored))
            metrics[f"val/reward_{name}"] = _mean(total_reward(trajectory, turn_reward_coef) for trajectory in scored)
    for source, trajectories in _by(sampled, lambda trajectory: trajectory.data_source).items():
        metrics |= {f"val/{source}/{name}": value for name, value in _sampled_source(trajectories).items()}
    for source, trajectories in _by(greedy, lambda trajectory: trajectory.data_source).items():
        scored = [trajectory for trajectory in trajectories if trajectory.score is not None]
        if scored:
            metrics[f"val/{source}/greedy"] = _mean(map(succeeds, scored))
    everything = [*sampled, *greedy]
    lived = [trajectory for trajectory in sampled or greedy if trajectory.status is not Status.FAILED]
    if lived:
        lengths, tools = _lengths(lived), _tools([trajectory.calls for trajectory in lived])
        metrics["val/response_mean"] = lengths["response/mean"]
        metrics["val/turns_mean"] = lengths["turns/mean"]
        metrics["val/calls_mean"] = tools["tool/calls_mean"]
        if "tool/malformed_rate" in tools:
            metrics["val/malformed_rate"] = tools["tool/malformed_rate"]
    if everything:
        metrics["val/failed"] = _mean(trajectory.score is None for trajectory in everything)
    return metrics


def succeeds(trajectory: Outline) -> bool:
    """Whether it was scored with at least SUCCESS_SCORE."""
    return trajectory.score is not None and trajectory.score >= SUCCESS_SCORE


def total_reward(trajectory: Outline, turn_reward_coef: float = 1.0) -> float:
    """score + turn_reward_coef * (sum of turn rewards) + model_reward. Raises ValueError when it has no score."""
    return score_of(trajectory) + turn_reward_coef * trajectory.turn_reward + trajectory.model_reward


def score_of(trajectory: Outline) -> float:
    """Raises ValueError when it has none."""
    if trajectory.score is None:
        raise ValueError(f"trajectory {trajectory.uid} has no score ({trajectory.status})")
    return trajectory.score


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Probability that at least one of k samples succeeds, from `successes` of n: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of arXiv:2107.03374, eq. 1. Raises ValueError unless 1 <= k <= n and 0 <= successes <= n.
    """
    if not (1 <= k <= n and 0 <= successes <= n):
        raise ValueError(f"pass_at_k: want 1 <= k <= n and 0 <= successes <= n, got n={n}, {successes=}, k={k}")
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def _rewards(trajectories: Sequence[Outline], coef: float) -> Metrics:
    scored = [trajectory for trajectory in trajectories if trajectory.score is not None]
    if not scored:
        return {}
    rewards = [total_reward(trajectory, coef) for trajectory in scored]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "score/mean": _mean(map(score_of, scored)),
        "success/rate": _mean(map(succeeds, scored)),
    }
    for source, members in _by(scored, lambda trajectory: trajectory.data_source).items():
        metrics[f"reward/{source}/mean"] = _mean(total_reward(trajectory, coef) for trajectory in members)
        metrics[f"success/{source}"] = _mean(map(succeeds, members))
    for name, values in _collect(trajectory.score_extra for trajectory in scored).items():
        metrics[f"score/{name}"] = _mean(values)
    groups = _by(scored, lambda trajectory: trajectory.group).values()
    metrics["group/zero_variance"] = _mean(len({total_reward(one, coef) for one in group}) == 1 for group in groups)
    return metrics


def _lengths(trajectories: Sequence[Outline]) -> Metrics:
    begun = [trajectory for trajectory in trajectories if trajectory.prompt_length]
    if not begun:
        return {}
    series = {
        "prompt/": [trajectory.prompt_length for trajectory in begun],
        "response/": [trajectory.response_length for trajectory in begun],
        "response/sampled_": [trajectory.num_sampled for trajectory in begun],
        "response/observed_": [trajectory.response_length - trajectory.num_sampled for trajectory in begun],
        "turns/": [trajectory.assistant_turns for trajectory in begun],
    }
    metrics: Metrics = {}
    for prefix, values in series.items():
        metrics |= {f"{prefix}mean": _mean(values), f"{prefix}max": float(max(values))}
    return metrics


def _tools(by_trajectory: Sequence[Sequence[ToolCallRecord]]) -> Metrics:
    if not by_trajectory:
        return {}
    counts = [len(calls) for calls in by_trajectory]
    calls = [call for one in by_trajectory for call in one]
    metrics = {"tool/calls_mean": _mean(counts), "tool/calls_max": float(max(counts))}
    if not calls:
        return metrics
    seconds = sorted(call.seconds for call in calls)
    metrics |= {
        "tool/malformed_rate": _mean(call.error in MALFORMED for call in calls),
        "tool/error_rate": _mean(call.error is not None for call in calls),
        "tool/truncated_rate": _mean(call.truncated for call in calls),
        "tool/seconds_mean": _mean(seconds),
        "tool/seconds_p99": percentile(seconds, 0.99),
    }
    for kind, count in Counter(call.error for call in calls if call.error).items():
        metrics[f"tool/error/{kind}"] = count / len(calls)
    # What the policy made up must not become a metric's name.
    known = [call for call in calls if call.name and call.error not in (ErrorKind.UNKNOWN_TOOL, ErrorKind.PARSE)]
    for name, members in _by(known, lambda call: call.name).items():
        metrics[f"tool/{name}/calls"] = float(len(members))
        metrics[f"tool/{name}/error_rate"] = _mean(call.error is not None for call in members)
        for kind, count in Counter(call.error for call in members if call.error).items():
            metrics[f"tool/{name}/error/{kind}"] = count / len(members)
        seconds = sorted(call.seconds for call in members)
        metrics[f"tool/{name}/seconds_mean"] = _mean(seconds)
        metrics[f"tool/{name}/seconds_p50"] = percentile(seconds, 0.5)
        metrics[f"tool/{name}/seconds_p99"] = percentile(seconds, 0.99)
    return metrics


def _endings(trajectories: Sequence[Outline]) -> Metrics:
    if not trajectories:
        return {}
    metrics: Metrics = {
        f"status/{status}": _mean(trajectory.status is status for trajectory in trajectories) for status in Status
    }
    failed = [trajectory for trajectory in trajectories if trajectory.status is Status.FAILED]
    causes = Counter((trajectory.failure or "unknown").partition(":")[0].strip() for trajectory in failed)
    return metrics | {f"failure/{cause}": float(count) for cause, count in causes.items()}


def _measured(trajectories: Sequence[Outline]) -> Metrics:
    collected = _collect(trajectory.metrics for trajectory in trajectories)
    metrics: Metrics = {}
    if "retries" in collected:
        metrics["trajectory/retries"] = sum(collected.pop("retries"))
    for name, values in collected.items():
        metrics[name if name.startswith("drift/") else f"trajectory/{name}"] = _mean(values)
    return metrics


def _sampled_source(trajectories: Sequence[Outline]) -> Metrics:
    """mean@n, pass@k and best@n of one data source. Prompts of which a sample failed are judged by what is left."""
    n = max(len(group) for group in _by(trajectories, lambda trajectory: trajectory.group).values())
    scored = [trajectory for trajectory in trajectories if trajectory.score is not None]
    groups = list(_by(scored, lambda trajectory: trajectory.group).values())
    if not groups:
        return {}
    metrics = {
        f"mean@{n}": _mean(_mean(map(succeeds, group)) for group in groups),
        f"best@{n}": _mean(max(map(score_of, group)) for group in groups),
    }
    k = 1
    while k <= n:
        enough = [group for group in groups if len(group) >= k]
        if enough:
            metrics[f"pass@{k}"] = _mean(pass_at_k(len(group), sum(map(succeeds, group)), k) for group in enough)
        k *= 2
    return metrics


def _by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _collect(dicts: Iterable[dict[str, float]]) -> dict[str, list[float]]:
    """All values of each key, in order."""
    collected: dict[str, list[float]] = defaultdict(list)
    for one in dicts:
        for name, value in one.items():
            collected[name].append(float(value))
    return collected


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _std(values: Sequence[float]) -> float:
    """Unbiased; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
