"""The pictures of docs/viewer.md: `python -m benchmarks.view.pictures runs/quickstart --out docs/images`.

Needs chromium (`apt-get install chromium`) and the packages of `.[dev]`.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, ViewportSize, sync_playwright

from agentrl.view.questions import Question
from agentrl.view.run import open_run
from agentrl.view.viewer import Viewer
from tests.view.served import ARGUMENTS, CHROMIUM, TOKEN, serving

COLORS = 192
"""Colours of a picture's palette."""


def pictures(folder: Path) -> Sequence[tuple[str, str, str, int, int]]:
    """Name, place, theme, width and height of each picture: of an early step, and a call that went wrong in it."""
    viewer = Viewer([open_run(str(folder))])
    steps = [part.step for part in open_run(str(folder)).parts if part.set == "train"]
    step = steps[min(2, len(steps) - 1)]
    found = viewer.search(0, Question(where="malformed > 0 and num_calls > 1", limit=1), "train", step, step)["rows"]
    assert isinstance(found, list) and found, "no call of the run went wrong"
    one = found[0]
    return [
        ("viewer_run", "/run/0", "light", 1280, 820),
        ("viewer_step", f"/run/0/step/train/{step}", "dark", 1280, 820),
        ("viewer_trajectory", f"/run/0/trajectory/{one['part']}/{one['row']}?color=logprob", "light", 1280, 820),
        ("viewer_group", f"/run/0/group/{one['part']}/{one['group']}", "dark", 1280, 560),
    ]


def save(page: Page, path: Path) -> None:
    """Write what the page shows, with a palette, so that it is small."""
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size >> 10} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with serving(options.run, replay=True) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS.split())
        for name, place, theme, width, height in pictures(options.run):
            size: ViewportSize = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme="dark" if theme == "dark" else "light")
            page.goto(f"{address}/?token={TOKEN}")
            page.goto(f"{address}/#{place}")
            page.wait_for_selector("main h1")
            page.wait_for_timeout(1000)
            save(page, options.out / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
