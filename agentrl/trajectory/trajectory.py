"""The record of sampled text.

Invariant: a transcript's ids are the ids that the engine was given and returned, in order. Nothing here decodes or
re-encodes; nothing is ever replaced, and nothing removed but a last turn that no client got. A token's mask is 1
exactly when the policy sampled it, and its log-prob is then the engine's; everywhere else mask and log-prob are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from agentrl.system.json_value import JSON
from agentrl.trajectory.message import Message
from agentrl.trajectory.origin import Origin
from agentrl.trajectory.tool_answer import ToolAnswer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Experts = npt.NDArray[np.uint8] | npt.NDArray[np.int16]
    """Numbers of experts."""

NO_SOURCE = "unknown"
"""Data source of rows without that column."""
COUNTED = "counted_turn_reward"
"""Name, among a scorer's further numbers, of the turn rewards that its score counts already. The score pays these, and
they are not paid a second time."""

OVERLONG = "dapo_overlong_penalty"
"""Name, among a scorer's further numbers, of the length penalty added to the score. It is 0 or, for a response close to
its limit, a number below 0 (`agentrl.reward.dapo`)."""

ROLE = "role/"
"""Start of the names, among a scorer's further numbers, of the scores by role: `role/white` is the score of white."""

FROZEN = "frozen"
"""`Turn.role` of a turn that a role took which is not trained."""

POLICY = "policy"
"""The name of the policy of a run that trains one."""


class Status(StrEnum):
    """How a trajectory ended."""

    COMPLETED = "completed"
    """The policy gave its final answer (or the interaction ended the dialogue)."""
    LENGTH = "length"
    """The token budget of the response, of a turn or of the context was used up."""
    TURN_LIMIT = "turn_limit"
    """The limit of assistant or user turns was reached."""
    MALFORMED = "malformed"
    """More malformed tool calls than `max_malformed`, or no sound call where an agent required one."""
    TIMEOUT = "timeout"
    """The trajectory's deadline passed."""
    ABORTED = "aborted"
    """The engine received an abort request."""
    FAILED = "failed"
    """Infrastructure, not the policy, was at fault; it carries no reward and is not trained on."""


class Cause(StrEnum):
    """Causes of failures that are no error's class."""

    TIMEOUT = "timeout"
    """The trajectory's deadline passed."""
    SCORER = "scorer"
    """Its scorer failed, or was too slow."""
    REWARD_MODEL = "reward_model"
    """The reward model could not read it, or gave no finite number."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Version of the weights that sampled tokens [start, end) of a transcript (in a `Generation`: of its new ids)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An image as a model is fed it."""

    patches: npt.NDArray[np.float32]  # [patches, D], as the model's image processor makes them
    grid: tuple[int, int, int]
    """Frames (1), rows and columns of patches."""
    tokens: int
    """Number of the vocabulary's image tokens that represent it."""
    digest: bytes
    """A hash of its content."""
    encoded: bytes
    """The file (PNG, JPEG, ...), for an engine that makes the patches itself."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image whose tokens are [start, start + image.tokens) of a list of ids."""

    start: int
    image: Image


