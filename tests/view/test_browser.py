"""The pages in a real browser: each of them, keys, following, exports from a file, hostile texts, widths, themes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from agentrl.trajectory.parquet import write_trajectories
from agentrl.view.export import Hidden, exported
from agentrl.view.run import open_run
from agentrl.view.viewer import Viewer
from tests.view.made import HOSTILE, Player, add_metrics, make_run, played
from tests.view.served import TOKEN, serving
from tests.view.test_viewer import pictured
from tests.vision.tiny import encoded

WAIT = 30_000  # milliseconds; a page needs a tenth of a second where nothing else runs
expect.set_options(timeout=WAIT)


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with serving(run) as address:
        yield address


class Watched:
    """A page whose console, errors and requests are kept."""

    def __init__(self, browser: Browser, *, width: int = 1280, scheme: str = "light", offline: bool = False) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if scheme == "dark" else "light",
            offline=offline,
            accept_downloads=True,
        )
        self.context.set_default_timeout(WAIT)
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", self._say)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _say(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "status of 40" not in message.text:
            self.said.append(message.text)

    def open(self, address: str, place: str = "") -> Page:
        if not self.asked:
            self.page.goto(f"{address}/?token={TOKEN}")
        self.page.goto(f"{address}/#{place}")
        return self.page


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    made = Watched(browser)
    yield made
    assert made.said == [], "the console is silent"
    made.context.close()


def test_from_a_run_to_a_token(watched: Watched, address: str) -> None:
    page = watched.open(address)
    expect(page.locator("h1")).to_have_text("made")
    expect(page.locator(".chart canvas").first).to_be_visible()
    expect(page.locator(".alarm")).to_contain_text("the gap is 0.5")
    assert "token" not in page.url
    page.get_by_role("link", name="2", exact=True).click()
    expect(page.locator("h1")).to_have_text("Step 2")
    expect(page.locator("tbody tr")).to_have_count(8)
    page.get_by_role("button", name="largest gap", exact=True).click()
    expect(page.locator("tbody tr").first).to_contain_text("train/2/0/1")
    assert "sort=-gap_max" in page.url
    page.locator("tbody tr").first.locator("a.uid").click()
    expect(page.locator(".call")).to_contain_text("calculator")
    page.get_by_role("button", name="engine–trainer gap").click()
    hot = page.locator(".tokens .p9")
    expect(hot).to_have_count(1)
    hot.hover()
    expect(page.locator(".inspector")).to_contain_text("gap0.5")
    expect(page.locator(".inspector")).to_contain_text("bytes3c 7c 69 6d 5f 65 6e 64 7c 3e")
    assert "color=gap" in page.url
    page.get_by_role("button", name="policy ratio").click()
    expect(page.locator(".tokens .clipped")).to_have_count(1)
    page.get_by_role("button", name="importance weight").click()
    expect(page.locator(".tokens .clipped").nth(5)).to_be_attached()
    page.get_by_role("button", name="engine–trainer gap").click()
    page.reload()
    expect(page.locator(".tokens .p9")).to_have_count(1)
    expect(page.locator(".tokens .bytes")).to_have_text(["\\xc3", "\\xa9"])
    page.get_by_role("link", name="Group").click()
    expect(page.locator(".member")).to_have_count(4)
    expect(page.locator(".beginning summary")).to_contain_text("Common beginning")
    expect(page.locator(".divergence").first).to_be_visible()
    assert {url.split("/")[2] for url in watched.asked if not url.startswith("data:")} == {address.split("/")[2]}


def test_curves_against_the_time_that_the_run_worked(watched: Watched, address: str) -> None:
    page = watched.open(address)
    button = page.get_by_role("button", name="over minutes")
    expect(button).to_have_attribute("aria-pressed", "false")
    across = "() => [...document.querySelector('.plot').chart.data[0]]"
    steps = page.evaluate(across)
    ticks = page.evaluate("() => document.querySelector('.plot').chart.axes[0]._splits")
    assert len(ticks) > 1 and all(float(tick).is_integer() for tick in ticks), "steps have no halves"
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    assert "over=minutes" in page.url
    minutes = page.evaluate(across)
    assert minutes == pytest.approx([2.0 * (place + 1) / 60 for place in range(len(steps))])
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    assert page.evaluate(across) == steps


TWINS = """async () => {
  const { curves } = await import("/static/charts.js");
  const lines = [[1, 2], [1, 2], [1, 3]].map((values, place) => ({ name: `${place}`, values }));
  const figure = curves({ title: "twins", steps: [1, 2], lines, range: null });
  document.querySelector("main").append(figure);
  while (!figure.lastChild.chart) await new Promise(requestAnimationFrame);
  return figure.lastChild.chart.series.slice(1).map((one) => Boolean(one.dash));
}"""


def test_a_line_that_would_hide_an_equal_one_is_dashed(watched: Watched, address: str) -> None:
    page = watched.open(address)
    expect(page.locator(".chart canvas").first).to_be_visible()
    assert page.evaluate(TWINS) == [False, True, False]


def test_columns_are_sorted_both_ways(watched: Watched, address: str) -> None:
    page = watched.open(address, "/run/0/step/train/2")
    expect(page.locator("tbody tr")).to_have_count(8)
    for name, first in (("uid", ["0/0", "1/3", "0/0"]), ("longest call", ["0/3", "0/0", "0/0"])):
        for uid in first:
            page.locator("th").get_by_role("button", name=name).click()
            expect(page.locator("tbody tr").first).to_contain_text(f"train/2/{uid}")


def test_a_bar_leads_to_the_trajectories_that_it_counts(browser: Browser, tmp_path: Path) -> None:
    more = []
    for turns in (1, 3, 5, 6, 7):
        player = Player(f"train/1/9/{turns}", 9, "Play.")
        for _ in range(turns):
            player.says("a")
        more.append(player.ends(1.0))
    with serving(make_run(tmp_path / "run", steps=1, groups=1, more=more)) as address:
        watched = Watched(browser)
        page = watched.open(address, "/run/0/step/train/1")
        page.get_by_role("button", name="turns 1 to 2: 1").click()
        expect(page.locator("h2").first).to_have_text("1 found")
        page.go_back()
        page.get_by_role("button", name="turns 6 to 7: 2").click()
        expect(page.locator("h2").first).to_have_text("2 found")
        assert watched.said == []
        watched.context.close()


def test_search_and_the_same_prompt_at_two_steps(watched: Watched, address: str) -> None:
    page = watched.open(address, "/run/0/search")
    page.get_by_role("link", name="Malformed calls").click()
    expect(page.locator("tbody tr")).to_have_count(6)
    page.locator("input[name=where]").fill("malformed > 0 and step = ")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator(".problems")).to_contain_text("want one SQL condition")
    page.locator("input[name=where]").fill("")
    page.locator("input[name=regex]").fill("#### 2 é")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(3)
    page.reload()
    expect(page.locator("tbody tr")).to_have_count(3)
    page.locator("tbody tr a.uid").first.click()
    page.get_by_role("button", name="Same prompt at other steps").click()
    page.locator(".same .chip").first.click()
    expect(page.locator(".member")).to_have_count(2)
    expect(page.locator("h1")).to_have_text("Side by side")


@pytest.mark.timeout(600)
def test_hostile_texts_are_texts(browser: Browser, hostile_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.html"
    viewer = Viewer([open_run(str(hostile_run))])
    out.write_text(exported(viewer, [(0, "train_000002", 4 + row) for row in range(len(HOSTILE))], Hidden()))
    with serving(hostile_run, hostile_run) as address:
        for start, is_file in ((address, False), (f"file://{out}", True)):
            watched = Watched(browser, offline=is_file)
            if is_file:
                watched.asked.append("file")  # needs no token
            places = ["", "/run/0", "/run/0/step/train/2", "/run/0/group/train_000002/1"]
            places += [] if is_file else ["/run/0/search?where=status%20is%20not%20null&go=1"]
            places += [f"/run/0/trajectory/train_000002/{row}" for row in (4, 7, 17)]
            for place in places:
                page = watched.page
                if is_file:
                    page.goto(f"{start}#{place}")
                    page.reload()
                else:
                    watched.open(start, place)
                expect(page.locator(".page:not(.waiting) main")).to_be_visible()
                assert page.evaluate("window.hacked") is None, place
                assert (
                    page.locator(
                        "main script, main iframe, main img, main base, main meta, main svg, main form[action]"
                    ).count()
                    == 0
                )
                assert page.locator("#hackedlink").count() == 0
            expect(page.locator(".turn .invisible[title='U+202E']").first).to_be_visible()
            assert [text for text in watched.said if "192.0.2.1" in text] == []
            assert not any("192.0.2.1" in url for url in watched.asked)
            assert watched.said == []
            watched.context.close()


def test_images_are_shown_as_pictures(browser: Browser, tmp_path: Path) -> None:
    """In the prompt and on their cards, in an exported file too; what is no picture is a card alone."""
    folder = pictured(tmp_path / "run", encoded(1), b"<svg onload='window.hacked=1'/>")
    out = tmp_path / "one.html"
    out.write_text(exported(Viewer([open_run(str(folder))]), [(0, "train_000001", 0)], Hidden()))
    with serving(folder) as address:
        for start, is_file in ((address, False), (f"file://{out}", True)):
            watched = Watched(browser, offline=is_file)
            page = watched.page
            if is_file:
                page.goto(f"{start}#/run/0/trajectory/train_000001/0")
            else:
                watched.open(start, "/run/0/trajectory/train_000001/0")
            expect(page.locator("img.picture")).to_have_count(2)
            for number in range(2):
                shown = page.locator("img.picture").nth(number)
                assert shown.evaluate("(one) => one.decode().then(() => one.naturalWidth)") == 24
            expect(page.locator(".turn.image").last).to_contain_text("no picture that is shown")
            assert page.evaluate("window.hacked") is None and watched.said == []
            watched.context.close()


def test_a_turn_names_the_role_that_took_it(browser: Browser, tmp_path: Path) -> None:
    first = Player("train/1/9/0", 9, "Play.").says("a")
    second = Player("train/1/9/1", 9, "Play.").says("b").hears("Sure?", "user")
    first.window.role, second.window.role = "white", "black"
    first.window.score = 0.25
    first.trajectory.transcripts.append(second.window)
    first.trajectory.turns += [replace(turn, transcript=1) for turn in second.trajectory.turns]
    folder = make_run(tmp_path / "run", steps=1, groups=1, more=[first.ends(1.0)])
    with serving(folder) as address:
        watched = Watched(browser)
        page = watched.open(address, "/run/0/trajectory/train_000001/4")
        expect(page.locator(".tokens-of .chip")).to_have_text(["white · score 0.25", "black"])
        expect(page.locator(".conversation .of-role")).to_have_text(["white", "black", "black"])
        assert watched.said == []
        watched.context.close()


def test_an_exported_file_opens_without_a_network(browser: Browser, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.html"
    viewer = Viewer([open_run(str(run))])
    out.write_text(exported(viewer, [(0, "train_000002", row) for row in range(4)], Hidden.from_names([], ["prompts"])))
    watched = Watched(browser, offline=True)
    page = watched.page
    page.goto(f"file://{out}")
    page.get_by_role("link", name="2", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(4)
    page.locator("tbody tr a.uid").nth(1).click()
    expect(page.locator(".turn.user").first).to_contain_text("███ ████")
    expect(page.locator("[data-go=replay], .edit")).to_have_count(0)
    page.get_by_role("button", name="advantage").click()
    expect(page.locator(".tokens .p9").first).to_be_visible()
    page.get_by_role("link", name="Group").click()
    expect(page.locator(".member")).to_have_count(4)
    page.goto(f"file://{out}#/run/0/trajectory/train_000003/0")
    expect(page.locator(".problems")).to_contain_text("not in the exported file")
    assert watched.said == []
    assert [url for url in watched.asked if not url.startswith(("file:", "data:"))] == []
    watched.context.close()


class Neighbour(BaseHTTPRequestHandler):
    """A server of somebody else's on another port of the machine, whose page asks the viewer with all that it can."""

    got: ClassVar[list[str]] = []
    viewer: ClassVar[str] = ""

    def do_GET(self) -> None:
        self.got.append(f"{self.path}\n{self.headers}")
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        ask = "fetch(to + path, {method, mode, body: method === 'POST' ? '{}' : undefined, credentials: 'include'})"
        self.wfile.write(
            f"""<title>waits</title><script type=module>
            const to = {self.viewer!r}, answers = [];
            for (const path of ["/api/runs", "/api/replay"]) for (const method of ["GET", "POST"])
              for (const mode of ["cors", "no-cors"])
                answers.push(await {ask}.then((one) => one.type, () => "refused"));
            document.title = answers.join(" ") + " " + (localStorage.length + document.cookie.length);
            </script>""".encode()
        )

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_other_ports_of_the_machine_get_no_token(browser: Browser, run: Path) -> None:
    """A browser sends a host's cookies to all of its ports: what opens the viewer is none."""
    with serving(run, replay=True) as address, ThreadingHTTPServer(("127.0.0.1", 0), Neighbour) as neighbour:
        threading.Thread(target=neighbour.serve_forever, daemon=True).start()
        Neighbour.viewer = address
        watched = Watched(browser)
        page = watched.open(address)
        expect(page.locator("h1")).to_have_text("made")
        other = watched.context.new_page()
        other.goto(f"http://127.0.0.1:{neighbour.server_port}/")
        expect(other).to_have_title(" ".join(["refused"] * 8 + ["0"]))
        assert Neighbour.got and not any(TOKEN in one or "Cookie" in one for one in Neighbour.got)
        assert watched.context.cookies() == []
        neighbour.shutdown()
        watched.context.close()


