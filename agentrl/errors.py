"""The errors that end a run with a message for its user."""


class UserError(Exception):
    """Something the user gave is wrong: a file, a row, a key, a model.

    The message says where (file, row, key), what was expected, what was found and what to do. The command-line
    entry points print it without a traceback and exit with status 2.
    """


class ConfigError(UserError):
    """A config key is unknown, has the wrong type, conflicts with another or can have no effect."""


class DataError(UserError):
    """A data file or a row of it cannot be used."""


class CheckpointError(UserError):
    """A checkpoint is missing, half-written or of another model."""


class TrainingError(UserError):
    """Training cannot go on, e.g. the loss is not finite."""


class WorkerDied(TrainingError):
    """A worker's process is gone, and with it what it had learnt since the last checkpoint."""


def first_line(error: Exception) -> str:
    """Of messages that go on for pages."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
