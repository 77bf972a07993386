"""`GRPOConfig`: TRL's arguments by name, given or at TRL's defaults."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.config.overrides import Value
from agentrl.errors import ConfigError
from agentrl.system.plugin import nearest
from agentrl.trl.arguments import BY_NAME, DEFAULTS


class GRPOConfig:
    """Arguments of a training in TRL's names.

    `overrides` are keys of agentrl, which replace translated ones. An argument without a value has TRL's default.
    """

    def __init__(
        self, output_dir: str | None = None, *, overrides: Mapping[str, Value] | None = None, **arguments: object
    ) -> None:
        """Raises ConfigError for a name that no release of TRL's `GRPOConfig` has."""
        if unknown := [name for name in arguments if name not in BY_NAME]:
            lines = "; ".join(f"{name}{nearest(name, BY_NAME)}".replace("; ", " (", 1) for name in unknown)
            raise ConfigError(
                f"GRPOConfig: no argument of TRL 1.16: {lines}. A key of agentrl goes into overrides={{'KEY': VALUE}} "
                "(docs/config.md)"
            )
        self.given: dict[str, object] = dict(arguments)
        """Arguments that were given, by name."""
        if output_dir is not None:
            self.given["output_dir"] = output_dir
        self.overrides: dict[str, Value] = dict(overrides or {})

    @property
    def values(self) -> tuple[dict[str, object], dict[str, Value]]:
        """Return all that was given: arguments, and overrides."""
        return self.given, self.overrides

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or name not in DEFAULTS:
            raise AttributeError(f"GRPOConfig has no argument {name!r}")
        return self.given.get(name, DEFAULTS[name])

    def __setattr__(self, name: str, value: object) -> None:
        if name in BY_NAME:
            self.given[name] = value
        elif name in ("given", "overrides"):
            super().__setattr__(name, value)
        else:
            raise ConfigError(f"GRPOConfig: no argument of TRL 1.16: {name}{nearest(name, BY_NAME)}")

    def to_dict(self) -> dict[str, object]:
        """Return every argument with its value."""
        return {**DEFAULTS, **self.given}

    def __repr__(self) -> str:
        return f"GRPOConfig({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"
