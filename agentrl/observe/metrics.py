"""Metrics of a step's trajectories, as one flat dict of numbers. Pure functions.

Each name has the one definition in these tables. Words in them:

- *scored*: has a score. A trajectory without one *fails*: the infrastructure was at fault, or its time ran out.
- *trained on*: scored, with at least one token of the policy's.
- *succeeds*: its score is at least `reward_model.success_threshold`.
- *begun*: did not end as `failed`, and has a first prompt. Only the last try of a trajectory
  counts.

Lengths are in tokens, times in seconds, rates and fractions between 0 and 1. A number that has nothing to be taken
over is left out. Names that scorers and tools give to their numbers never take the place of one of these.

Training (`step_metrics`):

| name | what it is |
|---|---|
| `reward/mean` `/std` `/min` `/max` | of those trained on, their `Outline.reward`: all but the KL (std is unbiased) |
| `reward/<source>/mean` | the same by data source |
| `score/mean` | the reward function's value, of those scored |
| `score/<extra>` | a further number that it gave, of those scored that have it |
| `success/rate`, `success/<source>` | fraction of those scored that succeeds; by data source |
| `group/zero_variance` | fraction of the prompts with two or more trained on whose rewards are all equal |
| `prompt/mean` `/max` | tokens of the first prompt, of those begun |
| `response/sampled_mean` `/sampled_max` | tokens that the policy sampled, of those begun |
| `response/observed_mean` `/observed_max` | tokens after the first prompt that it did not sample, of those begun |
| `response/mean` `/max` | both together, of those begun |
| `turns/mean` `/max` | assistant turns, of those begun |
| `tool/calls_mean` `/calls_max` | tool calls a trajectory, of those begun |
| `tool/malformed_rate` | fraction of calls that name no known tool, or have unreadable or wrong arguments |
| `tool/error_rate`, `tool/error/<kind>` | fraction of calls that ended in an error, and in one of a kind |
| `tool/truncated_rate` | fraction of calls whose answer was cut |
| `tool/seconds_mean` `/seconds_p99` | latency of a call |
| `tool/<name>/calls` `/error_rate` `/error/<kind>` | by tool, of calls that name a known one in readable form |
| `tool/<name>/seconds_mean` `/seconds_p50` `/seconds_p99` | latency of these calls |
| `tool/<name>/queue_seconds_mean` `/queue_seconds_p99` | how long its calls waited for their turn |
| `tool/<name>/faults` | calls that failed their trajectory, through no fault of the policy's |
| `tool/<name>/retries` `/fault/<kind>` | of a tool that asks a server: requests made again; failed requests by kind |
| `tool/<name>/breaker_open` `/breaker_opened` | whether its server is left alone now; how often that began |
| `status/<status>` | fraction of all that ended so; `status/length` is the truncation rate |
| `failure/<cause>` | number of those that fail by cause; they add up to all that fail |
| `drift/<kind>` | of those compared with a full re-render, the mean fraction of transcripts that drifted so |
| `trajectory/retries`, `trajectory/retries/<cause>` | fresh tries, summed over all; by the failure before each |
| `trajectory/<name>` | what else the loop or a tool measured (`generate_seconds`, ...), mean of those that have it |

Validation (`validation_metrics`), with n sampled trajectories a prompt. Numbers by data source are means over its
prompts with a score, and each prompt counts once; `pass@1` is therefore the success rate of sampled trajectories:

| name | what it is |
|---|---|
| `val/success_sampled`, `val/success_greedy` | fraction of those scored that succeeds |
| `val/score_sampled`, `val/score_greedy` | mean score of those scored |
| `val/reward_sampled`, `val/reward_greedy` | mean of what they would be trained on, as `reward/mean` |
| `val/<source>/mean@n` | mean score of the prompt's sampled trajectories |
| `val/<source>/best@n` | the best score of n; of prompts with n scores |
| `val/<source>/pass@k` | chance that one of k succeeds, k = 1, 2, 4, ... up to n; of prompts with k scores |
| `val/<source>/greedy` | score of the greedy trajectory |
| `val/<source>/success_greedy` | fraction of the greedy trajectories that succeeds |
| `val/<source>/<extra>/mean@n` `/greedy` | a further number of the scorer's, of prompts that have it |
| `val/response_mean` `/turns_mean` `/calls_mean` `/malformed_rate` | as in training, of the sampled ones, else greedy |
| `val/failed` | fraction of all validation trajectories that fail |
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from agentrl.algorithms.groups import all_equal
from agentrl.observe.error_summary import RETRIES
from agentrl.reward.prompt_scores import PromptScores
from agentrl.system.metrics import Numbers
from agentrl.tool import MALFORMED, ErrorKind
from agentrl.tool.toolset import percentile
from agentrl.trajectory import Outline, Status, ToolCallRecord, cause_of

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def step_metrics(trajectories: Sequence[Outline], *, turn_reward_coef: float, success_threshold: float) -> Numbers:
    """Metrics of one training step; names in the module's table."""
    if not trajectories:
        return {}
    begun = _begun(trajectories)
    metrics = _scores(trajectories, success_threshold) | _rewards(trajectories, turn_reward_coef)
    metrics |= _lengths(begun) | _tools([trajectory.calls for trajectory in begun])
    metrics |= {f"status/{status}": _mean(one.status is status for one in trajectories) for status in Status}
    causes = Counter([cause_of(one) for one in trajectories if one.score is None])
    metrics |= {f"failure/{cause}": float(count) for cause, count in causes.items()}
    for name, values in _collect(one.metrics for one in trajectories).items():
        if name == "retries" or name.startswith(RETRIES):
            metrics[f"trajectory/{name}"] = sum(values)
        else:
            metrics[name if name.startswith("drift/") else f"trajectory/{name}"] = _mean(values)
    return metrics


