"""Alarms of a run: written to `alarms.jsonl`, shown, and answered as the config says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.checks.finding import Alarm, alarms_of
from agentrl.config.sections.checks import Reaction, UpdateChecksConfig
from agentrl.observe.report import Finding
from agentrl.system.lines import AppendedLines, keep_steps

ALARMS_FILE = "alarms.jsonl"
ORDER: Sequence[Reaction] = ("warn", "stop", "checkpoint_then_stop")


class Alarms:
    """The alarms of a run. Lines of `alarms.jsonl` have step, check, severity, what, where, why, action and count."""

    def __init__(self, config: UpdateChecksConfig, folder: Path, warn: Callable[[str], None]) -> None:
        self.config, self.path, self.warn = config, folder / ALARMS_FILE, warn
        self.steps: Counter[str] = Counter()
        """Steps of this process with an alarm, by check."""
        self.last: dict[str, tuple[int, str]] = {}
        """By check, the step of its last alarm and the alarm's text."""

    def raise_for(self, step: int, findings: Sequence[Finding]) -> tuple[list[Alarm], Reaction]:
        """Write and show a step's alarms; return them, and the strongest reaction that they ask for.

        A repeated alarm is shown again when it has come twice as often.
        """
        alarms = alarms_of(findings)
        if not alarms:
            return [], "warn"
        with AppendedLines(self.path) as lines:
            lines.add([json.dumps(_line(step, alarm), ensure_ascii=False) for alarm in alarms])
        for alarm in alarms:
            self.steps[alarm.check] += self.last.get(alarm.check, (None,))[0] != step
            self.last[alarm.check] = step, alarm.what
            if self.steps[alarm.check].bit_count() == 1:
                self.warn(f"step {step}: {alarm.text()}")
        reactions = [self.config.on_fault if one.kind == "fault" else self.config.on_sign for one in alarms]
        return alarms, max(reactions, key=ORDER.index)

    def forget_after(self, step: int) -> None:
        """Remove the alarms of later steps, which are taken again."""
        keep_steps(self.path, step)

    def text(self) -> str | None:
        """Summarise the alarms of this process; None without alarms."""
        if not self.steps:
            return None
        lines = [
            f"{check}: in {count} steps, the last of step {self.last[check][0]}: {self.last[check][1]}"
            for check, count in self.steps.most_common()
        ]
        return "\n".join([f"alarms, all of them in {self.path}:", *lines])


def _line(step: int, alarm: Alarm) -> dict[str, object]:
    fields = {name: getattr(alarm, name) for name in ("what", "where", "why", "action", "count")}
    return {"step": step, "check": alarm.check, "severity": alarm.kind, **fields}
