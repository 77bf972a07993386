"""Weights of thirteen small trainings after three steps, by a hash of each tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.system.json_value import JSON, as_object
from benchmarks.commits.compare import differences
from benchmarks.commits.sides import Side
from benchmarks.training.clean_steps import REFILLED, ROLES, SGLANG, Assets, ahead

STEPS = 3


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A small training."""

    words: tuple[str, ...] = ()
    entry: str = "train"
    stops: tuple[int, ...] = (STEPS,)
    """Steps at which its processes end: the second one resumes the first."""
    sglang: bool = False


TWO_RANKS = ("trainer.device=cpu", "trainer.n_gpus_per_node=2", f"{ROLES}.actor.ppo_mini_batch_size=2")
ARRANGEMENTS = {
    "grpo": Arrangement(),
    "ppo": Arrangement(("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3")),
    "lora": Arrangement((f"{ROLES}.model.lora_rank=4",)),
    "supervised": Arrangement(entry="sft"),
    "pairs": Arrangement(entry="preferences"),
    "refilled": Arrangement(REFILLED),
    "bound-1": Arrangement(ahead(1)),
    "bound-2": Arrangement(ahead(2, depth=2)),
    "ranks": Arrangement(TWO_RANKS),
    "ray": Arrangement((*TWO_RANKS, f"{ROLES}.rollout.nnodes=2")),
    "sglang": Arrangement(SGLANG, sglang=True),
    "distillation": Arrangement(("distillation.teacher.path={assets}/teacher", "distillation.policy_loss_coef=0.5")),
    "gigpo": Arrangement(("algorithm.adv_estimator=gigpo",)),
    "resumed": Arrangement(("trainer.resume_mode=auto",), stops=(2, STEPS)),
}
"""The thirteen, and one that is resumed after its second step."""
CONVERSATIONS = [("How much is 12 times 3?", "36", "35"), ("Add 40 and 2.", "42", "24"), ("Say hi.", "Hi.", "No.")]


def make_assets(folder: Path) -> Assets:
    """Make policy, teacher, data and scorer in `folder`, or find them there."""
    from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy

    assets = Assets.made(folder)
    if not (folder / "pairs.parquet").exists():
        make_tiny_policy(folder / "teacher", seed=9, shape=TinyShape(hidden=128, layers=1))
        rows = [
            {
                key: [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                for key, answer in (("chosen", good), ("rejected", bad))
            }
            for question, good, bad in CONVERSATIONS * 4
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    if not (folder / "transcripts.parquet").exists():
        good = pq.read_table(folder / "data" / "sft.parquet").slice(0, 64)  # flawed ones, which are refused, come last
        pq.write_table(good, folder / "transcripts.parquet")
    return assets


def words_of(arrangement: Arrangement, assets: Path, run: Path, steps: int) -> list[str]:
    """Write the arguments of one of its processes."""
    ends = [
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        f"trainer.default_local_dir={run}",
    ]
    own = [word.replace("{assets}", str(assets)) for word in arrangement.words]
    if arrangement.entry == "train":
        words = make_assets(assets).words(own, steps)
    else:
        file = assets / {"sft": "transcripts.parquet", "preferences": "pairs.parquet"}[arrangement.entry]
        words = [f"data.train_files={file}", f"model.path={assets}/policy", "data.train_batch_size=4", *own]
    return ["-m", f"agentrl.{arrangement.entry}", *words, *ends]


def train(side: Side, name: str) -> JSON:
    """Train an arrangement and describe what it left: tensors, metrics' names and parquet columns."""
    arrangement = ARRANGEMENTS[name]
    folder = side.results / "weights" / name
    python = side.sglang_python if arrangement.sglang else side.python
    for steps in arrangement.stops:
        words = words_of(arrangement, side.assets, folder / "run", steps)
        side.run(words, folder, python)
    run = folder / "run"
    found: JSON = {"tensors": tensors(run), "sampled": sampled(run), "metrics": metrics(run), "columns": columns(run)}
    if not arrangement.words and arrangement.entry == "train" and not moved(side.assets, run):
        raise RuntimeError(f"{side.name}: {name}: the exported policy is the one that training began with")
    return found


def tensors(run: Path) -> dict[str, JSON]:
    """Hash each tensor of the newest checkpoint and of the exported policy."""
    newest = sorted((run / "checkpoints").glob("step_*"))[-1:]
    files = [file for folder in (*newest, run / "policy") for file in sorted(folder.rglob("*.safetensors"))]
    if not newest or not files:
        raise RuntimeError(f"{run}: no checkpoint in it, or no safetensors in the checkpoint")
    return {f"{file.relative_to(run)}:{name}": value for file in files for name, value in hashes(file).items()}


def hashes(file: Path) -> dict[str, str]:
    """Hash the tensors of a safetensors file, each with its type and shape."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    found = {}
    for name, about in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            content = hashlib.sha256(data[8 + size + begin : 8 + size + end]).hexdigest()[:16]
            found[name] = f"{about['dtype']} {about['shape']} {content}"
    return found


def moved(assets: Path, run: Path) -> bool:
    """Tell whether training changed the policy."""
    return hashes(assets / "policy" / "model.safetensors") != hashes(run / "policy" / "model.safetensors")


def sampled(run: Path) -> dict[str, JSON]:
    """Hash the ids, and the versions of the weights, of each trajectory that was trained on."""
    found: dict[str, JSON] = {}
    for file in sorted((run / "trajectories").glob("*.parquet")):
        for row in pq.read_table(file, columns=["step", "uid", "ids", "versions"]).to_pylist():
            text = json.dumps([row["ids"], row["versions"]])
            found[f"step {row['step']}, {row['uid']}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def metrics(run: Path) -> list[JSON]:
    """List the names of the metrics that were logged."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted({name for line in lines for name in json.loads(line)})


def columns(run: Path) -> dict[str, JSON]:
    """List the columns of the run's parquet files with their types, by the files' folder."""
    found: dict[str, JSON] = {}
    for file in sorted(run.glob("*/*.parquet")):
        for column in pq.read_schema(file):
            found[f"{file.parent.name}.{column.name}"] = str(column.type)
    return found


def check(old: Side, new: Side, names: list[str]) -> Iterator[str]:
    """Train each on both sides, and say which tensors differ."""
    make_assets(old.assets)
    for name in names:
        if ARRANGEMENTS[name].sglang and old.sglang_python is None:
            yield f"{name}: not run: --sglang-python is not given"
            continue
        left, right = (as_object(side.kept(f"weights/{name}", train, side, name)) for side in (old, new))
        first = differences(as_object(left["sampled"]), as_object(right["sampled"]))
        found = differences(as_object(left["tensors"]), as_object(right["tensors"]))
        print(f"  {name}: {len(as_object(left['tensors']))} tensors, {len(found)} differ", flush=True)
        if found and first:
            yield f"{name}: {len(first)} trajectories differ, first {first[0]}"
        yield from (f"{name}: {line}" for line in found)