@dataclass(slots=True)
class Transcript:
    """Append-only token log of one context window.

    ids, mask and logprobs have one entry a token. `logprobs[i]` is log p(ids[i] | ids[:i]) under
    softmax(logits / temperature) as the engine returned it; 0.0 where mask is 0.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    prompt_length: int = 0
    images: list[PlacedImage] = field(default_factory=list)
    """In the order of their places. An image token outside them was sampled: a token like any other."""
    policy: str = POLICY
    """Name of the policy that sampled the tokens with mask 1; `versions` counts this policy's weights."""
    role: str = ""
    """Role of the episode whose context this is; empty in an episode without roles."""
    trained_to: int | None = None
    """Number of first tokens that are trained on, where the policy sampled them; 0: the transcript is left out. None:
    all. A loop may set it."""
    score: float | None = None
    """Score of this transcript alone, in place of the trajectory's; None: it has none of its own. A loop may set it
    where the advantage estimator takes such scores (`agentrl.config.declaration`)."""
    experts: Experts | None = field(default=None, compare=False)
    """[n, L, k] uint8 or int16, the experts of the first n tokens in the L layers that have some, as the engine reports
    them. The last sampled token and the observed tokens after it have no entry. Not stored with the trajectory."""
    teacher_prompt: list[int] = field(default_factory=list, compare=False)
    """Prompt that a privileged teacher reads in this one's place, or empty. Not stored with the trajectory."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def response_length(self) -> int:
        """Tokens after the first prompt, sampled and observed."""
        return len(self.ids) - self.prompt_length

    @property
    def sampled_length(self) -> int:
        return sum(self.mask)

    @property
    def trained_end(self) -> int:
        """Place before which the transcript is trained on."""
        return len(self.ids) if self.trained_to is None else min(self.trained_to, len(self.ids))

    @property
    def trained_length(self) -> int:
        """Tokens that the policy sampled and that are trained on."""
        return self.sampled_length if self.trained_to is None else sum(self.mask[: self.trained_to])

    def trained_part(self) -> Transcript | None:
        """Return the tokens that are trained on: itself, or a copy of its beginning; None: nothing of it is."""
        if not self.trained_length:
            return None
        end = self.trained_end
        if end == len(self.ids):
            return self
        spans = [replace(span, end=min(span.end, end)) for span in self.versions if span.start < end]
        return replace(
            self,
            ids=self.ids[:end],
            mask=self.mask[:end],
            logprobs=self.logprobs[:end],
            versions=spans,
            images=[one for one in self.images if one.start < end],
            experts=None if self.experts is None else self.experts[:end],
        )

    def append_prompt(self, ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> None:
        """Append the first prompt and its images. Raises ValueError when it is not the first, or `ids` is empty."""
        if self.ids:
            raise ValueError("append_prompt: the transcript already holds tokens; use append_observed")
        if not ids:
            raise ValueError("append_prompt: the prompt is empty")
        self._place(images, len(ids))
        self._append(ids, 0, [0.0] * len(ids))
        self.prompt_length = len(ids)

    def append_sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[VersionSpan] | int,
        experts: Experts | None = None,
    ) -> None:
        """Append tokens that the policy sampled. versions: one version, or spans relative to `ids` that cover it.

        experts: [n, L, k], of all n tokens before the last one of `ids`, tokens of the transcript included. Raises
        ValueError when the lengths do not agree or the spans do not cover the ids.
        """
        if len(ids) != len(logprobs):
            raise ValueError(f"append_sampled: {len(ids)} ids but {len(logprobs)} log-probs")
        if not self.ids:
            raise ValueError("append_sampled: there is no prompt yet")
        spans = [VersionSpan(versions, 0, len(ids))] if isinstance(versions, int) else list(versions)
        covered = 0
        for span in spans:
            if span.start != covered or span.end < span.start:
                raise ValueError(f"append_sampled: version spans {spans} do not cover {len(ids)} ids without gaps")
            covered = span.end
        if covered != len(ids):
            raise ValueError(f"append_sampled: version spans cover {covered} of {len(ids)} ids")
        base = len(self.ids)
        if ids and experts is not None and len(experts) != base + len(ids) - 1:
            raise ValueError(f"append_sampled: experts of {len(experts)} tokens, expected {base + len(ids) - 1}")
        self._append(ids, 1, logprobs)
        if ids:
            self.experts = experts
        self.versions.extend(VersionSpan(s.version, base + s.start, base + s.end) for s in spans if s.end > s.start)

    def append_observed(self, ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> None:
        """Append tokens that the policy did not sample: tool answers, user turns, template tokens.

        images: placed in `ids`. Raises ValueError without a prompt before.
        """
        if not self.ids:
            raise ValueError("append_observed: there is no prompt yet")
        self._place(images, len(ids))
        self._append(ids, 0, [0.0] * len(ids))

    def take_back(self, length: int) -> None:
        """Remove the tokens that were sampled after the first `length` ones: the last turn or a part of it."""
        del self.ids[length:], self.mask[length:], self.logprobs[length:]
        self.versions = [replace(one, end=min(one.end, length)) for one in self.versions if one.start < length]
        if self.experts is not None:
            self.experts = self.experts[:length]

    def _place(self, images: Sequence[PlacedImage], size: int) -> None:
        """Record the images of `size` ids that are about to be appended. Raises ValueError when one does not fit."""
        end = 0
        for one in images:
            if not end <= one.start <= one.start + one.image.tokens <= size:
                raise ValueError(f"an image of {one.image.tokens} tokens at {one.start} does not fit into {size} ids")
            end = one.start + one.image.tokens
        self.images.extend(PlacedImage(len(self.ids) + one.start, one.image) for one in images)

    def _append(self, ids: Sequence[int], mask: int, logprobs: Sequence[float]) -> None:
        self.ids.extend(ids)
        self.mask.extend([mask] * len(ids))
        self.logprobs.extend(logprobs)


@dataclass(slots=True)
class ToolCallRecord:
    """A tool call that the policy made, and its outcome."""

    name: str
    """The name the policy wrote; empty when it was unreadable."""
    arguments: dict[str, JSON] | None
    """None when they could not be parsed."""
    answer: ToolAnswer = field(default_factory=ToolAnswer)
    """Answer as the model was shown it. Its metrics, files and images are not stored with the trajectory."""

    @property
    def response(self) -> str:
        """Text that the model was shown."""
        return self.answer.text

    @property
    def error(self) -> str | None:
        """A `tool.ErrorKind` value, or None when the call succeeded."""
        return self.answer.error

    @property
    def reward(self) -> float | None:
        return self.answer.reward

    @property
    def seconds(self) -> float:
        return self.answer.seconds

    @property
    def truncated(self) -> bool:
        return self.answer.truncated

    @property
    def files(self) -> dict[str, str]:
        """Files for the reward function, path: base64; not stored with the trajectory."""
        return self.answer.files


@dataclass(slots=True)
class Turn:
    """One assistant turn with its tool calls, or one observed turn (user, tool, frozen)."""

    role: str
    text: str
    transcript: int
    """Index of the transcript that holds this turn."""
    start: int
    end: int
    """Token span [start, end) in that transcript."""
    calls: list[ToolCallRecord] = field(default_factory=list)
    finish_reason: str | None = None
    reward: float | None = None
    """Turn reward from tools or an interaction; it belongs to the policy's tokens of this turn."""
    seconds: float = 0.0
    """Time that the engine took for an assistant turn."""
    seed: int | None = None
    """Seed with which an assistant turn was sampled: with its place in the transcript it makes each random number."""
    state: str | None = None
    """State that an assistant turn was taken in, as an interaction or a loop names it; None: the text observed since
    the turn before replaces it. Not stored with the trajectory."""


