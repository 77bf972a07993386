"""Everything that waits for a GPU, in one command without a network: each part a process of its own, one report.

    python -m benchmarks.gpu [--device cuda] [--parts environment quickstart ...] [--out runs/gpu-report] [--budget 570]

The most valuable parts come first. report.md and report.json are written as rows come, log.txt has all output. The same
command goes on with what is not done yet. With --device cpu all shapes are tiny: that tries the parts and measures
nothing. --against compares each number with that of an earlier report. docs/gpu.md says how to read the report, and
what a bare machine needs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType

from benchmarks.gpu.orchestrate import Part, Report, run_parts
from benchmarks.gpu.report import markdown

PROJECT = Path(__file__).resolve().parents[2]
PARTS = (
    # name, module, seconds at most, what it is, options
    ("environment", "environment", 90, "GPU, driver, versions, and the rates that can be had", ()),
    ("tests", "marked_tests", 240, "the tests that need a GPU", ()),
    ("engine", "engine", 300, "the embedded engine's tokens a second, with graphs and without", ()),
    ("profile", "profile", 400, "an update's time by kernel, with the head at once and in parts, 1.5 B and 0.5 B", ()),
    ("auto", "chosen", 240, "what the plan chooses, its forecast against an update, and a retry", ()),
    ("update-1.5B", "update", 240, "model FLOP utilisation at 1.5 B", ("--shape", "1.5B")),
    ("update-0.5B", "update", 200, "model FLOP utilisation at 0.5 B", ("--shape", "0.5B")),
    ("gsm8k", "curve", 3600, "SmolLM2 learns GSM8K, call by call (needs --model and --gsm8k)", ()),
    ("quickstart", "quickstart", 300, "the quickstart on the device, against the figures for a CPU", ()),
    ("memory", "footprint", 150, "memory seen against the arithmetic of docs/scale.md", ()),
    ("pretrained", "pretrained", 300, "a pretrained model, warmed up and trained with tools (needs --model)", ()),
    ("log-probs", "logprobs", 120, "log-probs of packed sequences against padded ones", ()),
    ("shared", "shared", 240, "common beginnings computed once, at 0.5 B", ("--shape", "0.5B")),
    ("offload", "offload", 180, "what offloading costs and frees", ()),
    ("attention", "attention", 240, "flex attention against one sequence at a time", ()),
    ("update-7B", "update", 300, "model FLOP utilisation at 7 B", ("--shape", "7B")),
    ("shared-1.5B", "shared", 300, "common beginnings computed once, at 1.5 B", ("--shape", "1.5B")),
    ("chunks", "chunks", 120, "sizes of the chunks of logits, and the head at once or in parts", ()),
)
NEEDS = {"pretrained": ("model",), "gsm8k": ("model", "gsm8k")}
"""Options without which a part is left out."""
LAST = Path(__file__).with_name("last.json")
"""The report of the last GPU, which a new report is compared with where it is there."""
TINY = ("update-1.5B", "update-7B", "shared-1.5B")
"""Parts that are one and the same with tiny shapes as one of a smaller shape."""


def parts(device: str, tiny: bool, names: list[str] | None, **folders: str | None) -> list[Part]:
    """Return the parts in their order, without those whose folders (`NEEDS`) are missing."""
    words = ["--device", device, *(["--tiny"] if tiny else [])]
    if folders.get("model"):
        words += ["--model", str(folders["model"])]
    slower = 3.0 if device == "cpu" else 1.0
    found = []
    for name, module, limit, about, options in PARTS:
        asked = name in names if names else not (tiny and name in TINY)
        if asked and all(folders.get(option) for option in NEEDS.get(name, ())):
            own = ("--gsm8k", str(folders["gsm8k"])) if name == "gsm8k" else options
            command = (sys.executable, "-m", f"benchmarks.gpu.{module}", *words, *own)
            found.append(Part(name, about, command, slower * limit))
    return found


def environment() -> dict[str, str]:
    """Environment of the parts: the checkout on their path, no network."""
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part[0] for part in PARTS]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=names, metavar="PART", help=f"only these: {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-report"), help="folder of the report")
    parser.add_argument("--budget", type=float, help="seconds for all parts; what has no time left is not run")
    parser.add_argument("--again", action="store_true", help="also run what is done already")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, which --device cpu has anyway")
    parser.add_argument("--model", help="folder of a small pretrained chat model; for the part `gsm8k`: SmolLM2-135M")
    parser.add_argument("--gsm8k", help="folder of GSM8K's train.jsonl and test.jsonl, for the part `gsm8k`")
    parser.add_argument("--against", type=Path, help=f"report.json to compare with; without it {LAST.name}, if any")
    given = parser.parse_args()
    for name in given.parts or ():
        for option in NEEDS.get(name, ()):
            if not vars(given)[option]:
                parser.error(f"the part {name} needs --{option} FOLDER")
    import torch  # late: --help and wrong options wait for nothing

    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no CUDA device, so there is nothing to measure. On a machine with a GPU: "
            "docs/gpu.md has torch with CUDA. To try the command: --device cpu"
        )
    tiny = given.tiny or given.device == "cpu"
    given.out.mkdir(parents=True, exist_ok=True)
    report, before = Report(given.device, tiny), given.out / "report.json"
    if before.exists():
        try:
            report = Report.read(before)
        except ValueError as error:
            parser.error(f"{error}; name another folder with --out")
        if (report.device, report.tiny) != (given.device, tiny):
            parser.error(f"{before} is of {report.device}, tiny={report.tiny}: name another folder with --out")

    last = None
    if given.against is not None or (LAST.exists() and not tiny):
        try:
            last = Report.read(given.against or LAST)
        except (OSError, ValueError) as error:
            parser.error(f"--against: {error}")

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # through the ends of the running part and the report

    signal.signal(signal.SIGTERM, end)
    chosen = parts(given.device, tiny, given.parts, model=given.model, gsm8k=given.gsm8k)
    page = partial(markdown, last=last)
    run_parts(chosen, report, given.out, page, budget=given.budget, again=given.again, environment=environment())
    print(f"{given.out}/report.md, report.json and log.txt hold what was found")
    return 0 if all(report.parts[part.name].status == "done" for part in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
