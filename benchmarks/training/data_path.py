"""Memory and time of the data path over a large parquet file, against reading the file whole.

    python -m benchmarks.training.data_path [--rows 1000000]

Writes a file of tool-agent rows (one row group of up to 1,048,576 rows, as pyarrow and pandas do) to a temporary
folder, then measures each way of reading it in a process of its own: our data set (open it, check every name, pass
over all rows as the count of their tokens does, read rows in shuffled order), pyarrow and pandas (the whole file into
memory), and one row group a row in the same order. Seconds are of the processor, of all threads.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import track

CHUNK = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--read", type=int, default=20_000, help="rows read in shuffled order")
    parser.add_argument("--measure", choices=sorted(MEASURES), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measured(args.measure, args.file, args.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        write_rows(file, args.rows)
        print(f"{args.rows:,} rows, {file.stat().st_size / 2**20:.0f} MiB of parquet")
        results = {name: run_alone(name, file, args.read) for name in MEASURES}
    report(results)


def write_rows(file: Path, rows: int) -> None:
    """Rows like those of a tool-agent data set: about 700 bytes of text each."""
    words = [f"word{number}" for number in range(5000)]
    rng = random.Random(0)

    def batch(start: int) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([row(i) for i in range(start, min(start + CHUNK, rows))])

    def row(i: int) -> dict[str, object]:
        question = " ".join(rng.choices(words, k=60))
        return {
            "prompt": [
                {"role": "system", "content": "Answer with the tools. " * 5},
                {"role": "user", "content": question},
            ],
            "data_source": f"source{i % 4}",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "agent_name": "tool_agent",
            "tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": str(i)}}},
            "extra_info": {"index": i, "split": "train"},
        }

    def tables() -> Iterator[pa.RecordBatch]:
        for start in track(range(0, rows, CHUNK), "writing"):
            yield batch(start)

    table = pa.Table.from_batches(tables())
    pq.write_table(table, file)


def ours(file: Path, count: int) -> dict[str, float]:
    from agentrl.data.dataset import FileDataset
    from agentrl.data.loader import Loader
    from agentrl.data.sampler import Shuffled

    begin = time.process_time()
    dataset = FileDataset(str(file))
    opened = time.process_time()
    dataset.check(agent_names=["tool_agent"], tool_names=["calculator"], interaction_names=[])
    dataset.filter_overlong(lambda sample: len(sample.prompt), limit=2)
    checked = time.process_time()
    loader = Loader(dataset, Shuffled(dataset, min(100, len(dataset)), seed=1))
    for _ in range(count // loader.sampler.batch_size):
        next(loader)
    read = count / (time.process_time() - checked)
    return {"open_s": opened - begin, "pass_s": checked - opened, "shuffled_rows_per_s": read}


def pyarrow_whole(file: Path, count: int) -> dict[str, float]:
    begin = time.process_time()
    table = pq.read_table(file)
    assert table.num_rows
    return {"open_s": time.process_time() - begin}


def pandas_whole(file: Path, count: int) -> dict[str, float]:
    import pandas as pd

    begin = time.process_time()
    assert len(pd.read_parquet(file))
    return {"open_s": time.process_time() - begin}


def row_group_a_row(file: Path, count: int) -> dict[str, float]:
    """Measure random access without a working copy: the row group is decoded for each row."""
    parquet = pq.ParquetFile(file)
    begin = time.process_time()
    opened = parquet.read_row_group(random.Random(0).randrange(parquet.num_row_groups)).slice(0, 1).to_pylist()
    assert opened
    return {"shuffled_rows_per_s": 1 / (time.process_time() - begin)}


MEASURES = {
    "agentrl": ours,
    "pyarrow, whole file": pyarrow_whole,
    "pandas, whole file": pandas_whole,
    "row group a row": row_group_a_row,
}


def measured(name: str, file: Path, count: int) -> dict[str, float]:
    """The measure's own numbers, and the memory it took above what the process had before, in MiB."""
    before = anonymous_mib()
    peak = [before]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = MEASURES[name](file, count)
    peak[0] = max(peak[0], anonymous_mib())
    done.set()
    watcher.join()
    return result | {"memory_mib": peak[0] - before}


def anonymous_mib() -> float:
    """Memory of this process that is not a mapped file (those pages are the system's to take back), in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS: bytes, and mapped files count


def run_alone(name: str, file: Path, count: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.training.data_path", "--measure", name, "--file", str(file)]
    done = subprocess.run([*command, "--read", str(count)], check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def report(results: dict[str, dict[str, float]]) -> None:
    for name, numbers in results.items():
        print(f"{name:>20}: " + "  ".join(f"{key}={value:.4g}" for key, value in numbers.items()))
    own = results["agentrl"]
    for name in ("pyarrow, whole file", "pandas, whole file"):
        other = results[name]
        print(
            f"against {name}: {own['memory_mib'] / other['memory_mib']:.3f} times the memory, "
            f"{own['open_s'] / other['open_s']:.2f} times the time to open"
        )
    speed = own["shuffled_rows_per_s"] / results["row group a row"]["shuffled_rows_per_s"]
    print(f"against one row group a row: {speed:,.0f} times the rows a second in shuffled order")


if __name__ == "__main__":
    main()
