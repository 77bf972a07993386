"""Secrets in what servers say, however they echo them."""

from __future__ import annotations

import json
from urllib.parse import quote, quote_plus

import pytest

from agentrl.remote.credentials import Secrets, passed_secrets

TOKEN = "Ab/cd EFGH+12345=="


@pytest.mark.parametrize(
    "echoed",
    [TOKEN, quote(TOKEN, safe=""), quote_plus(TOKEN), json.dumps(TOKEN), json.dumps(TOKEN).replace("/", "\\/")],
)
def test_each_form_of_a_secret_is_hidden(echoed: str) -> None:
    assert Secrets([TOKEN]).hide(f"you sent {echoed}").replace('"', "") == "you sent [secret]"


def test_a_secret_that_begins_with_another_is_hidden_whole() -> None:
    assert Secrets(["a-secret", "a-secret-and-more", "a-secret-and"]).hide("a-secret-and-more") == "[secret]"


def test_a_dummy_key_changes_no_other_word() -> None:
    assert Secrets(["test", "1", "EMPTY"]).hide("the latest test: 10 EMPTY") == "the latest test: 10 EMPTY"


def test_a_value_that_is_too_long_for_a_path_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONG_TOKEN", token := "eyJ" + "x" * 400)
    monkeypatch.setenv("A_FOLDER", "/usr/share")
    assert passed_secrets(["LONG_TOKEN", "A_FOLDER"]).hide(f"/usr/share {token}") == "/usr/share [secret]"
