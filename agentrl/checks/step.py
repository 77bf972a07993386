"""Checks of a step as a whole: the fates of its prompts, its numbers, and how these change from step to step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from agentrl.config.sections.checks import ChecksConfig
from agentrl.observe.error_summary import TOOL_FAILED
from agentrl.observe.report import Finding
from agentrl.system.json_value import JSON
from agentrl.trajectory import Outline, exclusion

FIRST = 5
"""Steps at a run's beginning whose median later ones are compared with."""
RECENT = 20
"""Steps before, likewise."""
RARE = 1e9
"""Steps of sound runs in which chance says once that tokens were not drawn from their distributions."""
LEAST_CALLS = 8
"""Calls of a tool in a step below which their errors say nothing."""
WHOLE_STEP = "all trajectories of the step"


def check_prompts(outlines: Sequence[Outline], each: int, drawn: int) -> Iterator[Finding]:
    """Compare a step's trajectories with the drawn prompts: `each` of every prompt, of `drawn` prompts or a multiple.

    Every trajectory has its name alone.
    """
    names = Counter(one.uid for one in outlines)
    for uid in [uid for uid, count in names.items() if count > 1][:3]:
        yield Finding("fates", f"{names[uid]} trajectories of the step have the same name", uid)
    groups = Counter(one.group for one in outlines)
    for group in sorted(groups):
        if groups[group] != each:
            what = f"a prompt has {groups[group]} trajectories, and {each} were asked for"
            yield Finding("fates", what, f"prompt {group} of the step")
    if missing := sorted(set(range(max(groups, default=-1) + 1)) - set(groups)):
        yield Finding("fates", f"{len(missing)} prompts were drawn and have no trajectory", f"prompt {missing[0]}")
    count = len(groups) + len(missing)
    if count < drawn or count % drawn:
        yield Finding("fates", f"{drawn} prompts are drawn at once, and {count} came back", WHOLE_STEP)
    for one in outlines:
        if one.score is None and exclusion(one) is None:
            yield Finding("fates", "it can be trained on without a score", one.uid)


def check_position(before: JSON, after: JSON, rows: int) -> Iterator[Finding]:
    """Compare the data's position after a step with the position before it: `rows` were drawn.

    Positions of other forms than positions by epoch (a sampler of the user's own) are not read.
    """
    match before, after:
        case {"epoch": int(epoch), "position": int(start)}, {"epoch": int(later), "position": int(end)}:
            drawn = end - start if later == epoch else end
            if later < epoch or drawn > rows or (later == epoch and drawn < rows):
                what = f"the data went on from row {start} of epoch {epoch} to {end} of {later}, and {rows} were drawn"
                yield Finding("fates", what, "the order of the data")


def check_update(
    metrics: Mapping[str, float],
    policy_tokens: int,
    without: int,
    epochs: int,
    *,
    learnt: bool,
    lr: float | None = None,
) -> Iterator[Finding]:
    """Compare the update's report with its batch.

    policy_tokens: of the batch; without: the tokens among them that need not be computed. learnt: advantages are not
    all 0. lr: the highest learning rate of the schedule.
    """
    skipped = metrics.get("actor/skipped_updates", 0.0)
    rejected = metrics.get("correction/masked_frac", 0.0)
    if learnt and not skipped and rejected < 1 and metrics.get("actor/grad_norm", 1.0) == 0:
        yield Finding("update", "advantages are not 0, and the gradient is", WHOLE_STEP)
    if lr is not None and metrics.get("actor/lr", 0.0) > lr * (1 + 1e-6):
        yield Finding(
            "update", f"the learning rate is {metrics['actor/lr']:.4g}, and the config's {lr:.4g}", WHOLE_STEP
        )
    trained, weight = metrics.get("train/policy_tokens"), metrics.get("train/loss_weight")
    if trained is None or skipped:
        return
    if weight is not None and (weight > 1 + 1e-3 or (weight < 1 - 1e-3 and not without)):
        what = f"the weights of a mini-batch's tokens in the loss add up to {weight:.4g}, and must to 1"
        yield Finding("update", what, WHOLE_STEP)
    least, most = (policy_tokens - without) * epochs, policy_tokens * epochs
    if not least <= trained <= most:
        wanted = f"{most}" if least == most else f"{least} to {most}"
        what = f"{trained:.0f} policy tokens were trained on in {epochs} epochs, and the batch's are {wanted}"
        yield Finding("update", what, WHOLE_STEP)


