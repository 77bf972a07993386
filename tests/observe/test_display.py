from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.color import Color
from rich.console import Console

from agentrl.observe import terminal
from agentrl.observe.display import STEP_COLUMNS, Column, Display, duration, score_columns, stage_seconds
from agentrl.observe.excerpt import Reading
from agentrl.observe.plain import PlainDisplay
from agentrl.observe.terminal import RichDisplay, sparkline
from tests.trajectory.written import Writer, decode, tool_trajectory

METRICS = {
    "reward/mean": 0.512,
    "success/rate": 0.48,
    "response/sampled_mean": 43.0,
    "turns/mean": 2.4,
    "tool/calls_mean": 1.3,
    "tool/malformed_rate": 0.03,
    "actor/kl_loss": 0.0012,
    "actor/entropy": 0.61,
    "actor/grad_norm": 0.8,
    "time/step": 1.9,
    "time/rollout": 1.0,
    "time/update_actor": 0.6,
    "perf/tokens_per_second": 12034.0,
}
EVIL = "\x1b[2J\x1b]0;owned\x07 [bold red]x[/bold red] \u202e :smile:"


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[PlainDisplay, io.StringIO, Clock]:
    output, clock = io.StringIO(), Clock()
    return PlainDisplay("run", output, clock), output, clock


def lines(output: io.StringIO) -> list[str]:
    """What was written, without the times of day."""
    found = output.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d |  ", line) for line in found)
    return [line[9:] for line in found]


def test_plain_progress_at_most_every_five_seconds_and_at_the_end() -> None:
    display, output, clock = plain()
    with display.stage("warm-up", total=100) as stage:
        for _ in range(100):
            clock.now += 0.125
            stage.advance(1, loss=0.5)
    assert lines(output) == [
        "warm-up: begins, 100 to do",
        "warm-up: 40/100  5.0 s  7.5 s left  loss 0.5",
        "warm-up: 80/100  10.0 s  2.5 s left  loss 0.5",
        "warm-up: done  100/100  12.5 s  loss 0.5",
    ]


def test_plain_inner_stages_are_told_only_when_they_are_long() -> None:
    display, output, clock = plain()
    with display.stage("train", total=2) as train:
        for seconds in (1.0, 6.0):
            with display.stage("rollout") as rollout:
                clock.now += seconds
                rollout.advance(3)
            train.advance()
    told = [line for line in lines(output) if line.startswith("rollout")]
    assert told == ["rollout: 3  6.0 s", "rollout: done  3  6.0 s"]


def test_plain_an_error_inside_a_stage_is_a_stop() -> None:
    display, output, clock = plain()
    with pytest.raises(KeyboardInterrupt), display.stage("train", total=9) as stage, display.stage("rollout"):
        stage.advance(2)
        clock.now += 2
        raise KeyboardInterrupt
    assert lines(output)[-2:] == ["rollout: stopped  2.0 s", "train: stopped  2/9  2.0 s"]
    assert display.stages == []


def test_a_resumed_stage_estimates_by_its_own_speed() -> None:
    display, _, clock = plain()
    with display.stage("train", total=100, done=90) as stage:
        assert stage.remaining is None
        clock.now += 10
        stage.advance(5)
        assert stage.remaining == pytest.approx(10.0)


def test_plain_step_and_validation_lines() -> None:
    display, output, _ = plain()
    display.step(3, 60, METRICS)
    display.validation(3, {"val/success_sampled": 0.41, "val/gsm8k/pass@2": 0.5, "time/validation": 2.0})
    assert lines(output) == [
        "step 3/60: reward=0.512 success=48% tokens=43 turns=2.4 calls=1.3 bad_calls=3% KL=0.0012 entropy=0.610 "
        "grad=0.80 s/step=1.9 tok/s=12034 rollout=1.00s update_actor=0.60s",
        "validation at step 3: success_sampled=0.41 gsm8k/pass@2=0.5",
    ]


def test_plain_trajectory_names_who_wrote_each_line() -> None:
    display, output, _ = plain()
    display.reading = Reading(decode)
    display.trajectory(tool_trajectory(), "train, step 1")
    assert output.getvalue().splitlines()[1:] == [
        "      prompt | What is 17*3?",
        '        call | <tool_call>{"name": "calculator"}</tool_call>',
        "        tool | 51",
        "      policy | It is 51.",
    ]


