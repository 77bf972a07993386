"""The errors that end a run with a message for its user, and the error for faults that may pass."""

import sysconfig
import traceback
from pathlib import Path

_NOT_THE_USERS = (str(Path(__file__).parent), *(sysconfig.get_path(one) for one in ("stdlib", "purelib", "platlib")))
"""Folders of code that no user of a notebook wrote: this package, Python's library and installed packages."""


class UserError(Exception):
    """Something the user gave is wrong: a file, a row, a key, a model.

    The message names the place (file, row, key), the expected and the found value, and the remedy. The command-line
    entry points print it without a traceback and exit with status 2.
    """

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython and notebooks show in place of a traceback: the user's own places, and the message.

        The whole one is that of `sys.last_value`.
        """
        frames = traceback.extract_tb(self.__traceback__)
        own = [one for one in frames if not one.filename.startswith(_NOT_THE_USERS)]
        places = [f"  {one.filename}:{one.lineno} in {one.name}: {one.line}" for one in own]
        return [*places, f"{type(self).__name__}: {self}", *getattr(self, "__notes__", [])]


class ConfigError(UserError):
    """A config key is unknown, has the wrong type, conflicts with another or can have no effect."""


class DataError(UserError):
    """A data file or a row of it cannot be used."""


class CheckpointError(UserError):
    """A checkpoint is missing, half-written or of another model."""


class TrainingError(UserError):
    """Training cannot continue, e.g. the loss is not finite."""


class WorkerDied(TrainingError):
    """A worker's process has died, and everything it learnt since the last checkpoint is lost."""


class NothingLeft(UserError):
    """The run is done: no step is left to train. Commands print it and exit with status 0."""


class CodeError(UserError):
    """Code that a user gave (a loop, an interaction, a tool, a scorer, an agent) is wrong, and would fail again.

    The message's first line names the code and its error; the next lines name the places in it, the innermost last.
    """

    def __init__(self, message: str, place: str = "", *, of_contract: bool = False, after_turn: bool = False) -> None:
        """Args:
        place: the file and line to look at, `path:line`.
        of_contract: the code gave a value that its contract forbids; else it raised.
        after_turn: an environment failed at a turn of the policy, whose text may be the cause. It ends no run.
        """
        super().__init__(message)
        self.place, self.of_contract, self.after_turn = place, of_contract, after_turn

    @property
    def summary(self) -> str:
        """The message in one line."""
        return first_line(self) + (f" ({self.place})" if self.place else "")


class InfrastructureError(RuntimeError):
    """An engine, a server, a network or a process failed, not the code that asked it: the trajectory is tried again.

    User code may raise it for faults that may pass.
    """

    failure_cause: str | None = None
    """Cause under which the failure is counted (`failure/<cause>`); None: the class's name."""


def install_extra(name: str) -> str:
    """Write how an extra of pyproject.toml is installed. The package index's `agentrl` is another project's."""
    return f"pip install -e '.[{name}]' in a clone of the project, or pip install './WHEEL[{name}]' with its wheel"


def first_line(error: Exception) -> str:
    """First line of the message, for messages of several pages."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