@dataclass(slots=True)
class History:
    """The numbers of the steps before, of this process, and the findings of a step compared with them."""

    config: ChecksConfig
    gap: float
    """See `trainer.checks.gap`."""
    evaluated: Counter[str] = field(default_factory=Counter)
    """By check, how often it compared something in the steps of this process: counted here, and by who checks more."""
    evidence: Sequence[float] = ()
    """Logarithms of `Report.evidence` combined over all steps, from an unknown starting step on (Shiryaev and Roberts).
    The means of these numbers rise by at most 1 a step in a sound run."""
    barren: int = 0
    """Steps in a row in which rewards taught nothing."""
    first: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    recent: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def check(
        self,
        metrics: Mapping[str, float],
        outlines: Collection[Outline],
        *,
        learnt: bool,
        evidence: Sequence[float] = (),
    ) -> list[Finding]:
        """Compare a step with those before, then take its numbers down. evidence: see `Report`."""
        found = [*self._standstill(metrics, learnt=learnt), *self._signs(metrics, outlines)]
        if evidence:
            found += self._sampling(evidence, metrics["checks/surprise"])
        for name in ("checks/gap_mean", "checks/repeated", "checks/garbled", "status/length"):
            if name in metrics:
                if len(self.first[name]) < FIRST:
                    self.first[name].append(metrics[name])
                self.recent[name] = [*self.recent[name], metrics[name]][-RECENT:]
        return found

    def _standstill(self, metrics: Mapping[str, float], *, learnt: bool) -> Iterator[Finding]:
        self.barren = 0 if learnt else self.barren + 1
        bound = self.config.barren_steps
        self.evaluated["standstill"] += bound > 0
        # Again whenever it has lasted twice as long: a run of days does not warn at each step.
        if not bound or self.barren < bound or (self.barren // bound).bit_count() != 1 or self.barren % bound:
            return
        causes = []
        if (rate := metrics.get("success/rate")) is not None and rate in (0.0, 1.0):
            causes.append("no trajectory succeeds" if rate == 0 else "every trajectory succeeds")
        if metrics.get("tool/calls_mean") == 0:
            causes.append("no tool is called")
        if metrics.get("status/failed", 0.0) > 0.5:
            causes.append(f"{metrics['status/failed']:.0%} of the trajectories fail")
        if not causes:
            causes.append("rewards within each prompt are equal")
        what = f"no group taught anything in {self.barren} steps in a row: {', '.join(causes)}"
        yield Finding("standstill", what, WHOLE_STEP, "sign")

    def _sampling(self, evidence: Sequence[float], surprise: float) -> Iterator[Finding]:
        before = self.evidence or [-math.inf] * len(evidence)
        self.evidence = [new + math.log1p(math.exp(old)) for new, old in zip(evidence, before, strict=True)]
        most = max(self.evidence)
        chance = most + math.log(sum(math.exp(one - most) for one in self.evidence) / len(self.evidence))
        if chance > math.log(RARE):
            what = (
                f"sampled tokens are {abs(surprise):.3g} nats {'less' if surprise < 0 else 'more'} surprising than "
                f"their distributions make them, which chance does once in 10^{chance / math.log(10):.0f} steps"
            )
            yield Finding("sampling", what, WHOLE_STEP)
            self.evidence = ()

    def _signs(self, metrics: Mapping[str, float], outlines: Collection[Outline]) -> Iterator[Finding]:
        keys = self.config
        if (entropy := metrics.get("actor/entropy")) is not None:
            self.evaluated["entropy"] += keys.low_entropy > 0
            if entropy < keys.low_entropy:
                yield Finding("entropy", f"the policy's mean entropy is {entropy:.3g} nats", WHOLE_STEP, "sign")
        gap, before = metrics.get("checks/gap_mean"), self.recent["checks/gap_mean"]
        if gap is not None and len(before) >= FIRST and gap > max(keys.gap_growth * median(before), self.gap / 10):
            what = f"log-probs of the same weights are {gap:.3g} nats apart, and were {median(before):.3g} before"
            yield Finding("gap", what, WHOLE_STEP)
        for name, bound, check, what in (
            ("checks/repeated", keys.repeated, "text", "of what was sampled is repetition"),
            ("checks/garbled", keys.repeated, "text", "of the characters that were sampled are no text"),
            ("status/length", keys.cut_answers, "length", "of the answers end at a limit of length"),
        ):
            value, start = metrics.get(name), self.first[name]
            if value is None or len(start) < FIRST:
                continue
            self.evaluated[check] += 1
            if value >= bound and median(start) < bound / 2:
                yield Finding(check, f"{value:.0%} {what}, and {median(start):.0%} at first", WHOLE_STEP, "sign")
        calls: Counter[str] = Counter()
        errors: Counter[str] = Counter()
        for call in (call for one in outlines for call in one.calls):
            calls[call.name] += 1
            errors[call.name] += call.error in TOOL_FAILED
        for name, count in calls.items():
            if count < LEAST_CALLS:
                continue
            self.evaluated["tools"] += 1
            if errors[name] >= self.config.tool_errors * count:
                what = f"{errors[name]} of {count} calls failed by its own fault or its server's"
                yield Finding("tools", what, f"tool {name}", "sign")
