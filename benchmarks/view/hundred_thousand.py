"""The viewer with 100,000 synthetic trajectories: `python -m benchmarks.view.hundred_thousand`.

200 steps of 500 trajectories, with what the update computed beside them, and one step of long ones. Seconds are what
headless chromium (`apt-get install chromium`) needs from asking for a page until it is drawn; without it, what the
server needs. Peak memory is that of the server's process, the data made before in another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from agentrl.trajectory import ToolAnswer, ToolCallRecord, Trajectory, Transcript, Turn
from agentrl.trajectory.files import update_file
from agentrl.trajectory.parquet import rows_together, write_trajectories
from tests.view.served import ARGUMENTS, BEARER, CHROMIUM, TOKEN, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

GROUP = 8
OPENED = 9
"""Long trajectories that are opened, each by an address that the browser is sent to."""
MARKS = """
addEventListener("DOMContentLoaded", () => {
  const seen = new MutationObserver(() => {
    if (!document.querySelector(".tokens .t")) return;
    seen.disconnect();
    drawn(() => performance.mark("usable"));
  });
  seen.observe(document.body, { childList: true, subtree: true });
});
globalThis.drawn = (then) => requestAnimationFrame(() => {
  const behind = new MessageChannel();
  behind.port1.onmessage = then;
  behind.port2.postMessage(0);
});
"""
"""Marks the end of the first frame with tokens: what the user does next is answered from then on."""
TIMES = """() => new Promise((done) => {
  const at = (name) => performance.getEntriesByName(name)[0]?.startTime;
  const frame = (act) => new Promise((then) => {
    const begun = performance.now();
    act();
    drawn(() => then(performance.now() - begun));
  });
  const look = async () => {
    if (at("usable") === undefined) return setTimeout(look, 5);
    const click = await frame(() => document.querySelectorAll(".tokens .t")[40].click());
    const colour = await frame(() => document.querySelectorAll(".choices button")[1].click());
    done([at("first-contentful-paint"), at("usable"), click, colour].map((each) => each / 1000));
  };
  look();
})"""
"""Seconds until the first paint and until it is usable, and of the frames after a click and another colouring."""


def synthetic(uid: str, group: int, tokens: int, generator: np.random.Generator) -> Trajectory:
    """Make a trajectory of about `tokens` tokens in four turns, each second one a tool's answer."""
    window = Transcript()
    window.append_prompt(generator.integers(32, 127, 40).tolist())
    one = Trajectory(uid, group, "synthetic", "tool_agent", [window], score=float(generator.random() < 0.5))
    one.messages = [{"role": "user", "content": f"question {group} " + "why " * 20}]
    for turn in range(4):
        start, count = len(window), max(1, (tokens - 40) // 4)
        ids = generator.integers(32, 127, count).tolist()
        text = bytes(ids).decode()
        if turn % 2:
            window.append_observed(ids)
            one.turns.append(Turn("tool", text, 0, start, len(window)))
        else:
            window.append_sampled(ids, (-generator.exponential(0.5, count)).round(4).tolist(), 1)
            calls = [
                ToolCallRecord(
                    "search", {"query": text[:40]}, ToolAnswer(text[:200], seconds=float(generator.random()))
                )
            ]
            one.turns.append(Turn("assistant", text, 0, start, len(window), calls, "stop", seconds=0.5))
    one.metrics = {"generate_seconds": 1.0, "retries": 0.0}
    return one


def write_update(path: Path, source: Path, generator: np.random.Generator) -> None:
    """Write trainer's log-probs, entropies, advantages and weights for the tokens of a file of trajectories."""
    table = pq.read_table(source, columns=["uid", "mask", "logprobs"])
    lists = table["logprobs"].combine_chunks()
    flat = lists.flatten().flatten().to_numpy()
    inner, outer = lists.flatten().offsets, lists.offsets

    def column(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(outer, pa.ListArray.from_arrays(inner, pa.array(values.astype(np.float32))))

    size = len(flat)
    columns = {
        "uid": table["uid"].combine_chunks(),
        "trainer_logprobs": column(flat + generator.normal(0, 1e-3, size)),
        "entropy": column(generator.exponential(0.3, size)),
        "advantages": column(np.ones(size)),
        "weights": column(generator.normal(1, 0.01, size)),
    }
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path, compression="zstd", row_group_size=rows_together(table))


def make(folder: Path, steps: int, each: int, tokens: int, long: int) -> None:
    """Write the run. The steps' files are of one draw, under names and with scores of their own."""
    generator = np.random.default_rng(0)
    records = folder / "trajectories"
    (folder / "policy").mkdir(parents=True)
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = Tokenizer(BPE({character: id for id, character in enumerate(alphabet)}, []))
    vocabulary.decoder = ByteDecoder()
    vocabulary.save(str(folder / "policy" / "tokenizer.json"))
    rows = [
        synthetic(f"train/0/{number // GROUP}/{number % GROUP}", number // GROUP, tokens, generator)
        for number in range(each)
    ]
    base = write_trajectories(records, rows, step=0, split="base", turn_reward_coef=1.0)
    update = update_file(base)
    write_update(update, base, generator)
    table, updated = pq.read_table(base), pq.read_table(update)
    group_rows = rows_together(table)
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(1, steps + 1):
            uids = pa.array([f"train/{step}/{number // GROUP}/{number % GROUP}" for number in range(each)])
            scores = pa.array((generator.random(each) < step / steps).astype(np.float64))
            new = {"uid": uids, "score": scores, "reward": scores, "step": pa.array([step] * each)}
            one = table
            for name, values in new.items():
                one = one.set_column(one.schema.get_field_index(name), name, values)
            name = f"train_{step:06d}"
            pq.write_table(one, records / f"{name}.parquet", compression="zstd", row_group_size=group_rows)
            other = update_file(records / f"{name}.parquet")
            pq.write_table(updated.set_column(0, "uid", uids), other, compression="zstd", row_group_size=group_rows)
            metrics = {f"made/{number}": float(value) for number, value in enumerate(generator.random(120))}
            lines.write(json.dumps({"step": step, "reward/mean": step / steps, "time/step": 1.0, **metrics}) + "\n")
    base.unlink()
    update.unlink()
    rows = [synthetic(f"long/0/{number}", number, long, generator) for number in range(64)]
    path = write_trajectories(records, rows, step=steps, split="long", turn_reward_coef=1.0)
    write_update(update_file(path), path, generator)


def measure(name: str, ask: Callable[[], object], times: int = 3, before: Callable[[], object] | None = None) -> None:
    """Print the time of the first call, the median of the next ones, and of these the server's CPU-seconds."""
    seconds, work = list[float](), list[float]()
    for _ in range(times):
        if before is not None:
            before()
        begun, busy = time.perf_counter(), time.process_time()
        ask()
        seconds.append(time.perf_counter() - begun)
        work.append(time.process_time() - busy)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    later = float(np.median(seconds[1:])), float(np.median(work[1:]))
    print(f"| {name} | {seconds[0]:.2f} | {later[0]:.2f} | {later[1]:.2f} | {memory:.0f} |", flush=True)


def in_browser(address: str, steps: int, each: int) -> None:
    """Measure pages until they are drawn."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS.split())
        page = browser.new_page()
        page.goto(f"{address}/?token={TOKEN}")
        page.wait_for_selector("main h1")

        def opens(place: str, wanted: str) -> Callable[[], object]:
            def open_page() -> None:
                page.goto("about:blank")
                page.goto(f"{address}/#{place}")
                page.wait_for_selector(wanted)

            return open_page

        def goes(place: str, wanted: str) -> Callable[[], object]:
            def go_there() -> None:
                page.evaluate("(place) => { location.hash = place }", place)
                page.wait_for_selector(wanted)

            return go_there

        measure("first page: the run's curves", opens("/run/0", ".chart canvas"))
        pages = {
            "a step's table and histograms": (f"/run/0/step/train/{steps // 2}", "tbody tr"),
            "a group side by side": (f"/run/0/group/train_{steps:06d}/{min(3, (each - 1) // GROUP)}", ".member"),
            "a trajectory": (f"/run/0/trajectory/train_{steps:06d}/{min(7, each - 1)}", ".tokens .t"),
            "a trajectory of 32k tokens": (f"/run/0/trajectory/long_{steps:06d}/40", ".tokens .t"),
        }
        for name, (place, wanted) in pages.items():
            search = goes("/run/0/search", "form.search")
            measure(name, goes(place, wanted), before=search)
        print(f"\n{OPENED} trajectories of 32k tokens, each opened by its address:\n")
        opened_by_address(browser, f"{address}/#/run/0/trajectory/long_{steps:06d}")
        browser.close()


def opened_by_address(browser: Browser, address: str) -> None:
    """Print the medians of what the browser measures of a page, with the first and the last of the pages opened."""
    page = browser.contexts[0].pages[0]
    page.add_init_script(MARKS)
    system = browser.new_browser_cdp_session()
    thread = page.context.new_cdp_session(page)
    thread.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu() -> dict[int, float]:
        return {one["id"]: one["cpuTime"] for one in system.send("SystemInfo.getProcessInfo")["processInfo"]}

    rows = []
    for row in range(OPENED):
        page.goto("about:blank")
        before, served = cpu(), time.process_time()
        page.goto(f"{address}/{row}", wait_until="commit")
        page.wait_for_selector(".tokens .t", state="attached")
        times = page.evaluate(TIMES)
        metrics = {one["name"]: one["value"] for one in thread.send("Performance.getMetrics")["metrics"]}
        times.append(metrics["TaskDuration"])
        busy = sum(seconds - before.get(process, 0.0) for process, seconds in cpu().items())
        rows.append([*times, busy, time.process_time() - served])
    asked = ["first contentful paint", "usable", "a click", "another colouring"]
    busy_ones = ["page's main thread", "browser's processes, one of them new", "server, and this script"]
    names = [*asked, *(f"CPU of the {name}" for name in busy_ones)]
    print("| seconds | median | least | most |\n|---|---|---|---|")
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        print(f"| {name} | {np.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |", flush=True)


def by_http(address: str, steps: int, each: int) -> None:
    """Measure the server's answers."""
    with httpx.Client(base_url=address, headers=BEARER, timeout=120) as client:

        def get(path: str, **parameters: str | list[str]) -> Callable[[], httpx.Response]:
            return lambda: client.get(path, params=parameters)

        measure("answer: the run's curves", get("/api/run/0"))
        measure("answer: a step", get(f"/api/run/0/step/train/{steps // 3}"))
        measure("answer: 32k tokens", get(f"/api/run/0/trajectory/long_{steps:06d}/41"))
        search = "/api/run/0/search"
        measure(
            "search all: where, sorted", get(search, where="num_calls > 1 and score = 0", order="-tokens", set="train")
        )
        measure("search all: text that is nowhere", get(search, text="nowhere at all", set="train"))
        places = [f"0/train_{steps:06d}/{row}" for row in range(min(64, each))]
        answer = client.get("/export", params={"m": places})
        measure(f"{len(places)} trajectories exported", get("/export", m=places))
        print(f"\n{len(places)} trajectories exported: {len(answer.content) / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--each", type=int, default=500, help="trajectories a step (%(default)s)")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of each (%(default)s)")
    parser.add_argument("--long", type=int, default=32768, help="tokens of each of 64 long ones (%(default)s)")
    parser.add_argument("--folder", type=Path, help="made there, or taken if it is there already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "run"
        if not folder.exists():
            making = (folder, options.steps, options.each, options.tokens, options.long)
            maker = multiprocessing.get_context("spawn").Process(target=make, args=making)
            maker.start()
            maker.join()
            if maker.exitcode:
                raise SystemExit("the data could not be made")
        print(f"{options.steps * options.each:,} trajectories\n")
        print("| | first, s | then, s | CPU-s of the server | peak so far, MiB |\n|---|---|---|---|---|")
        with serving(folder) as address:
            if CHROMIUM is not None:
                in_browser(address, options.steps, options.each)
            by_http(address, options.steps, options.each)


if __name__ == "__main__":
    main()
