"""Instructions for a language model, as Jinja files that users write."""

from __future__ import annotations

from collections.abc import Iterable

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import ConfigError
from agentrl.system.texts import read_text


def load_prompt(path: str | None, default: str, key: str, names: Iterable[str]) -> jinja2.Template:
    """Load the template of a file, or of `default`, to run in a sandbox; `names` are the variables that it may use.

    Raises ConfigError that names `key` for a file that is no template, or that uses other variables.
    """
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True)
    try:
        text = read_text(path) if path is not None else default
        strange = jinja2.meta.find_undeclared_variables(environment.parse(text)) - set(names)
        if strange:
            raise ConfigError(f"{key}: {path} uses {', '.join(sorted(strange))}; known are {', '.join(names)}")
        return environment.from_string(text)
    except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
        raise ConfigError(f"{key}: expected a Jinja file, {path!r}: {error}") from error
