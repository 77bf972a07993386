"""What is said of a URL that no request can be sent to, wherever it stands."""

from __future__ import annotations

import socket

import pytest

from agentrl.remote import checked_url, how_to_start
from tests.naming import naming


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8080",
        "ftp://h/",
        "http://",
        "http://h:808000",
        "http://h:0",
        "http://h:port",
        "http://a..b",
        "http://no such host/",
        "http://[::1",
        "http://h\\x/",
    ],
)
def test_what_cannot_be_asked_is_told_with_the_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected http://HOST:PORT, found '") as raised:
        checked_url(url)
    assert repr(url) in str(raised.value)


@pytest.mark.parametrize("url", ["http://me:hunter2@h/", "https://hunter2@h", "http://me:hunter2@h:port/"])
def test_credentials_are_refused_and_not_repeated(url: str) -> None:
    with naming(ValueError, "URL") as raised:
        checked_url(url)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["http://h", "https://h:1/a@b?q=x", "http://[::1]:80/", "http://sand_box:80", "http://bücher.de/"]
)
def test_others_are_taken(url: str) -> None:
    assert checked_url(url).hostname


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_server_that_is_missing_on_loopback_is_missing_on_this_machine(host: str) -> None:
    said = how_to_start("serve", f"http://{host}:81/run_code")
    here = f"start one on this machine, {socket.gethostname()}: `serve --port 81`"
    assert said == f"{here}, or give the address of one on another machine"


@pytest.mark.parametrize(("host", "option"), [("10.0.0.3", "10.0.0.3"), ("tools", "tools"), ("[fd00::3]", "fd00::3")])
def test_a_server_elsewhere_is_to_listen_where_it_is_asked(host: str, option: str) -> None:
    assert how_to_start("serve", f"http://{host}") == f"start one there: `serve --host {option} --port 80`"