def test_a_long_trajectory_is_cut() -> None:
    writer = Writer("p\n" * 1000)
    for _ in range(200):
        writer.says("a\n" * 100).hears("b")
    for display, output in (plain()[:2], rich(100, 30)):
        display.reading = Reading(decode)
        display.trajectory(writer.ends(0.0), "long")
        assert len(output.getvalue().splitlines()) < 400
        assert "pieces not shown" in output.getvalue()
        assert "lines not shown" in output.getvalue()


def test_a_trajectory_needs_its_reading() -> None:
    for display in (plain()[0], rich(80, 24)[0]):
        with pytest.raises(ValueError, match=r"set display\.reading first"):
            display.trajectory(tool_trajectory(), "t")


def test_a_stream_without_unicode_does_not_end_the_run() -> None:
    raw = io.BytesIO()
    display = PlainDisplay("naïve", io.TextIOWrapper(raw, encoding="ascii"))
    display.note("1 · 2 → 3")
    assert b"1 ? 2 ? 3" in raw.getvalue()


def test_nothing_reaches_a_log_raw() -> None:
    display, output, _ = plain()
    use_everything(display)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", output.getvalue())
    assert "[bold red]x[/bold red]" in output.getvalue()


def use_everything(display: Display) -> None:
    """Every method, with text that would take over a terminal."""
    display.reading = Reading(decode)
    with display, display.stage(EVIL, total=2) as stage:
        stage.advance(1, **{EVIL: 0.5})
        display.note(EVIL)
        display.warn(EVIL)
        display.error(EVIL)
        display.step(1, 2, METRICS | {f"time/{EVIL}": 1.0})
        display.validation(1, {"val/success_greedy": 0.5})
        trajectory = Writer(EVIL, source=EVIL).says(EVIL).hears(EVIL).ends(1.0)
        display.trajectory(trajectory, EVIL)


def test_no_terminal_means_plain_lines() -> None:
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            "from agentrl.observe.open import open_display; print(type(open_display('x')).__name__)",
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"FORCE_COLOR": "1"},
    )
    assert made.stdout.strip() == "PlainDisplay"


@pytest.mark.parametrize(
    ("term", "encoding", "kind"),
    [("xterm", "utf-8", "RichDisplay"), ("dumb", "utf-8", "PlainDisplay"), ("xterm", "ascii", "PlainDisplay")],
)
def test_the_display_fits_the_terminal(term: str, encoding: str, kind: str) -> None:
    code = "from agentrl.observe.open import open_display; print(type(open_display('x')).__name__)"
    process, master = in_terminal(code, TERM=term, PYTHONIOENCODING=encoding)
    assert kind in read_all(master)
    assert process.wait() == 0


# The live display


def rich(width: int, height: int) -> tuple[RichDisplay, io.StringIO]:
    output = io.StringIO()
    console = Console(
        file=output,
        force_terminal=True,
        color_system="truecolor",
        width=width,
        height=height,
        markup=False,
        emoji=False,
    )
    return RichDisplay("agentrl · run", console, Clock()), output


def frame(display: RichDisplay) -> list[str]:
    """The frame as lines of text."""
    rendered = display.console.render_lines(display._frame(), pad=False)
    return ["".join(segment.text for segment in line) for line in rendered]


def fill(display: RichDisplay, steps: int = 30) -> None:
    for step in range(1, steps + 1):
        display.step(step, 60, METRICS | {"reward/mean": step / 30})
    display.validation(0, {"val/success_sampled": 0.41, "val/success_greedy": 0.385})
    display.validation(30, {"val/success_sampled": 0.95, "val/success_greedy": 0.975})


@pytest.mark.parametrize(("width", "height"), [(20, 14), (40, 16), (60, 16), (80, 24), (120, 40), (300, 80)])
def test_the_frame_fits_terminals_of_any_size(width: int, height: int) -> None:
    display, _ = rich(width, height)
    fill(display)
    with display.stage("train", total=60, done=30), display.stage("validate (sampled)", total=128):
        shown = frame(display)
    assert len(shown) <= height
    assert all(len(line) <= width for line in shown)
    assert any(re.match(r" *30 ", line) for line in shown), shown


def test_a_terminal_too_small_for_the_frame_is_no_error() -> None:
    display, output = rich(10, 4)
    with display, display.stage("train", total=60):
        fill(display)
        display._live.refresh()
    assert output.getvalue()


