"""Command line: `python -m tools.retriever index | add | serve`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pydantic

from agentrl.errors import ConfigError, install_extra
from agentrl.system.command import exit_status

try:
    import tantivy  # noqa: F401
except ModuleNotFoundError:
    sys.exit(f"error: the retriever needs tantivy: {install_extra('retriever')}")

from tools.retriever.build import add, create, load
from tools.retriever.embed import MADE, EmbeddingSpec
from tools.retriever.milvus import is_collection
from tools.retriever.serve import serve
from tools.retriever.settings import Settings
from tools.retriever.words import LANGUAGES

_FOLDER_OPTIONS = {"language": "english", "threads": 1, "embedding": None, "query_prefix": "", "passage_prefix": ""}
"""Options of an index on this machine's disk, and their defaults."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.retriever", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    index = commands.add_parser("index", help="make an index of corpora (JSONL, also .gz)")
    index.add_argument("corpus", type=Path, nargs="+")
    index.add_argument("out", type=Path, help="a folder that is not there yet, or a collection's YAML file")
    index.add_argument(
        "--language", default="english", choices=("none", *LANGUAGES), help="whose word endings to cut (english)"
    )
    index.add_argument("--threads", type=int, default=1, help="of the index writer (1)")

    index.add_argument("--embedding", metavar="MODEL", help=f"make vectors too, by the model in a folder, e.g. {MADE}")
    index.add_argument("--query-prefix", default="", help="that the embedding model wants, e.g. 'query: ' for e5")
    index.add_argument("--passage-prefix", default="", help="the same for documents, e.g. 'passage: '")

    added = commands.add_parser("add", help="add corpora to an index, also while it is served")
    added.add_argument("corpus", type=Path, nargs="+")
    added.add_argument("index", type=Path, help="its folder, or a collection's YAML file")
    added.add_argument("--threads", type=int, default=1, help="of the index writer (1)")

    served = commands.add_parser("serve", help="answer POST /retrieve, as Search-R1's server does, and GET /health")
    served.add_argument("index", type=Path, help="its folder, or a collection's YAML file")
    for name, field in Settings.model_fields.items():
        if name != "index":
            words = " ".join((field.description or "").split())
            option, kind = f"--{name.replace('_', '-')}", type(field.default)
            served.add_argument(option, default=field.default, type=kind, help=f"{words} (%(default)s)")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    if arguments.command == "serve":
        _serve(arguments)
    elif is_collection(into := arguments.out if arguments.command == "index" else arguments.index):
        unused = [name for name, default in _FOLDER_OPTIONS.items() if getattr(arguments, name, default) != default]
        if unused:
            raise ConfigError(
                f"{', '.join('--' + name.replace('_', '-') for name in unused)}: of no effect on a collection in "
                f"Milvus, which is as {into} says"
            )
        loaded = load(arguments.corpus, into, new=arguments.command == "index")
        print(f"{into}: {loaded:,} documents added")
    elif arguments.command == "index":
        _positive(arguments.threads)
        if arguments.embedding:
            embedding = EmbeddingSpec(
                model=arguments.embedding,
                query_prefix=arguments.query_prefix,
                passage_prefix=arguments.passage_prefix,
            )
        elif arguments.query_prefix or arguments.passage_prefix:
            raise ConfigError("--query-prefix and --passage-prefix have no effect without --embedding")
        else:
            embedding = None
        made = create(
            arguments.corpus,
            arguments.out,
            language=arguments.language,
            threads=arguments.threads,
            embedding=embedding,
        )
        print(f"{arguments.out}: {made.documents:,} documents")
    else:
        _positive(arguments.threads)
        made = add(arguments.corpus, arguments.index, threads=arguments.threads)
        print(f"{arguments.index}: {made.documents:,} documents, {made.parts[-1].documents:,} of them new")


def _serve(arguments: argparse.Namespace) -> None:
    given = {name: getattr(arguments, name) for name in Settings.model_fields}
    try:
        settings = Settings.model_validate(given)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(": ".join([*(f"--{key}" for key in problem["loc"]), problem["msg"]])) from error
    serve(settings)


def _positive(threads: int) -> None:
    if threads < 1:
        raise ConfigError(f"--threads: expected at least 1, found {threads}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parsed = _parser().parse_args(arguments)
    return exit_status(lambda: _run(parsed))


if __name__ == "__main__":
    sys.exit(main())
