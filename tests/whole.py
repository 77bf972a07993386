"""Every test and soak, part by part: `make test-all`, or `python -m tests.whole [PART ...]`.

A part that has passed on the present state of the files is not run again, so that a run that was ended goes on where
it was. Prints one table at the end. `--document` writes it into docs/performance.md, where the rows of parts that
were not run in this checkout stay as they are; each row has its commit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from sandbox.syscalls import PR_SET_CHILD_SUBREAPER, prctl

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / ".test-all"
PAGE = PROJECT / "docs" / "performance.md"
MARKS = ("<!-- make test-all -->", "<!-- end of make test-all -->")

LAST_SECONDS = 10.0
"""For processes that end a moment after the part."""
OUT = "{out}"
"""Argument that stands for a folder of the part and the state of the files: a part that was ended goes on in it."""

SOAKS = {
    "arena-credit": ["-m", "labs.arena.credit", "--seeds", "2"],
    "chat-templates": ["-m", "benchmarks.templates"],
    "fault-matrix": ["-m", "labs.fault_matrix", "--out", OUT],
    "fault-matrix-ray": ["-m", "labs.fault_matrix", "--slow", "--out", OUT],
    "compaction-pays": ["-m", "labs.learning.compaction_pays", "--seeds", "11"],
    "faulty-tools": ["-m", "benchmarks.tools.faulty_tools"],
    "feedback-pays": ["-m", "labs.learning.feedback_pays", "--seeds", "0"],
    "quickstart-seeds": ["-m", "benchmarks.training.quickstart_seeds", "--out", OUT],
    "router-simulation": ["-m", "labs.cluster.router_simulation"],
    "sandbox-soak": ["-m", "benchmarks.tools.sandbox_latency", "--runs", "0", "--soak", "5000"],
    "slow-connections": ["-m", "benchmarks.tools.slow_connections"],
    "stale-gradient": ["-m", "labs.learning.stale_gradient", "--seeds", "4"],
    "step-calibration": ["-m", "labs.cluster.step_calibration", "--steps", "1"],
    "trainer-deaths": ["-m", "labs.deaths.trainer_deaths", "--kills", "2", "--bounds", "1"],
    "worker-deaths": ["-m", "benchmarks.training.worker_deaths", "--kills", "20"],
}
"""Programs that exit with 1 when what they try does not hold, or that cannot be run any more."""


@dataclass(frozen=True, slots=True)
class Part:
    """A command that passes or fails. `pytest` is True where it writes a JUnit report of its tests."""

    name: str
    command: list[str]
    pytest: bool


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a part: `tree` is the git tree of all files it ran on, times are in seconds."""

    tree: str
    commit: str
    status: int
    passed: int
    failed: int
    skipped: int
    seconds: float
    cpu_seconds: float


def parts(python: str, servers: Mapping[str, str | None], processes: int) -> list[Part]:
    """All parts, by name: a folder of tests each, the loose files, those of server software, soaks.

    `servers`: an interpreter by the name of each server software; None: its tests are left out.
    """
    tests = PROJECT / "tests"
    run = ["-m", "pytest", "--whole", "-q", "-n", str(processes), "--dist", "loadfile"]
    folders = sorted({file.relative_to(tests).parts[0] for file in tests.glob("*/**/test_*.py")} - servers.keys())
    found = [Part(name, [python, *run, f"tests/{name}"], True) for name in folders]
    loose = sorted(str(file.relative_to(PROJECT)) for file in tests.glob("test_*.py"))
    found.append(Part("loose files", [python, *run, *loose], True))
    for name, interpreter in servers.items():
        if interpreter is not None:
            other = [] if servers.get("sglang") is None else [f"--sglang-python={servers['sglang']}"]
            found.append(Part(name, [interpreter, "-m", "pytest", "--whole", "-q", f"tests/{name}", *other], True))
    found += [Part(name, [python, *words], False) for name, words in SOAKS.items()]
    if None not in servers.values():
        given = [word for name, interpreter in servers.items() for word in (f"--{name}-python", str(interpreter))]
        found.append(Part("mixed-fleet", [python, "-m", "benchmarks.rollouts.mixed_fleet", *given], False))
    return found