def validation_metrics(
    sampled: Sequence[Outline], greedy: Sequence[Outline], *, turn_reward_coef: float, success_threshold: float
) -> Numbers:
    """Metrics of one validation; names in the module's table. `Outline.group` separates the prompts."""
    metrics: Numbers = {}
    for name, trajectories in (("sampled", sampled), ("greedy", greedy)):
        scores = _scores_of(trajectories)
        if scores:
            metrics[f"val/success_{name}"] = _mean(score >= success_threshold for score in scores)
            metrics[f"val/score_{name}"] = _mean(scores)
        rewards = _rewards_of(trajectories, turn_reward_coef)
        if rewards:
            metrics[f"val/reward_{name}"] = _mean(rewards)
        for source, members in _by(trajectories, lambda trajectory: trajectory.data_source).items():
            numbers = _source(_prompts(members, success_threshold), sampled=name == "sampled")
            metrics |= {f"val/{source}/{key}": value for key, value in numbers.items() if value is not None}
    begun = _begun(sampled or greedy)
    if begun:
        lengths, tools = _lengths(begun), _tools([trajectory.calls for trajectory in begun])
        metrics["val/response_mean"] = lengths["response/mean"]
        metrics["val/turns_mean"] = lengths["turns/mean"]
        metrics["val/calls_mean"] = tools["tool/calls_mean"]
        if "tool/malformed_rate" in tools:
            metrics["val/malformed_rate"] = tools["tool/malformed_rate"]
    everything = [*sampled, *greedy]
    if everything:
        metrics["val/failed"] = _mean(trajectory.score is None for trajectory in everything)
    return metrics


def _begun(trajectories: Sequence[Outline]) -> list[Outline]:
    return [one for one in trajectories if one.status is not Status.FAILED and one.prompt_length]


def _scores_of(trajectories: Iterable[Outline]) -> list[float]:
    return [one.score for one in trajectories if one.score is not None]


def _rewards_of(trajectories: Iterable[Outline], coef: float) -> list[float]:
    return [reward for one in trajectories if (reward := one.reward(coef)) is not None]


def _scores(trajectories: Sequence[Outline], success_threshold: float) -> Numbers:
    scored = [trajectory for trajectory in trajectories if trajectory.score is not None]
    if not scored:
        return {}
    # The table's own names come last: a number called `mean` or a source called `rate` does not take their place.
    extras = _collect(trajectory.score_extra for trajectory in scored)
    metrics = {f"score/{name}": _mean(values) for name, values in extras.items()}
    for source, members in _by(scored, lambda trajectory: trajectory.data_source).items():
        metrics[f"success/{source}"] = _mean(score >= success_threshold for score in _scores_of(members))
    scores = _scores_of(scored)
    metrics["success/rate"] = _mean(score >= success_threshold for score in scores)
    metrics["score/mean"] = _mean(scores)
    return metrics


