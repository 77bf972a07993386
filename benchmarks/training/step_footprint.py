"""Files and functions of agentrl that a step of training enters, in all threads: what one must read to follow a step.

    python -m benchmarks.training.step_footprint [--names] [--json FILE] [--against FILE] [key=value ...]

Trains two steps of `python -m agentrl.train key=value ...`, by default the quickstart, and records the second from the
end of the first: rollouts with their engine, checks, records, update, logging. A function counts once. Lambdas and
comprehensions belong to the function around them. Other processes are not traced. Prints a table by room; --names adds
every function by file, in the order of first entry, and --against the functions that came or went since an earlier
--json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

STEP = 2
"""The first step imports and makes what later ones have."""


class Trace:
    """Functions of the files below `folder` that were entered while `on`."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        self._begin = f"{folder}/"
        self._entered: dict[int, CodeType] = {}  # by `id`: equal functions of two files are equal

    def see(self, frame: FrameType, event: str, argument: object) -> None:
        """Take note of a call; for `sys.setprofile`."""
        if self.on and event == "call":
            self._entered.setdefault(id(frame.f_code), frame.f_code)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this thread, and in those that `traced_threads` had begin."""
        before = sys.getprofile()
        self.on = True
        sys.setprofile(self.see)
        try:
            yield
        finally:
            sys.setprofile(before)
            self.on = False

    def files(self) -> dict[str, list[str]]:
        """Qualified names of the functions by file, without `<lambda>`, `<listcomp>` and the like."""
        found: dict[str, list[str]] = {}
        for code in self._entered.values():
            if code.co_filename.startswith(self._begin) and not code.co_name.startswith("<"):
                found.setdefault(code.co_filename.removeprefix(self._begin), []).append(code.co_qualname)
        return found


@contextmanager
def traced_threads(folder: Path) -> Iterator[Trace]:
    """Have threads that begin meanwhile note what they enter of the files below `folder`, whenever it is counted."""
    trace = Trace(folder)
    before = threading.getprofile()
    threading.setprofile(trace.see)
    try:
        yield trace
    finally:
        threading.setprofile(before)


def record(keys: Sequence[str]) -> dict[str, list[str]]:
    """Train until the step has been done. Returns the functions by file. Raises UserError as a training does."""
    import agentrl
    from agentrl.train import training

    with tempfile.TemporaryDirectory() as folder, traced_threads(Path(str(agentrl.__file__)).parent) as trace:
        places = [f"quickstart.dir={folder}/quickstart", f"trainer.default_local_dir={folder}/run"]
        with training([*places, f"trainer.total_training_steps={STEP + 1}", *keys]) as run:
            steps = iter(run)
            for _ in range(STEP - 1):
                next(steps)
            with trace.counting():
                next(steps)
        return trace.files()


def table(files: Mapping[str, Sequence[str]]) -> str:
    """A Markdown table of files and functions by room."""
    rooms: dict[str, list[int]] = {}
    for file, names in files.items():
        rooms.setdefault(file.split("/")[0], []).append(len(names))
    lines = ["| room | files | functions |", "|---|---|---|"]
    lines += [f"| {room} | {len(sizes)} | {sum(sizes)} |" for room, sizes in sorted(rooms.items())]
    return "\n".join([*lines, f"| all | {len(files)} | {sum(map(len, files.values()))} |"])


def compare(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> str:
    """Lines of the functions that came (+) and went (-), each with its file."""
    old, new = (Counter((file, name) for file, names in one.items() for name in names) for one in (before, now))
    lines = [f"- {file} {name}" for file, name in sorted((old - new).elements())]
    return "\n".join(lines + [f"+ {file} {name}" for file, name in sorted((new - old).elements())])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of the training")
    parser.add_argument("--names", action="store_true", help="print every function")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the functions by file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier --json")
    asked = parser.parse_args(arguments)
    before = json.loads(asked.against.read_text()) if asked.against else None
    files = record(asked.keys)
    if asked.json:
        asked.json.write_text(json.dumps(files, indent=0) + "\n")
    if asked.names:
        print("\n".join("\n    ".join([file, *names]) for file, names in files.items()))
    if before is not None:
        print(compare(before, files))
    print(table(files))


if __name__ == "__main__":
    main()