def test_the_frame_shows_the_last_steps_the_curve_and_the_validations() -> None:
    display, _ = rich(120, 40)
    fill(display)
    text = "\n".join(frame(display))
    assert [line.split()[:2] for line in frame(display) if re.match(r" +\d+ +[\d.]+ ", line)] == [
        [str(step), f"{step / 30:.3f}"] for step in range(26, 31)
    ]
    assert "reward  0.03 ▁▁" in text
    assert "█ 1.00" in text
    assert "rollout 1.0 s  update_actor 0.6 s" in text
    assert "sampled 41.0% → 95.0%   greedy 38.5% → 97.5%   at step 30" in text
    assert "step 30 of 60" in text


def test_validations_with_and_without_success_rates() -> None:
    display, output = rich(120, 40)
    display.validation(3, {"val/success_greedy": 0.5, "val/gsm8k/pass@2": 0.75})
    display.validation(4, {"val/loss": 0.1234567, "sft/loss": 9.0})
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", output.getvalue())
    assert text == "✓ validation at step 3   success greedy 50.0%\n✓ validation at step 4   loss 0.1235\n"


def test_graded_scores_are_shown_beside_success() -> None:
    display, output = rich(120, 40)
    display.validation(0, {"val/success_sampled": 0.0, "val/score_sampled": 0.25, "val/score_greedy": 0.3})
    display.validation(3, {"val/success_sampled": 0.0, "val/score_sampled": 0.5, "val/score_greedy": 0.4})
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", output.getvalue())
    assert "success sampled 0.0%   score sampled 0.500   score greedy 0.400" in text
    display.step(3, 3, METRICS)
    assert "sampled 0.0% → 0.0%   score sampled 0.250 → 0.500" in "\n".join(frame(display))
    binary = {"val/success_sampled": 0.5, "val/score_sampled": 0.5}
    assert score_columns(binary) == ()


def test_a_narrow_table_keeps_the_most_important_columns() -> None:
    display, _ = rich(50, 24)
    fill(display)
    header = next(line for line in frame(display) if line.startswith("step"))
    assert header.split() == ["step", "reward", "success", "tokens", "turns", "s/step"]


def test_numbers_that_are_not_finite_do_not_stop_the_display() -> None:
    display, _ = rich(120, 24)
    for value in (0.5, float("nan"), float("inf"), 0.7):
        display.step(1, 2, METRICS | {"reward/mean": value, "actor/entropy": value})
    assert "0.50 ▁█ 0.70" in "\n".join(frame(display))


def test_nothing_reaches_a_terminal_raw() -> None:
    display, output = rich(100, 30)
    use_everything(display)
    escapes = set(re.findall(r"\x1b(?:\[[?\d;]*[A-Za-z]|.)", output.getvalue()))
    # Colours, cursor moves and line erasing are rich's own; clearing the screen or setting its title is not.
    assert {escape[-1] for escape in escapes} <= set("mAKhlG"), escapes
    assert not re.search(r"[\x00-\x09\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u202e]", output.getvalue())
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", output.getvalue())
    assert "␛[2J␛]0;owned␇ [bold red]x[/bold red] \\u202e :smile:" in text


def test_the_pieces_of_a_trajectory_have_their_colours() -> None:
    display, output = rich(100, 30)
    display.reading = Reading(decode)
    display.trajectory(tool_trajectory(), "t")
    for kind, text in [("prompt", "What is"), ("call", "<tool_call>"), ("tool", "51"), ("policy", "It is 51")]:
        red, green, blue = Color.parse(terminal.PIECE_COLOURS[kind]).get_truecolor()  # type: ignore[index]
        assert re.search(rf"\x1b\[38;2;{red};{green};{blue}m[^\x1b]*{re.escape(text)}", output.getvalue()), kind
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", output.getvalue())
    assert "trained on: ■ policy  ■ tool call  only read: ■ tool answer  ■ user  ■ prompt" in text
    assert len({terminal.PIECE_COLOURS[kind] for kind in ("prompt", "policy", "call", "tool", "user")}) == 5


def contrast(colour: str, background: float) -> float:
    """WCAG 2 contrast ratio against a background of that relative luminance."""

    def linear(value: int) -> float:
        share = value / 255
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(value) for value in Color.parse(colour).get_truecolor())
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    low, high = sorted((luminance, background))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", sorted(set(terminal.PIECE_COLOURS.values()) | set(terminal.STAGE_COLOURS)))
def test_colours_are_legible_on_black_and_on_white(colour: str) -> None:
    assert contrast(colour, 0.0) >= 4
    assert contrast(colour, 1.0) >= 4