@dataclass(slots=True)
class Trajectory:
    """The record of one run of an agent loop on one sample."""

    uid: str
    """Unique in the run: SPLIT/STEP/PROMPT/ROLLOUT (see `Origin.uid`)."""
    group: int
    """Index of the prompt in the batch; trajectories of one prompt share it."""
    data_source: str = NO_SOURCE
    agent_name: str = "single_turn"
    transcripts: list[Transcript] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """The conversation as messages, for scoring and for people; training uses the transcripts only."""
    status: Status = Status.COMPLETED
    failure: str | None = None
    """`cause: message` of the failure when status is FAILED, for people."""
    failure_cause: str | None = None
    """Short name under which a failure is counted, e.g. the class of an error or a `Cause`; None: the status.
    """
    score: float | None = None
    """The reward function's value; None until it has been scored."""
    score_extra: dict[str, float] = field(default_factory=dict)
    """Further numbers from the scorer (e.g. exact match, F1); averaged as metrics."""
    for_scorers: dict[str, object] = field(default_factory=dict)
    """Further values that scorers find in `extra_info`; not stored with the trajectory."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts and seconds that the loop measured: generate_seconds, tool_seconds, drift counts, retries."""
    baseline: bool = False
    """True: drawn greedily next to the others of its prompt. Its reward is the baseline for their rewards; it is
    recorded and not trained on."""
    attempt: int = 0
    """Number of this try, the first is 0; earlier tries failed, and nothing of them is in this record."""
    ground_truth: JSON = None
    """Ground truth of the row, for people."""
    origin: Origin | None = None
    """Split, step, prompt, number and row by themselves, for users' observers and loops: of every trajectory that a
    run begins, and None in one that is read from a file or restored after a kill. Not stored with the trajectory."""

    def fail(self, cause: str, message: object, status: Status = Status.FAILED) -> None:
        """End as a failure that is counted under `cause`: without a score, and never trained on."""
        self.status, self.score = status, None
        self.failure, self.failure_cause = f"{cause}: {message}", str(cause)

    @property
    def turn_rewards(self) -> list[float]:
        return [turn.reward for turn in self.turns if turn.reward is not None]

    @property
    def counted_turn_reward(self) -> float:
        """Sum of the turn rewards that the score counts already."""
        return self.score_extra.get(COUNTED, 0.0)

    @property
    def role_scores(self) -> dict[str, float]:
        """Scores of the roles that the policy's tokens are trained on in; empty without roles."""
        trained = {one.role for one in self.transcripts if one.role and one.trained_length}
        return {role: self.score_extra[ROLE + role] for role in sorted(trained) if ROLE + role in self.score_extra}

    @property
    def overlong_penalty(self) -> float:
        """Part of the reward, at most 0, that a response close to its limit is paid in addition to the score."""
        return self.score_extra.get(OVERLONG, 0.0)

    @property
    def turn_reward(self) -> float:
        """Sum of the turn rewards that the score does not count already."""
        return sum(self.turn_rewards) - self.counted_turn_reward

    def __repr__(self) -> str:
        """Name the trajectory and its end, for a notebook: its tokens would fill pages."""
        end = f"{self.status}, score {self.score}, {len(self.turns)} turns, {self.num_sampled} sampled tokens"
        return f"Trajectory {self.uid} of {self.data_source}: {end}"

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled and that are trained on."""
        return sum(transcript.trained_length for transcript in self.transcripts)

    @property
    def trained_turns(self) -> list[Turn]:
        """Turns that are trained on, without omitted transcripts and omitted ends (`Transcript.trained_to`)."""
        if all(one.trained_to is None for one in self.transcripts):
            return self.turns
        return [turn for turn in self.turns if turn.end <= self.transcripts[turn.transcript].trained_end]

    @property
    def tool_calls(self) -> list[ToolCallRecord]:
        """Tool calls of the turns that are not left out."""
        return [call for turn in self.trained_turns for call in turn.calls]

    def _score_shifts(self) -> list[float]:
        """Return `Outline.score_shifts`."""
        if all(one.score is None for one in self.transcripts):
            return []
        by_role, score = self.role_scores, self.score or 0.0
        trained = [one for one in self.transcripts if one.trained_length]
        shifts = [0.0 if one.score is None else one.score - by_role.get(one.role, score) for one in trained]
        return shifts if any(shifts) else []

    def outline(self) -> Outline:
        """Summarise the trajectory without its texts and tokens, and without parts that are left out of training."""
        kept = [one for one in self.transcripts if one.trained_to != 0]
        return Outline(
            uid=self.uid,
            group=self.group,
            data_source=self.data_source,
            status=self.status,
            failure=self.failure,
            failure_cause=self.failure_cause,
            score=self.score,
            score_extra=self.score_extra,
            turn_reward=self.turn_reward,
            metrics=self.metrics,
            calls=[ToolCallRecord(call.name, None, call.answer.outline()) for call in self.tool_calls],
            assistant_turns=sum(turn.role == "assistant" for turn in self.trained_turns),
            prompt_length=kept[0].prompt_length if kept else 0,
            response_length=sum(one.trained_end - one.prompt_length for one in kept),
            num_sampled=self.num_sampled,
            agent_name=self.agent_name,
            baseline=self.baseline,
            score_shifts=self._score_shifts(),
        )


@dataclass(frozen=True, slots=True)
class Outline:
    """Constant-size summary of a trajectory: no texts, no tokens."""

    uid: str
    group: int
    data_source: str
    status: Status
    failure: str | None
    score: float | None
    score_extra: dict[str, float]
    turn_reward: float
    """Same as `Trajectory.turn_reward`."""
    metrics: dict[str, float]
    calls: list[ToolCallRecord]
    """Without arguments and responses."""
    assistant_turns: int
    prompt_length: int
    """Tokens of the first prompt; 0 when no prompt was rendered."""
    response_length: int
    """Tokens after it, of all transcripts."""
    num_sampled: int
    model_reward: float = 0.0
    """Reward model's part of its reward."""
    agent_name: str = ""
    baseline: bool = False
    """Same as `Trajectory.baseline`."""
    failure_cause: str | None = None
    """Same as `Trajectory.failure_cause`."""
    score_shifts: list[float] = field(default_factory=list)
    """For each transcript that is trained on, in order, its own score less the trajectory's, or its role's; 0 where it
    has none of its own. Empty where all are 0."""

    @property
    def numbers(self) -> dict[str, float]:
        """The scorer's numbers: `score`, and the further ones."""
        return self.score_extra if self.score is None else {**self.score_extra, "score": self.score}

    def reward(self, turn_reward_coef: float) -> float | None:
        """Reward that it is trained on: score + turn_reward_coef * turn_reward + model_reward + overlong penalty.

        The sum of its tokens' rewards, before algorithm.use_kl_in_reward subtracts from each token. None where it is
        not trained on (see `exclusion`).
        """
        parts = self.reward_parts(turn_reward_coef)
        return sum(parts.values()) if parts else None

    def reward_parts(self, turn_reward_coef: float) -> dict[str, float]:
        """Name the addends of `reward`: score, turns, model, overlong; empty where it is not trained on."""
        if self.score is None or exclusion(self) is not None:
            return {}
        return {
            "score": self.score,
            "turns": turn_reward_coef * self.turn_reward,
            "model": self.model_reward,
            "overlong": self.score_extra.get(OVERLONG, 0.0),
        }


def cause_of(trajectory: Trajectory | Outline) -> str:
    """Cause of a trajectory without a score, or how it ended."""
    return trajectory.failure_cause or trajectory.status.value


def exclusion(trajectory: Trajectory | Outline) -> str | None:
    """Reason that a trajectory cannot be trained on: `failed`, `unscored`, `no_policy_tokens`; None when it can."""
    if trajectory.status is Status.FAILED:
        return "failed"
    if trajectory.score is None:
        return "unscored"
    return None if trajectory.num_sampled else "no_policy_tokens"
