"""Proxies that the environment names: not for our own addresses, and not for our own clients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import httpx
import pytest

from agentrl.config import Config
from agentrl.engines.sglang import process
from agentrl.errors import ConfigError
from agentrl.rollouts.context import load_context
from agentrl.system.proxies import named_proxies, proxy_note, proxy_url, shown, spare_own_addresses
from tests.conftest import PROJECT
from tests.naming import assert_names, naming

OWN = "127.0.0.1,localhost,::1"
SECRET = "http://me:pass@proxy.site:3128"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, OWN),
        ({"NO_PROXY": "a.site, localhost"}, "a.site,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "upper", "no_proxy": "lower"}, f"lower,{OWN}"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_own_addresses_are_excepted_in_both_spellings(before: dict[str, str], after: str) -> None:
    environment = {**before, "http_proxy": SECRET}
    spare_own_addresses(environment)
    assert environment == {"http_proxy": SECRET, "NO_PROXY": after, "no_proxy": after}


def test_what_messages_name_holds_no_credentials() -> None:
    environment = {"HTTPS_PROXY": SECRET, "https_proxy": SECRET, "http_proxy": "", "ALL_PROXY": "socks5://x"}
    named = "all_proxy=socks5://x, https_proxy=http://proxy.site:3128"
    assert named_proxies(environment) == named
    assert_names(proxy_note("APIConnectionError: Connection error.", environment), named)
    assert proxy_note("KeyError: 'x'", environment) == proxy_note("Connection error", {}) == ""
    assert shown(SECRET) == "http://proxy.site:3128"


def test_a_proxy_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", SECRET)
    monkeypatch.setenv("OTHER", "proxy.site:3128")
    monkeypatch.delenv("NONE", raising=False)
    assert proxy_url("HTTPS_PROXY", "tool x") == SECRET
    assert proxy_url("http://10.0.0.1:80", "tool x") == "http://10.0.0.1:80"
    expected = "^tool x: proxy: expected http://HOST:PORT, or the name of an environment variable that holds it, found "
    for value, found in (
        ("OTHER", "the variable OTHER with no such URL$"),
        ("NONE", "the variable NONE with no such URL$"),
        ("socks5://h:1", "'socks5://h:1'$"),
        ("http://proxy.site", "'http://proxy.site'$"),
        ("http://h:port", "'http://h:port'$"),
    ):
        with pytest.raises(ConfigError, match=expected + found):
            proxy_url(value, "tool x")
    with naming(ConfigError, "credentials") as refused:
        proxy_url(SECRET, "tool x")
    assert "pass" not in str(refused.value)


def test_code_of_users_and_servers_of_ours_reach_our_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "a.site")  # so that it is as it was behind the test
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    load_context(Config())
    server = process.environment("cpu")
    assert server["NO_PROXY"] == server["no_proxy"] == f"a.site,{OWN}"
    assert server["http_proxy"] == "http://127.0.0.1:9"
    with httpx.Client() as client:  # a user's
        transports = [client._transport_for_url(httpx.URL(f"http://{host}:1/")) for host in ("127.0.0.1", "b.site")]
    assert transports[0] is client._transport and transports[1] is not client._transport


CLIENTS = {"ClientSession", "AsyncClient", "Client", "Session", "urlopen"}


def clients_made() -> Iterator[tuple[str, str, set[str | None]]]:
    """File, library and keywords of each client of HTTP that our own code makes."""
    for folder in ("agentrl", "tools", "interactions", "sandbox"):
        for file in (PROJECT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLIENTS:
                    library = ast.unparse(node.func.value)
                    yield str(file.relative_to(PROJECT)), library, {keyword.arg for keyword in node.keywords}


def test_no_client_of_ours_asks_by_the_environments_proxies() -> None:
    """aiohttp does so where it is told to, httpx unless it is told not to or is given a transport."""
    found = [(file, library, keywords) for file, library, keywords in clients_made() if "http" in library]
    assert {file for file, _, _ in found} == {
        "agentrl/system/http.py",
        "agentrl/engines/servers/process.py",
        "agentrl/environments/adapters/verifiers_v1.py",
        "tools/mcp/http.py",
    }
    for file, library, keywords in found:
        assert ("trust_env" not in keywords) if library == "aiohttp" else keywords & {"trust_env", "transport"}, file
