"""The command line of a benchmark that takes no options."""

from __future__ import annotations

import argparse


def no_options(doc: str | None) -> None:
    """Answer --help with the benchmark's docstring, and refuse any other word."""
    argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
