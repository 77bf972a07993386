"""Scorers and interactions, tried once on a made-up answer before the run's first step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from agentrl.errors import CodeError
from agentrl.interaction import Interaction, ask
from agentrl.reward import GroupRewardManager, RewardManager, score_all
from agentrl.rollouts.context import RunContext
from agentrl.system.deadline import within
from agentrl.trajectory import Message, Status, Trajectory, Transcript, Turn
from agentrl.trajectory.sample import Sample

ANSWER = "I do not know."
CERTAIN = (TypeError, NameError, ImportError, SyntaxError, NotImplementedError)
"""Errors that another answer of the policy's would hardly avoid."""
SECONDS = 10.0
"""A trial that takes longer is given up without a message: a slow start is no error."""


async def try_once(
    context: RunContext, on_code_error: Literal["error", "count"], warn: Callable[[str], None], n: int
) -> None:
    """Have each scorer judge, and each interaction answer, a made-up answer to the first row that names it.

    Raises CodeError for an answer of a wrong type, a wrong signature and other errors that would surely come again. The
    user is warned of other errors of the code, as the row or the made-up answer may be to blame. Faults of the
    infrastructure are left for later. n: trajectories of a prompt, for managers that score by group.
    """
    trials: list[tuple[str, Callable[[], object]]] = []
    for name, sample in context.first.by_interaction.items():
        trials.append((f"interaction {name}", partial(_converse, context.interactions[name], sample)))
    if context.reward is not None:
        for source, sample in context.first.by_source.items():
            if context.reward.is_tried(source):
                trials.append((f"the scorer of {source}", partial(_score, context.reward, sample, n)))
    for what, trial in trials:
        try:
            async with within(SECONDS):
                await trial()  # type: ignore[misc]
        except CodeError as error:
            certain = error.of_contract or isinstance(error.__cause__, CERTAIN)
            if certain and on_code_error == "error":
                raise CodeError(
                    f"{error}\n  {what} was tried on the made-up answer {ANSWER!r} before the first step. Mend it, or "
                    "count such trajectories with actor_rollout_ref.rollout.agent.on_code_error=count",
                    error.place,
                ) from error
            warn(f"{error}\n  {what} was tried on the made-up answer {ANSWER!r}; the run goes on")
        except Exception:
            continue


async def _converse(interaction: Interaction, sample: Sample) -> None:
    """Have one dialogue of one turn."""
    name, kwargs = "trial", dict(sample.interaction_kwargs)
    kwargs.pop("name", None)
    await ask(interaction, interaction.start_interaction, name, **kwargs)
    try:
        await ask(interaction, interaction.open_dialogue, name, list(sample.prompt))
        await ask(interaction, interaction.generate_response, name, answered(sample))
        await ask(interaction, interaction.calculate_score, name)
    finally:
        async with within(SECONDS):
            await ask(interaction, interaction.finalize_interaction, name)


async def _score(reward: RewardManager, sample: Sample, n: int) -> None:
    count = n if isinstance(reward, GroupRewardManager) else 1
    await score_all(reward, [made_up(sample, number) for number in range(count)], sample)


def answered(sample: Sample) -> list[Message]:
    """Return the row's prompt with the made-up answer."""
    return [*sample.prompt, {"role": "assistant", "content": ANSWER}]


def made_up(sample: Sample, number: int) -> Trajectory:
    """Make the record of a trajectory that ended with the made-up answer."""
    transcript = Transcript()
    transcript.append_prompt([0])
    transcript.append_sampled([0], [0.0], 0)
    trajectory = Trajectory(f"trial/{number}", 0, sample.data_source, sample.agent_name)
    trajectory.transcripts.append(transcript)
    trajectory.messages = answered(sample)
    trajectory.turns.append(Turn("assistant", ANSWER, 0, 1, 2, finish_reason="stop"))
    trajectory.status = Status.COMPLETED
    return trajectory
