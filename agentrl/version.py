"""The version, and its one source: the package's metadata, `--version` and every record of a run take it from here."""

__version__ = "0.1.0"
