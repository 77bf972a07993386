"""Notes on a run's choice among the transcripts of agents' sessions, at its start and after its first step."""

from __future__ import annotations

from collections import Counter

from agentrl.config.sections.rollout import OpenAIProxyConfig
from agentrl.observe.display import Display
from agentrl.openai_api.selection import train_of
from agentrl.trainer.observer import Step, StepObserver

KEY = "actor_rollout_ref.rollout.agent.openai_proxy.train"
SIDE_CALLS = "openai_side_calls/"


class Sessions(StepObserver):
    """Logs the choice of transcripts, and how many of each kind the first step had."""

    def __init__(self, config: OpenAIProxyConfig, display: Display) -> None:
        self.display, self.is_told = display, False
        chosen = {"all": "all transcripts of a session are trained on, side calls, too"}
        chosen["main"] = "the main conversation of a session is trained on, with its sub-agents"
        train = self.train = train_of(config.train, config.harness)
        if isinstance(train, str):
            text = chosen.get(train, "the transcripts of a session that this function returns are trained on")
        else:
            text = "the transcripts of calls that name one of these models are trained on"
        self.shown = train if isinstance(train, str) else f"[{','.join(train)}]"
        display.note(f"{KEY}={self.shown}: {text}")

    def on_rollout(self, step: Step) -> None:
        if self.is_told:
            return
        found: Counter[str] = Counter()
        for one in step.sampled:
            found.update({name: int(value) for name, value in one.metrics.items() if _is_ours(name)})
        total, subs, sides = (found[f"openai_{name}"] for name in ("transcripts", "sub_agents", "side_calls"))
        if not total:
            return
        self.is_told = True
        causes = {name.removeprefix(SIDE_CALLS): count for name, count in found.items() if name.startswith(SIDE_CALLS)}
        said = f"{total} transcripts of sessions: {total - subs - sides} main, {subs} of sub-agents, {sides} side calls"
        if causes:
            said += f" (opened by {', '.join(f'{cause}: {count}' for cause, count in sorted(causes.items()))})"
        left = found["left_out/side_calls"]
        rest = f"; {left} are left out" if self.train != "all" else ""
        self.display.note(f"step {step.number} had {said}{rest} ({KEY}={self.shown})")


def _is_ours(name: str) -> bool:
    return name.startswith("openai_") or name == "left_out/side_calls"
