"""Main of an SGLang server process: `python -m agentrl.engines.sglang.launch ARGUMENTS`, ARGUMENTS as SGLang's own.

With `--device cpu`, and no kernels of SGLang's own installed, it runs with the CPU stand-ins.

Started by `SGLangProcess`, it ends with its starter (`agentrl.engines.servers.starter`), and answers only to its key.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import resource
import sys
import threading
from collections.abc import Sequence

from agentrl.engines.servers.starter import KEY, STARTER, end_with


def needs_stand_ins(arguments: Sequence[str]) -> bool:
    """True when the CPU is asked for and SGLang's compiled kernels are not installed."""
    on_cpu = ("--device", "cpu") in itertools.pairwise(arguments) or "--device=cpu" in arguments
    return on_cpu and importlib.util.find_spec("sgl_kernel") is None


def with_key(arguments: Sequence[str], key: str) -> list[str]:
    """Add the key to the arguments: here, where they are parsed, and not on the command line.

    SGLang (0.5.23) asks for no key where it has several tokenizers, and does not start with one. One key in 64 begins
    with a dash, which is read as a value only after `=`.
    """
    tokenizers = [value for name, value in itertools.pairwise(arguments) if name == "--tokenizer-worker-num"]
    return [*arguments] if any(value != "1" for value in tokenizers) else [*arguments, f"--api-key={key}"]


def hide_in_logs(key: str) -> None:
    """Keep the key out of the logs: SGLang logs all its arguments."""
    make = logging.getLogRecordFactory()

    def hidden(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if key in f"{record.msg} {record.args}":
            record.msg, record.args = record.getMessage().replace(key, "[key]"), None
        return record

    logging.setLogRecordFactory(hidden)


def main() -> None:
    """Run an SGLang server with this process's arguments until it ends."""
    arguments = sys.argv[1:]
    if key := os.environ.pop(KEY, ""):  # before there are processes that would inherit it
        hide_in_logs(key)
        arguments = with_key(arguments, key)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    if STARTER in os.environ:  # before the imports, which take seconds
        threading.Thread(target=end_with, args=(int(os.environ[STARTER]),), daemon=True).start()
    if needs_stand_ins(sys.argv[1:]):
        from agentrl.engines.sglang import cpu as sglang_cpu

        sglang_cpu.install()
        sglang_cpu.allow_seeds()
        if "--enable-lora" in sys.argv:
            sglang_cpu.allow_adapters()
    main()
