"""Who is let in, what every answer forbids, and that addresses lead to nothing but runs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agentrl.view.__main__ import main, names_of
from agentrl.view.export import SCRIPTS
from agentrl.view.run import open_run
from agentrl.view.server import is_named
from tests.naming import Names, assert_names
from tests.view.served import BEARER, TOKEN, serving


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with serving(run) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, headers=BEARER, timeout=None) as client:
        yield client


@pytest.mark.parametrize("path", ["/api/runs", "/export?m=0/train_000001/0", "/api/run/0", "/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Cookie": f"agentrl_view={TOKEN}"},
        {"Authorization": "Bearer another"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Host": "127.0.0.1/static"},
        {"Host": "127.0.0.1/static/?"},
    ],
)
def test_nobody_without_the_token(address: str, path: str, headers: dict[str, str]) -> None:
    for way in (path, f"{path}{'&' if '?' in path else '?'}token={TOKEN}"):
        answer = httpx.get(f"{address}{way}", headers=headers)
        assert answer.status_code == 403
        assert "made" not in answer.text and "set-cookie" not in answer.headers


def test_the_page_is_the_same_for_everybody(address: str) -> None:
    """A browser that asks for the page sends no header, so nothing of a run is in it."""
    page = httpx.get(f"{address}/")
    assert page.status_code == 200 and page.text == httpx.get(f"{address}/?token={TOKEN}").text
    assert TOKEN not in page.text and "made" not in page.text and "set-cookie" not in page.headers


@pytest.mark.parametrize(
    ("host", "names", "is_one"),
    [
        ("127.0.0.1:8712", [], True),
        ("localhost:9000", [], True),
        ("LOCALHOST", [], True),
        ("[::1]:8712", [], True),
        ("10.1.2.3:8712", [], True),
        ("node17:8712", ["node17", "node17.cluster"], True),
        ("Node17.cluster.:8712", ["node17", "node17.cluster"], True),
        ("evil.example:8712", ["node17"], False),
        ("node17.evil.example", ["node17"], False),
        ("127.0.0.1.evil.example", [], False),
        ("localhost.evil.example", [], False),
        ("127.0.0.1/static/", [], False),
        ("[::1", [], False),
        ("", [], False),
    ],
)
def test_a_host_of_somebody_elses_name_is_refused(host: str, names: list[str], is_one: bool) -> None:
    """A name that leads to this machine would make its owner's page one of the viewer's."""
    assert is_named(host, names) == is_one


def test_who_comes_by_another_name_is_told(client: httpx.Client) -> None:
    for path in ("/", "/api/runs", "/static/app.js"):
        answer = client.get(path, headers={"Host": "evil.example"})
        assert answer.status_code == 403
        assert "Host is 'evil.example': want localhost, an address in numbers" in answer.text
    assert names_of("127.0.0.1") == {"127.0.0.1"} and socket.gethostname() in names_of("0.0.0.0")


def test_every_answer_forbids_scripts_of_others(client: httpx.Client) -> None:
    for path in ("/", "/api/runs", "/static/app.js", "/nothing", "/api/run/9"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    page = client.get("/").text
    assert "<script>" not in page and " on" not in page.replace(" only", "") and "style=" not in page


def test_answers_to_the_pages(client: httpx.Client) -> None:
    assert client.get("/api/runs").json()["runs"][0]["name"] == "made"
    assert client.get("/api/run/0").json()["series"]["reward/mean"] == [0.25, 0.5, 0.75]
    assert len(client.get("/api/run/0/step/train/2").json()["rows"]) == 8
    assert len(client.get("/api/run/0/group/train_000002/1").json()["members"]) == 4
    found = client.get("/api/run/0/search", params={"where": "malformed > 0", "first": 2, "last": 2}).json()
    assert [(row["step"], row["row"]) for row in found["rows"]] == [(2, 3), (2, 7)]
    side = client.get("/api/side", params={"m": ["0/train_000001/0", "0/train_000003/0"]}).json()
    assert len(side["members"]) == 2
    export = client.get("/export", params={"m": "0/train_000001/0", "mask": "prompts"})
    assert export.headers["content-disposition"].startswith("attachment")
    for name in (*(f"{script}.js" for script in SCRIPTS), "style.css", "uplot.js", "uplot.css"):
        assert client.get(f"/static/{name}").status_code == 200


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/api/run/0/search?where=nothing%20>", "SQL"),
        ("/api/side?m=nothing", "trajectory"),
        ("/api/run/7", "run 7"),
        ("/api/run/0/trajectory/nothing/0", "no file"),
        ("/export?m=0/train_000001/0&mask=nothing", "mask=nothing"),
    ],
)
def test_errors_are_said_in_words(client: httpx.Client, path: str, says: Names) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert_names(answer.json()["error"], says)


HUGE = ("-5", "99999999999999999999", "9" * 5000)
NUMBERED = (
    "/api/run/{}",
    "/api/run/{}/step/train/1",
    "/api/run/0/step/train/{}",
    "/api/run/0/trajectory/train_000001/{}",
    "/api/run/0/prompt/train_000001/{}",
    "/api/run/0/group/train_000001/{}",
    "/api/run/0/search?first={}",
    "/api/run/0/search?last={}",
    "/api/side?m=0/train_000001/0&window={}",
)


@pytest.mark.parametrize("path", NUMBERED)
@pytest.mark.parametrize("number", HUGE)
def test_numbers_that_name_nothing_are_refused_in_words(client: httpx.Client, path: str, number: str) -> None:
    answer = client.get(path.format(number))
    assert answer.status_code == 422 and f"={number!r:.80}: " in answer.json()["error"]
    assert len(answer.content) < 300


@pytest.mark.parametrize("number", HUGE)
def test_places_of_large_numbers_are_refused_in_words(client: httpx.Client, number: str) -> None:
    for path in (f"/api/side?m=0/train_000001/{number}", f"/export?m={number}/train_000001/0"):
        answer = client.get(path)
        assert_names(answer.json()["error"], "trajectory")
        assert answer.status_code == 404
        assert len(answer.content) < 400


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ('{"place": "0/train_000001/0", "turn": 99999999999999999999}', 422, "turn=99999999999999999999"),
        ('{"place": "0/train_000001/0", "turn": -5}', 422, "turn=-5"),
        ('{"place": "0/train_000001/0", "turn": 1, "call": -1}', 422, "call=-1"),
        ('{"place": "0/train_000001/0", "turn": Infinity}', 422, "turn=inf"),
        ('{"place": "0/train_000001/0", "turn": 3}', 404, ("turn=3", "3 turns")),
        ('{"place": "0/train_000001/99999999999999999999"}', 404, "trajectory"),
        ('{"place": 5}', 422, "place=5"),
    ],
)
def test_a_replay_of_no_turn_is_refused(run: Path, body: str, status: int, says: Names) -> None:
    with serving(run, replay=True) as address:
        answer = httpx.post(
            f"{address}/api/replay", headers={**BEARER, "Content-Type": "application/json"}, content=body
        )
        assert_names(answer.json()["error"], says)
        assert answer.status_code == status
        assert httpx.get(f"{address}/api/replay/0", headers=BEARER).status_code == 404, "nothing was started"


def test_a_config_of_odd_numbers_is_shown(tmp_path: Path) -> None:
    text = ("large: 99999999999999999999\nsmall: 7\n", f"beyond: {'9' * 5000}\n")
    for name, one in zip(("large", "beyond"), text, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(one)
    with serving(tmp_path / "large", tmp_path / "beyond") as address:
        large, beyond = (httpx.get(f"{address}/api/run/{number}", headers=BEARER).json() for number in (0, 1))
    assert large["config"] == {"large": "99999999999999999999", "small": 7} and beyond["config"] == {}


def test_few_bytes_of_a_config_cannot_stand_for_many(tmp_path: Path) -> None:
    lists = [f"b{place}: &a{place} [{', '.join([f'*a{place - 1}'] * 9)}]" for place in range(1, 16)]
    (tmp_path / "config.yaml").write_text("\n".join(["a: &a0 [1, x]", *lists, "d: [{k: 2020-01-01}]"]))
    assert open_run(str(tmp_path)).config == {}
    (tmp_path / "config.yaml").write_text("\n".join(["a: &a0 [1, x]", *lists[:3], "d: [{k: 2020-01-01}]"]))
    config = open_run(str(tmp_path)).config
    assert (config["a"], config["d"]) == ('[1, "x"]', '[{"k": "2020-01-01"}]')
    assert len(str(config["b3"])) <= 500


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e%2fserver.py",
        "/static/..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/static/vendor/uplot.js",
        "/api/run/0/trajectory/..%2f..%2fetc%2fpasswd/0",
        "/api/run/0/trajectory/%2fetc%2fpasswd/0",
        "/api/run/0/step/..%2f/1",
        "/api/side?m=0/../../etc/passwd/0",
        "/export?m=0/..%2f..%2fconfig.yaml/0",
    ],
)
def test_addresses_are_no_paths(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text and "import" not in answer.text


def test_a_port_in_use_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([str(run), "--port", str(taken.getsockname()[1])]) == 2
    assert "is in use" in capsys.readouterr().err


def test_an_export_from_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "one.html"
    assert (
        main([str(run), "--export", str(out), "--where", "malformed > 0", "--steps", "2,3", "--mask", "prompts"]) == 0
    )
    assert "4 trajectories" in capsys.readouterr().out and out.stat().st_size > 10_000
    assert main([str(run), "--export", str(out), "--where", "reward > 9"]) == 2
    assert_names(capsys.readouterr().err, "no trajectory", "run 0")
    assert main([str(run), "--export", str(out), "--leave-out", "nothing"]) == 2
    assert main([str(tmp_path / "nothing")]) == 2
    assert_names(capsys.readouterr().err, "no such folder")
