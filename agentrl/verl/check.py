"""`python -m agentrl.verl check SCRIPT_OR_COMMAND`: the parts of a command that are the same here, or not.

Nothing is run: of a script, variables are substituted; of the config, keys and types are judged, and no code of the
user's that it names is imported.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agentrl.config import Config
from agentrl.config.checks import findings, idle_keys
from agentrl.config.command_line import parse_command_line
from agentrl.config.keys import differing
from agentrl.config.load import compose_keys, resolve, told_as_config_errors, validate
from agentrl.config.overrides import as_override
from agentrl.config.rules import shown
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON
from agentrl.verl.keys.translation import Translation, aloud, contradictions, without_effect
from agentrl.verl.launch import CONFIGS, arguments
from agentrl.verl.shell import UNKNOWN, Command, commands

_OVERRIDE = re.compile(r"[+~]*([\w@/.]+)=", re.DOTALL)
TWO_WORDS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
"""Flags whose value is the next word."""
_MODULE = re.compile(r"(verl|recipe|agentrl)(\.\w+)+")


class Launch(NamedTuple):
    """A training command of a script."""

    module: str
    words: list[str]
    """Its arguments, all of them known."""
    unknown: list[str]
    """Arguments whose value is not known before the script runs, as they are written."""
    line: int


@dataclass(frozen=True, slots=True)
class Report:
    """Findings about a launch command."""

    launch: Launch
    config_name: str
    typed: list[str]
    """The keys of its arguments."""
    translation: Translation
    values: Mapping[str, JSON]
    """verl's keys and values, from its arguments."""
    faults: list[str]
    """Messages about further wrong keys and values."""
    missing: list[str]
    """Packages that are not installed on this machine, each with the command that installs it."""
    idle: Mapping[str, str]
    """A message for each key that has no effect in this command."""
    equivalent: list[str]
    """Arguments of `python -m agentrl.train` that come to the same; empty where something is refused."""

    @property
    def is_accepted(self) -> bool:
        """True when the command runs here."""
        return not self.faults


def launches(text: str) -> list[Launch]:
    """Find the training commands of a script or of one command line."""
    return [launch for command in commands(text) if (launch := launch_of(command)) is not None]


def launch_of(command: Command) -> Launch | None:
    """Read a command as a training's; None for any other."""
    words = command.words
    for at, (flag, module) in enumerate(itertools.pairwise(words)):
        if flag == "-m" and _MODULE.fullmatch(module):
            known: list[str] = []
            unknown: list[str] = []
            for word, written in zip(words[at + 2 :], command.written[at + 2 :], strict=True):
                if UNKNOWN in word:
                    if known and known[-1] in TWO_WORDS:
                        unknown.append(known.pop())
                    unknown.append(written if "=" in written or word == UNKNOWN else word.replace(UNKNOWN, "..."))
                else:
                    known.append(word)
            return Launch(module, known, unknown, command.line)
    return None


def judge(launch: Launch) -> Report:
    """Judge one training command. Raises ConfigError for a command that cannot be put together."""
    if launch.module not in CONFIGS:
        raise ConfigError(
            f"{launch.module} is a recipe's own trainer, which is not part of agentrl; there are "
            + ", ".join(sorted(CONFIGS))
        )
    command = parse_command_line(arguments(launch.words, CONFIGS[launch.module]), "ppo_trainer", Config)
    with told_as_config_errors():
        keys = compose_keys(command, Config)
    read = next((reading for reading in keys.readings if isinstance(reading, Translation) and reading.is_whole), None)
    if read is None:
        raise ConfigError(f"--config-name {command.config_name} builds on none of verl's trainers: it is our own YAML")
    given = {match[1]: text for text in launch.words if (match := _OVERRIDE.match(text)) is not None}
    faults = list(keys.faults)
    missing: list[str] = []
    idle: Mapping[str, str] = {}
    equivalent: list[str] = []
    try:
        with told_as_config_errors():
            config = validate(resolve(keys, Config), Config)
        found = list(findings(config, (), look_up=False))
        missing = [finding.text for finding in found if finding.kind == "not installed"]
        faults += [finding.text for finding in found if finding.kind == "fault"]
        idle = without_effect(read, config, given)
        equivalent = words_of(config)
    except ConfigError as error:
        faults += str(error).splitlines()
    values = {key: text.partition("=")[2] for key, text in given.items()}
    return Report(
        launch,
        command.config_name,
        [*given],
        read,
        values,
        list(dict.fromkeys(faults)),
        missing,
        idle,
        equivalent if not faults else [],
    )


def words_of(config: Config) -> list[str]:
    """Write the arguments of agentrl.train that give this config: the keys that are not at their defaults, and have
    an effect."""
    found = differing(config)
    idle = idle_keys(config, found)
    return [as_override(key, value) for key, (value, _) in found.items() if key not in idle]


def page(report: Report) -> str:
    """Write a report as text."""
    found, typed = report.translation, set(report.typed) - report.idle.keys()
    lines = [f"line {report.launch.line}: {report.launch.module}, as {report.config_name}"]

    def part(title: str, entries: Sequence[str]) -> None:
        if entries:
            lines.append(f"  {title} ({len(entries)})")
            lines.extend(f"    {entry}" for entry in entries)

    part("the same", [key for key in found.same if key in typed])
    part(
        "translated",
        [
            f"{key}={report.values[key]}: {', '.join(f'{name}={shown(value)}' for name, value in ours.items())}"
            for key, ours in found.translated.items()
            if key in typed
        ],
    )
    part("without effect in this command", list(report.idle.values()))
    part(
        "ignored, without an effect of their own",
        [f"{key}: {why}" for key, why in found.ignored.items() if key in typed],
    )
    twice = [text for text in contradictions(found, {*found.given, *report.typed}) if text not in report.faults]
    part("told at the start", [*twice, *aloud(found.loud), *found.of_family(report.typed)])
    part("refused", [line for fault in report.faults for line in fault.splitlines()])
    part("not installed here", report.missing)
    part("not known before the script runs", report.launch.unknown)
    if report.equivalent:
        lines.append("  in our own words")
        words = ["python -m agentrl.train", *map(shlex.quote, report.equivalent), *report.launch.unknown]
        lines.append("    " + " \\\n      ".join(words))
    return "\n".join(lines)


def script_at(path: str) -> str | None:
    """Read a script; None where a text names no file. Raises ConfigError for a file that is no text."""
    try:
        return Path(path).read_text(encoding="utf-8") if Path(path).is_file() else None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected a script in UTF-8: {error}") from None
    except OSError:  # a whole command is too long for a name
        return None


def check(arguments: Sequence[str]) -> int:
    """Print the fate of the commands of a script, or of one command; return 0 if all of them run here, else 1.

    Raises ConfigError for a script without a training command.
    """
    [first, *others] = arguments
    script = None if others else script_at(first)
    text = script if script is not None else first if not others else shlex.join(arguments)
    found = launches(text)
    if not found and not others and not text.strip().count(" ") and script is None:
        raise ConfigError(f"{first[:300]}: there is no such file (working directory {Path.cwd()})")
    if not found:
        raise ConfigError(f"{first[:80]}: no command with -m and one of {', '.join(sorted(CONFIGS))} is in it")
    accepted = True
    for launch in found:
        try:
            report = judge(launch)
        except ConfigError as error:
            print(f"line {launch.line}: {launch.module}\n  refused\n    {error}")
            accepted = False
        else:
            print(page(report))
            accepted = accepted and report.is_accepted
    return 0 if accepted else 1