def test_a_copied_link_opens_in_another_tab(watched: Watched, address: str) -> None:
    page = watched.open(address, "/run/0/trajectory/train_000002/3")
    expect(page.locator("h1")).to_have_text("train/2/0/3")
    assert TOKEN not in page.url
    other = watched.context.new_page()
    other.goto(page.url)
    expect(other.locator("h1")).to_have_text("train/2/0/3")


def test_without_the_token_a_page_says_how_to_open_it(watched: Watched, address: str) -> None:
    watched.page.goto(f"{address}/#/run/0")
    expect(watched.page.locator(".problems")).to_contain_text("Open the address that the command printed")
    watched.page.goto(f"{address}/?token={TOKEN}#/run/0/step/train/2")
    expect(watched.page.locator("h1")).to_have_text("Step 2")
    assert watched.page.url == f"{address}/#/run/0/step/train/2"


@pytest.mark.slice(1, "matrix")
def test_the_export_dialog_saves_the_chosen_rows(watched: Watched, address: str, tmp_path: Path) -> None:
    page = watched.open(address, "/run/0/step/train/2")
    page.locator("tbody input").nth(1).check()
    page.locator("tbody input").nth(3).check()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Export").click()
    page.get_by_label("tools' answers").select_option("masked")
    page.route("**/export?*", lambda route: route.fulfill(status=404, json={"error": "no <b>file</b>"}), times=1)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("dialog .problems")).to_have_text("no <b>file</b>")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
    expect(page.locator("dialog")).to_have_count(0)
    assert download.value.suggested_filename == "trajectories.html"
    download.value.save_as(tmp_path / "saved.html")
    page.goto(f"file://{tmp_path}/saved.html#/run/0/step/train/2")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.locator("tbody tr a.uid").nth(1).click()
    expect(page.locator(".call .response")).to_have_text("██ ████")