def test_threads_may_advance_a_stage() -> None:
    display, _ = rich(80, 24)

    def work() -> None:
        for _ in range(1000):
            stage.advance(1, loss=0.5)

    with display, display.stage("rollout", total=8000) as stage:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert stage.completed == 8000


def test_the_svg_shows_what_was_printed_and_loads_nothing(tmp_path: Path) -> None:
    display, _ = rich(100, 30)
    use_everything(display)

    def words(name: str, **options: int) -> str:
        display.save_svg(tmp_path / name, **options)
        root = ElementTree.fromstring((tmp_path / name).read_text())
        return "".join(root.itertext()).replace("\u00a0", " ")

    everything, last = words("terminal.svg"), words("last.svg", printed=1)
    for text in ("validation at step 1", "■ tool answer", "0.512"):
        assert text in everything
    assert "validation at step 1" not in last
    assert "0.512" in last
    picture = (tmp_path / "terminal.svg").read_text()
    assert set(re.findall(r"https?://[\w.]+", picture)) == {"http://www.w3.org", "https://www.textualize.io"}


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([], 10, ""),
        ([0.3], 10, "▄"),
        ([1.0, 1.0], 10, "▄▄"),
        ([0.0, 0.5, 1.0], 10, "▁▅█"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([-1.0, 0.0, -1.0], 10, "▁█▁"),
    ],
)
def test_sparkline(values: list[float], width: int, curve: str) -> None:
    assert sparkline(values, width) == curve


def test_duration() -> None:
    assert [duration(seconds) for seconds in (0.04, 59.94, 67, 3599, 7389)] == [
        "0.0 s",
        "59.9 s",
        "1:07",
        "59:59",
        "2:03:09",
    ]


def test_stage_seconds_leave_out_the_total() -> None:
    assert stage_seconds({"time/step": 3.0, "time/rollout": 2.0, "time/values": 0.0, "reward/mean": 1.0}) == {
        "rollout": 2.0
    }


def test_a_column_shows_its_first_key() -> None:
    column = Column("KL", ("a", "b"), ".2f", 1)
    assert column.text({"b": 2.0}) == "2.00"
    assert column.text({"a": 1.0, "b": 2.0}) == "1.00"
    assert column.text({}) is None
    assert len({column.importance for column in STEP_COLUMNS}) == len(STEP_COLUMNS)


# In a real pseudo-terminal


def in_terminal(code: str, **environment: str) -> tuple[subprocess.Popen[bytes], int]:
    """Run Python code in a terminal of 80x24; returns the process and the terminal's other end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | environment,
        start_new_session=True,
        # A shell's background jobs ignore Ctrl-C, and so would their children: the tests may run in one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(slave)
    return process, master


def read_all(master: int) -> str:
    """Everything until the process has closed its end."""
    content = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:  # Linux reports the closed end so
            block = b""
        if not block:
            os.close(master)
            return content.decode("utf-8", "replace")
        content += block


LIVE = """
import sys, time
from agentrl.observe.open import open_display

with open_display("run") as display, display.stage("train", total=100) as stage:
    for step in range(100):
        time.sleep(0.02)
        stage.advance(1)
        print("somebody prints", step)
        if step == 5:
            FAULT
"""


@pytest.mark.parametrize(
    ("fault", "ending"), [("raise RuntimeError('broken')", "RuntimeError: broken"), ("pass", "100/100")]
)
def test_the_terminal_is_restored_and_prints_of_others_survive(fault: str, ending: str) -> None:
    process, master = in_terminal(LIVE.replace("FAULT", fault))
    output = read_all(master)
    assert process.wait() == (1 if "raise" in fault else 0)
    assert ending in output
    assert "somebody prints 5" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is shown again


def test_control_c_restores_the_terminal() -> None:
    process, master = in_terminal(LIVE.replace("FAULT", "time.sleep(60)"))
    seen = b""
    while b"prints 5" not in seen:
        seen += os.read(master, 65536)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output = read_all(master)
    assert process.wait() != 0
    assert "KeyboardInterrupt" in output
    assert "train" in output
    assert output.rindex("\x1b[?25h") > output.rfind("\x1b[?25l")


def test_a_resize_while_it_runs_is_no_error() -> None:
    process, master = in_terminal(LIVE.replace("FAULT", "pass"))
    for columns, rows in [(40, 10), (5, 3), (200, 60), (80, 24)]:
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        process.send_signal(signal.SIGWINCH)
        time.sleep(0.3)
    assert "100/100" in read_all(master)
    assert process.wait() == 0
