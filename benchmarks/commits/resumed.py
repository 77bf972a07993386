"""A run that OLD began and was killed in: NEW resumes it as OLD itself does, and shows it in the viewer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from agentrl.system.json_value import JSON, as_list, as_object
from benchmarks.commits.compare import differences
from benchmarks.commits.sides import Side
from benchmarks.commits.verl import INSIDE
from benchmarks.commits.weights import make_assets, sampled, tensors
from benchmarks.training.clean_steps import ahead

KINDS = {"in-turn": (), "bound-1": ahead(1)}
"""By name, overrides: with a bound the run has a journal too."""
ADDRESS = re.compile(r"open (http://\S+?)/\?token=(\S+)")


def words_of(kind: str, assets: Path, run: Path) -> list[str]:
    """Write the run's overrides."""
    words = make_assets(assets).words(KINDS[kind], 3)
    return [*words, "trainer.resume_mode=auto", "trainer.save_freq=1", f"trainer.default_local_dir={run}"]


def begin(old: Side, kind: str) -> JSON:
    """Have OLD train two steps of three."""
    folder = old.results / "resumed" / kind
    shutil.rmtree(folder, ignore_errors=True)
    old.run([INSIDE / "stopped.py", *words_of(kind, old.assets, folder / "run")], folder)
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def resume(side: Side, begun: Path, kind: str) -> JSON:
    """Do the third step in a copy of the run's folder, and open it in the viewer."""
    folder = side.results / "resumed" / f"{kind}-third"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(begun, folder / "run")
    side.run(["-m", "agentrl.train", *words_of(kind, side.assets, folder / "run")], folder)
    return {
        "tensors": tensors(folder / "run"),
        "sampled": sampled(folder / "run"),
        "steps": steps(folder / "run"),
        "viewer": shown(side, folder / "run"),
        "trajectories": trajectories(folder / "run"),
    }


def steps(run: Path) -> list[JSON]:
    """List the steps of the run's metrics."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line).get("step") for line in lines]


def trajectories(run: Path) -> int:
    """Count the run's recorded trajectories."""
    return sum(pq.read_metadata(file).num_rows for file in (run / "trajectories").glob("*.parquet"))


def shown(side: Side, run: Path) -> int:
    """Open a run in a side's viewer and count the trajectories that it shows. Raises OSError, RuntimeError."""
    words = [side.python, "-m", "agentrl.view", str(run), "--port", "0"]
    process = subprocess.Popen(
        words, cwd=run.parent, env=side.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := ADDRESS.search(line):
                address, token = found.groups()
                break
        else:
            raise RuntimeError(f"{side.name}: the viewer of {run} ended before it served")
        _get(f"{address}/?token={token}", token)
        (about,) = as_list(as_object(json.loads(_get(f"{address}/api/runs", token)))["runs"])
        sets = as_object(as_object(about)["sets"])
        pages = [f"{address}/api/run/0/step/{name}/{step}" for name, of in sets.items() for step in as_list(of)]
        return sum(len(as_list(as_object(json.loads(_get(page, token)))["rows"])) for page in pages)
    finally:
        process.terminate()
        process.wait(30)


def _get(url: str, token: str) -> str:
    """Read an address. Raises OSError where it does not answer, in the end."""
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    for attempt in range(30):
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError:
            raise
        except OSError:
            if attempt == 29:
                raise
            time.sleep(1)
    raise AssertionError("unreachable")


def check(old: Side, new: Side) -> Iterator[str]:
    """Compare what both sides make of OLD's runs."""
    for kind in KINDS:
        files = as_list(old.kept(f"resumed/{kind}", begin, old, kind))
        begun = old.results / "resumed" / kind / "run"
        left, right = (as_object(side.kept(f"resumed/{kind}-third", resume, side, begun, kind)) for side in (old, new))
        print(f"  {kind}: {len(files)} files, {right['trajectories']} trajectories, steps {right['steps']}", flush=True)
        for what in ("sampled", "tensors"):
            yield from (f"{kind}: {line}" for line in differences(as_object(left[what]), as_object(right[what])))
        rest = ("steps", "viewer", "trajectories")
        one, other = ({key: side[key] for key in rest} for side in (left, right))
        yield from (f"{kind}: {line}" for line in differences(one, other))
        if right["viewer"] != right["trajectories"]:
            yield f"{kind}: the viewer shows {right['viewer']} trajectories of {right['trajectories']}"
