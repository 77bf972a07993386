"""`python -m agentrl.serve --learn [key=value ...]`: serve a policy to live clients, and train it by their feedback.

Clients of OpenAI's and Anthropic's APIs ask it at http://HOST:PORT/v1 with the client's key, and the operator posts
feedback to /v1/feedback with another. docs/live.md has the keys that the run begins with; `key=value` changes any.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.system.command import exit_status
from agentrl.system.versions import ShowVersion

BOUND, DEPTH = "async_training.max_staleness", "async_training.depth"
DEFAULTS = {
    "data.custom_cls.path": "agentrl.serve.rows:LiveRows",
    "data.train_files": "live",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "live",
    "actor_rollout_ref.rollout.n": "1",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "1000",
    "algorithm.adv_estimator": "reinforce_plus_plus",
    BOUND: "4",
    "trainer.total_training_steps": "1000000",
    "trainer.save_freq": "1",
}
"""Keys that the run begins with, where the command line says nothing else."""
NO_LEARNING = (
    "agentrl serve trains the policy that it serves: add --learn. To serve a policy that stays as it is, use SGLang or "
    "vLLM on the exported policy/ (docs/serve.md)"
)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line: (flags, overrides of the config); exits with a message for a wrong flag."""
    parser = argparse.ArgumentParser(
        prog="python -m agentrl.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version of agentrl")
    parser.add_argument("--learn", action="store_true", help="train the policy by the feedback on its sessions")
    parser.add_argument(
        "--fates", metavar="FOLDER", help="print the sessions of a run's folder, a line of JSON each, and serve nothing"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at; 0: any that is free; default: 8000")
    parser.add_argument("--client-key-env", metavar="NAME", help="environment variable with the clients' key")
    parser.add_argument("--operator-key-env", metavar="NAME", help="environment variable with the operator's key")
    parser.add_argument(
        "--idle-seconds",
        type=float,
        default=600.0,
        help="seconds of silence after which a session with feedback is trained on; default: 600",
    )
    parser.add_argument(
        "--feedback-window",
        type=float,
        default=7 * 86400.0,
        help="seconds after its last answer in which a session waits for feedback; default: 604800, a week",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the run's config")
    found, further = parser.parse_known_intermixed_args(argv)
    return found, [*found.overrides, *further]


def with_defaults(overrides: Sequence[str]) -> list[str]:
    """Put the keys of live sessions before overrides that do not have them."""
    given = dict(one.lstrip("+~").partition("=")[::2] for one in overrides)
    # What begins ahead are places that wait for sessions: as many as the bound allows cost nothing.
    defaults = DEFAULTS | {DEPTH: next((given[one] for one in given if BOUND.endswith(one)), DEFAULTS[BOUND])}
    if defaults[DEPTH] == "0":  # which the bound is refused for
        del defaults[DEPTH]
    return [*(f"{key}={value}" for key, value in defaults.items() if not _is_given(key, given)), *overrides]


def _is_given(key: str, given: Iterable[str]) -> bool:
    """Say whether a key, or its end, which the command line takes, too, is given."""
    return any(key == one or key.endswith(f".{one}") for one in given)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve and train; return the process's exit status (see `agentrl.system.command`)."""
    arguments, overrides = parse(argv)

    def work() -> None:
        # Imported late, so that --help waits for nothing.
        from agentrl.serve.fates import fates
        from agentrl.serve.learn import learn
        from agentrl.serve.options import LiveOptions, read_keys

        if arguments.fates is not None:
            for told in fates(Path(arguments.fates)):
                print(json.dumps(told))
            return
        if not arguments.learn:
            raise ConfigError(NO_LEARNING)
        for name in ("idle_seconds", "feedback_window"):
            if not 0 <= getattr(arguments, name) < 1e12:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}={getattr(arguments, name)}: expected seconds, 0 or more")
        if not 0 <= arguments.port < 1 << 16:
            raise ConfigError(f"--port={arguments.port}: expected 0 to 65535")
        keys = read_keys(arguments.client_key_env, arguments.operator_key_env, arguments.host)
        options = LiveOptions(
            *(arguments.host, arguments.port, keys.client, keys.operator),
            *(arguments.idle_seconds, arguments.feedback_window),
        )
        for flag, key in keys.made_up.items():
            print(f"{flag} names no variable; for this process alone the key is {key}", flush=True)
        learn(with_defaults(overrides), options)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