def _rewards(trajectories: Sequence[Outline], coef: float) -> Numbers:
    rewards = _rewards_of(trajectories, coef)
    if not rewards:
        return {}
    mean = _mean(rewards)
    squares = sum((reward - mean) ** 2 for reward in rewards)
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(squares / max(len(rewards) - 1, 1)),  # unbiased; 0 for a single reward
        "reward/min": min(rewards),
        "reward/max": max(rewards),
    }
    for source, members in _by(trajectories, lambda trajectory: trajectory.data_source).items():
        if of_source := _rewards_of(members, coef):
            metrics[f"reward/{source}/mean"] = _mean(of_source)
    groups = _by(trajectories, lambda trajectory: trajectory.group).values()
    compared = [group for members in groups if len(group := _rewards_of(members, coef)) > 1]
    if compared:
        metrics["group/zero_variance"] = _mean(map(all_equal, compared))
    return metrics


def _lengths(trajectories: Sequence[Outline]) -> Numbers:
    if not trajectories:
        return {}
    series = {
        "prompt/": [trajectory.prompt_length for trajectory in trajectories],
        "response/": [trajectory.response_length for trajectory in trajectories],
        "response/sampled_": [trajectory.num_sampled for trajectory in trajectories],
        "response/observed_": [trajectory.response_length - trajectory.num_sampled for trajectory in trajectories],
        "turns/": [trajectory.assistant_turns for trajectory in trajectories],
    }
    metrics: Numbers = {}
    for prefix, values in series.items():
        metrics |= {f"{prefix}mean": _mean(values), f"{prefix}max": float(max(values))}
    return metrics


def _tools(by_trajectory: Sequence[Sequence[ToolCallRecord]]) -> Numbers:
    if not by_trajectory:
        return {}
    counts = [len(calls) for calls in by_trajectory]
    calls = [call for one in by_trajectory for call in one]
    metrics = {"tool/calls_mean": _mean(counts), "tool/calls_max": float(max(counts))}
    if not calls:
        return metrics
    metrics["tool/malformed_rate"] = _mean(call.error in MALFORMED for call in calls)
    metrics["tool/truncated_rate"] = _mean(call.truncated for call in calls)
    # Names that the policy made up must not become metrics' names.
    known = [call for call in calls if call.name and call.error not in (ErrorKind.UNKNOWN_TOOL, ErrorKind.PARSE)]
    by_tool = {f"tool/{name}": members for name, members in _by(known, lambda call: call.name).items()}
    for prefix, members in {"tool": calls, **by_tool}.items():
        seconds = sorted(call.seconds for call in members)
        kinds = Counter(call.error for call in members if call.error)
        metrics[f"{prefix}/error_rate"] = _mean(call.error is not None for call in members)
        metrics |= {f"{prefix}/error/{kind}": count / len(members) for kind, count in kinds.items()}
        metrics |= {f"{prefix}/seconds_mean": _mean(seconds), f"{prefix}/seconds_p99": percentile(seconds, 0.99)}
        if members is not calls:
            metrics |= {f"{prefix}/calls": float(len(members)), f"{prefix}/seconds_p50": percentile(seconds, 0.5)}
    return metrics


def _prompts(trajectories: Sequence[Outline], success_threshold: float) -> PromptScores:
    """The scores of one data source's trajectories, by prompt."""
    scores = PromptScores(success_threshold)
    for group in _by(trajectories, lambda trajectory: trajectory.group).values():
        scores.add([one.score for one in group], [one.score_extra for one in group if one.score is not None])
    return scores


def _source(prompts: PromptScores, *, sampled: bool) -> dict[str, float | None]:
    mean = f"mean@{prompts.most}" if sampled else "greedy"
    values = {mean: prompts.mean.value}
    if sampled:
        values |= {f"best@{prompts.most}": prompts.best_of_all, **prompts.pass_at()}
    else:
        values["success_greedy"] = prompts.pass_at().get("pass@1")
    return values | {f"{name}/{mean}": one.value for name, one in prompts.extras.items()}


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