@pytest.mark.slice(1, "matrix")
def test_a_run_that_goes_on_is_followed(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", 1)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    with serving(folder, follow=True) as address:
        watched = Watched(browser)
        page = watched.open(address)
        expect(page.locator(".chip")).to_have_text(["1"])
        assert {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()} == before
        (folder / "trajectories" / ".train_000002.parquet.partial").write_bytes(b"half")
        write_trajectories(folder / "trajectories", [played(2, 0, 0)], step=2, split="train", turn_reward_coef=1.0)
        add_metrics(folder, 2)
        expect(page.locator(".chip")).to_have_text(["1", "2"])
        expect(page.locator(".live")).to_be_visible()
        assert watched.said == []
        watched.context.close()


@pytest.mark.slice(1, "matrix")
def test_keys(watched: Watched, address: str) -> None:
    page = watched.open(address, "/run/0/step/train/2")
    expect(page.locator("tbody tr")).to_have_count(8)
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("train/2/0/1")
    page.keyboard.press("j")
    expect(page.locator("h1")).to_have_text("train/2/0/2")
    page.keyboard.press("2")
    expect(page.locator(".choices [aria-pressed=true]")).to_have_text("log-prob")
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".inspector")).to_contain_text("position0 of")
    page.keyboard.press("u")
    expect(page.locator("h1")).to_have_text("Step 2")
    page.keyboard.press("]")
    expect(page.locator("h1")).to_have_text("Step 3")
    page.keyboard.press("/")
    page.keyboard.type("length")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_contain_text("next, previous row")


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("width", [360, 768, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_every_width_in_both_themes(
    browser: Browser, run: Path, address: str, width: int, scheme: str
) -> None:
    watched = Watched(browser, width=width, scheme=scheme)
    for place in (
        "/run/0",
        "/run/0/step/train/2",
        "/run/0/trajectory/train_000002/3",
        "/run/0/group/train_000002/0",
        "/run/0/search",
    ):
        page = watched.open(address, place)
        expect(page.locator(".page:not(.waiting) main h1")).to_be_visible()
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, f"{place} is wider than {width}"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 380
        assert light == (scheme == "light")
        if "/step/" in place:
            seen = page.locator("td .reward").first.bounding_box()
            assert seen is not None and seen["x"] + seen["width"] <= width, (
                "a step's rewards are seen without scrolling"
            )
    page.keyboard.press("t")
    other = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert other != ground
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == other, "the choice is kept"
    assert watched.said == []
    watched.context.close()


@pytest.mark.slice(1, "matrix")
def test_a_brush_zooms_every_chart_and_a_click_opens_a_step(watched: Watched, address: str) -> None:
    page = watched.open(address, "/run/0")
    over = page.locator(".chart .u-over").first
    expect(over).to_be_visible()
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.98, box["y"] + 20, steps=4)
    page.mouse.up()
    expect(page.get_by_role("button", name="show all steps")).to_be_visible()
    assert re.search(r"x=1\.\d+%2C2\.9", page.url) or re.search(r"x=1\.\d+,2\.9", page.url)
    page.reload()
    page.get_by_role("button", name="show all steps").click()
    expect(page.get_by_role("button", name="show all steps")).to_have_count(0)
    over = page.locator(".chart .u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + 30)
    expect(page.locator("h1")).to_have_text("Step 2")