def state_of_files() -> tuple[str, str]:
    """(git tree of all files that git does not ignore, as they are now; abbreviated commit, with + where they differ).

    Raises CalledProcessError outside a checkout.
    """

    def git(*words: str, index: str | None = None) -> str:
        environment = os.environ if index is None else {**os.environ, "GIT_INDEX_FILE": index}
        done = subprocess.run(["git", *words], cwd=PROJECT, env=environment, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    with tempfile.TemporaryDirectory() as folder:
        index = f"{folder}/index"
        git("add", "--all", index=index)
        tree = git("write-tree", index=index)
    changed = "" if tree == git("rev-parse", "HEAD^{tree}") else "+"
    return tree, git("rev-parse", "--short", "HEAD") + changed


def run(part: Part, tree: str, commit: str) -> Result:
    """Run a part, its output on this terminal and in `.test-all/<part>.log`, and keep its result."""
    out = RESULTS / "out" / part.name / tree
    given = [str(out) if word == OUT else word for word in part.command]
    report = RESULTS / f"{part.name}.xml"
    report.unlink(missing_ok=True)
    command = [*given, f"--junitxml={report}"] if part.pytest else given
    began, cpu = time.monotonic(), children_cpu_seconds()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with (RESULTS / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        orphans = threading.Thread(target=wait_for_orphans, args=(process.pid,), daemon=True)
        orphans.start()
        with ended(process):
            for line in process.stdout:
                log.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
            orphans.join()
    seconds = time.monotonic() - began
    wait_for_the_last()
    cpu_seconds = children_cpu_seconds() - cpu
    passed, failed, skipped = counts(report) if report.exists() else (0, 0, 0)
    result = Result(tree, commit, process.returncode, passed, failed, skipped, round(seconds, 1), round(cpu_seconds, 1))
    kept(part).write_text(json.dumps(asdict(result)))
    return result


def wait_for_orphans(last: int) -> None:
    """Wait for each child process, also for children of processes that have ended, until the child `last` ends.

    Only then their CPU time counts: Ray's workers and a fork server outlive the process that began them.
    """
    while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) is not None and found.si_pid != last:
        os.waitpid(found.si_pid, 0)


def wait_for_the_last() -> None:
    """Wait some seconds for processes that end with the part."""
    end = time.monotonic() + LAST_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for `process` at the end, or end it where this one is interrupted."""
    try:
        yield
        process.wait()
    finally:
        process.terminate()
        process.wait()


def children_cpu_seconds() -> float:
    """CPU-seconds of all child processes that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def counts(report: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a JUnit report that pytest wrote."""
    suites = ET.parse(report).getroot().iter("testsuite")
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return total - failed - skipped, failed, skipped


def kept(part: Part) -> Path:
    return RESULTS / f"{part.name}.json"


def known(part: Part) -> Result | None:
    """The part's last result, if there is one."""
    return Result(**json.loads(kept(part).read_text())) if kept(part).exists() else None


HEAD = "| part | passed | failed | skipped | minutes | CPU-minutes | commit |\n|---|---|---|---|---|---|---|"


def table(rows: Mapping[str, Sequence[str]]) -> str:
    """A Markdown table of rows by part, with their sum."""
    lines = [HEAD, *(f"| {' | '.join(row)} |" for row in rows.values())]
    sums = [sum(float(row[column] or 0) for row in rows.values()) for column in range(1, 6)]
    lines.append(f"| all | {sums[0]:.0f} | {sums[1]:.0f} | {sums[2]:.0f} | {sums[3]:.1f} | {sums[4]:.1f} | |")
    return "\n".join(lines)


def row_of(name: str, one: Result) -> list[str]:
    """The cells of a part's row."""
    ended_well = "" if one.status == 0 else f" (exit status {one.status})"
    counted = [str(number or "") for number in (one.passed, one.failed, one.skipped)]
    return [f"{name}{ended_well}", *counted, f"{one.seconds / 60:.1f}", f"{one.cpu_seconds / 60:.1f}", one.commit]


def documented(names: Collection[str]) -> dict[str, list[str]]:
    """Read the rows of these parts from docs/performance.md, as earlier sessions wrote them."""
    found = PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in found.splitlines() if line.startswith("|")]
    return {name: row for row in rows if (name := row[0].partition(" (exit")[0]) in names}


def document(text: str) -> None:
    """Put `text` between the two marks of docs/performance.md."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.whole", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="only these; without any, all")
    parser.add_argument("--list", action="store_true", help="print the parts and what is known of them")
    parser.add_argument("--again", action="store_true", help="run parts again that have passed on these files")
    parser.add_argument("--document", action="store_true", help="write the table into docs/performance.md")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that share a part's tests")
    parser.add_argument("--sglang-python", help="an interpreter with SGLang; without one its tests are left out")
    parser.add_argument("--vllm-python", help="the same with vLLM")
    asked = parser.parse_args(arguments)
    servers = {"sglang": asked.sglang_python, "vllm": asked.vllm_python}
    everything = {part.name: part for part in parts(sys.executable, servers, asked.processes)}
    if unknown := set(asked.parts) - set(everything):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are: {', '.join(everything)}")
    RESULTS.mkdir(exist_ok=True)
    tree, commit = state_of_files()
    if not asked.list:
        for name in asked.parts or everything:
            last = known(everything[name])
            if last is not None and last.status == 0 and last.tree == tree and not asked.again:
                print(f"=== {name}: passed on these files already", flush=True)
                continue
            print(f"=== {name}", flush=True)
            one = run(everything[name], tree, commit)
            print(f"=== {name}: exit status {one.status} after {timedelta(seconds=int(one.seconds))}", flush=True)
    results = {name: last for name, part in everything.items() if (last := known(part)) is not None}
    print(table({name: row_of(name, one) for name, one in results.items()}))
    if asked.document:
        rows = documented(everything) | {name: row_of(name, one) for name, one in results.items()}
        document(table({name: rows[name] for name in everything if name in rows}))
    missing = [name for name in everything if name not in results or results[name].tree != tree]
    if missing:
        print(f"not run on the present files: {', '.join(missing)}")
    failed = [name for name in asked.parts or everything if name in results and results[name].status != 0]
    if failed:
        print(f"failed: {', '.join(failed)}; their output is in {RESULTS}/PART.log")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the part ends with this process
    sys.exit(main())
