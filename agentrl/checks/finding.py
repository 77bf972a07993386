"""Alarms of findings: the fault, its place, why it matters and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.observe.report import Finding, Kind

SHOWN = 3
"""Findings of one check that an alarm names."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """All findings of one check and kind in one step; there is at least one."""

    findings: Sequence[Finding]

    @property
    def check(self) -> str:
        return self.findings[0].check

    @property
    def kind(self) -> Kind:
        return self.findings[0].kind

    @property
    def count(self) -> int:
        return len(self.findings)

    @property
    def why(self) -> str:
        return MEANINGS.get(self.check, OF_USERS)[0]

    @property
    def action(self) -> str:
        return MEANINGS.get(self.check, OF_USERS)[1]

    @property
    def what(self) -> str:
        """Words of the findings. Where they differ, each has its own places: no finding speaks for another one."""
        places = self._places()
        if len(places) == 1:
            return next(iter(places))
        said = [f"{what}, in {_listed(where, 1)}" for what, where in list(places.items())[:SHOWN]]
        others = sum(map(len, list(places.values())[SHOWN:]))
        return "; ".join(said) + (f"; and {others} more that differ" if others else "")

    @property
    def where(self) -> list[str]:
        """Places that the alarm names."""
        places = list(self._places().values())
        named = places[0][:SHOWN] if len(places) == 1 else [one[0] for one in places[:SHOWN]]
        return list(dict.fromkeys(named))

    def text(self) -> str:
        """Write the alarm for people."""
        places = list(self._places().values())
        at = f", in {_listed(places[0], SHOWN)}" if len(places) == 1 else ""
        return f"{self.check}: {self.what}{at}. {self.why}. {self.action}"

    def _places(self) -> dict[str, list[str]]:
        """Return the places by the words that were found of them."""
        found: dict[str, list[str]] = {}
        for one in self.findings:
            found.setdefault(one.what, []).append(one.where)
        return found


def _listed(where: Sequence[str], most: int) -> str:
    shown = list(dict.fromkeys(where))[:most]
    more = len(where) - len(shown)
    return ", ".join(shown) + (f" (and {more} more)" if more else "")


MEANINGS: dict[str, tuple[str, str]] = {
    "record": (
        "The record of a trajectory is unsound, and so is what is learnt from it",
        "Look at the trajectory; if the loop is your own, let it speak to the engine through its Episode alone",
    ),
    "mask": (
        "Tokens that the policy did not sample would be learnt, or sampled ones would not",
        "Look at the trajectory's tokens by their mask, and whether the engine, the chat format or a loop changed them",
    ),
    "fates": (
        "A prompt that is lost, or trained on twice, biases what is learnt",
        "Look at the source of trajectories, and compare the step's trajectories with what was drawn",
    ),
    "rows": (
        "Rows that come twice in an epoch are learnt twice, and others never",
        "Look at the sampler, the data set's rows by their index, and what passes them on",
    ),
    "requests": (
        "The tokens of a trajectory were sampled for another one",
        "Look at how the engine, or its servers, tells its requests apart",
    ),
    "prompt": (
        "The policy answers another text than its row's",
        "Look at the chat template, and at what passes messages, tools and tokens on between row, loop and engine",
    ),
    "answers": (
        "The policy reads, or is paid for, another answer than its tool's",
        "Look at what lies between the tool's execute and the trajectory: truncation, the loop, observers",
    ),
    "scores": (
        "The policy is paid for another answer than its own, or by another row's ground truth",
        "Look at the reward manager, and at what changes trajectory.score after it",
    ),
    "coverage": (
        "What is trained on is not what was sampled and scored",
        "Look at what lies between the rollout and the batch: filters, the reward model, a source of your own",
    ),
    "columns": (
        "A column that is shifted or not finite spoils the gradient",
        "Look at what computes the column that is named",
    ),
    "versions": (
        "Corrections for stale weights are wrong where tokens name other weights than those that sampled them",
        "Look at how the engine is sent weights, and what it says of them",
    ),
    "rewards": (
        "The policy is trained on another reward than the one that is shown",
        "Look at the reward's parts in trajectories/, turn rewards and counted_turn_reward first",
    ),
    "advantages": (
        "Advantages are not those that the estimator makes of these rewards",
        "Look at what changes advantages after the estimator; one of your own must be a function of its columns",
    ),
    "correction": (
        "Importance weights are not those of the log-probs beside them",
        "Look at algorithm.rollout_correction, and at what changes the batch after it",
    ),
    "gap": (
        "The engine samples from another policy than the one that is trained",
        "From a trajectory's first sampled token on: look whether the engine has the policy's weights, adapters and "
        "temperature. From a later turn on: look at its cache. Everywhere a little: look at its precision",
    ),
    "ess": (
        "Most tokens were sampled by weights from which the policy has come too far to learn from them",
        "Lower async_training.depth, async_training.max_staleness or the learning rate; of the choices of "
        "algorithm.rollout_correction.rollout_is, tempered leaves the most",
    ),
    "sampling": (
        "Tokens are not drawn from the distribution whose log-probs are recorded, so the gradient is of another policy",
        "Look at the engine's temperature, top_p, top_k, penalties and seeds",
    ),
    "reference": (
        "The KL holds the policy to another model than the one that was named",
        "Look at actor_rollout_ref.ref.path, and at what writes to the reference's weights",
    ),
    "recomputed": (
        "A model's scores or gradients are not those of transformers' own model with the same weights",
        "Where the policy, the critic, the reference or a teacher is named, look at what computes and passes on its "
        "column; where a tensor is named, look at what lies between it and the loss: tied weights, adapters, patches",
    ),
    "weights": (
        "The engine samples by other weights than the policy's",
        "Look at the tensor that is named on its way to the engine: adapters, tied weights, names in checkpoints",
    ),
    "update": (
        "What the batch says is to be learnt was not learnt, or not once",
        "Look at mini-batches, the loss and the optimizer: the gradient norm and actor/skipped_updates",
    ),
    "standstill": (
        "The run spends its steps and learns nothing",
        "Look at some trajectories: is the task too hard or too easy, does the scorer read the answer where the "
        "policy writes it, are tools offered and calls understood? Then take other prompts, raise "
        "actor_rollout_ref.rollout.n or the temperature",
    ),
    "entropy": (
        "A policy without entropy tries nothing new, and its groups teach nothing",
        "Raise actor_rollout_ref.actor.entropy_coeff or the KL, lower the learning rate, or go back to a checkpoint",
    ),
    "text": (
        "Answers that repeat themselves or are no text are what a policy in collapse writes",
        "Lower the learning rate, raise the KL, or go back to a checkpoint; where the reward rose, mend the scorer",
    ),
    "tools": (
        "The policy learns that a tool is of no use, for a fault that is not its own",
        "Look at the tool's server and its deadlines, or set on_error: fail so that such trajectories are tried again",
    ),
    "length": (
        "Answers that are cut are scored for what they could not say",
        "Raise data.max_response_length, or have the length cost something (reward_model.reward_manager=dapo)",
    ),
}
"""By check: why a finding matters, and how to fix it."""
OF_USERS = (
    "A watch of trainer.checks.watches found it",
    "Look at the watch, and at the place that it names",
)
"""The same for checks of a user's own."""


def alarms_of(findings: Iterable[Finding]) -> list[Alarm]:
    """Make one alarm of all findings of a check and kind."""
    groups: dict[tuple[str, Kind], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.check, one.kind), []).append(one)
    return [Alarm(members) for members in groups.values()]
