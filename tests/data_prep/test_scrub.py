"""Secrets are in nothing that is written or printed, wherever a log holds them, and what is no secret stays."""

from __future__ import annotations

import contextlib
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import DataError
from data_prep.traces.__main__ import main
from data_prep.traces.scrub import DEFAULT, Rules, Scrubber, read_rules
from tests.data_prep.test_trace_forms import FORMS, SPANS
from tests.data_prep.test_trace_sessions import call
from tests.data_prep.test_traces import write_lines, written
from tests.naming import Names, assert_names

KEY = "sk-proj-Abc123def456GHI789jkl"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA7bq\nb64/+lines==\n-----END RSA PRIVATE KEY-----"
TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVPmB92K27uhbUJU1p1r_wW"
FOUND = {
    "write to ann.lee+x@mail.example.com.": "write to [EMAIL_1].",
    f"key {KEY}, again {KEY}": "key [API_KEY_1], again [API_KEY_1]",
    "AKIAIOSFODNN7EXAMPLE and ghp_0123456789abcdefghijABCDEFGHIJ": "[API_KEY_1] and [API_KEY_2]",
    "xoxb-1234567890-abcdefghij": "[API_KEY_1]",
    f"see {PEM} there": "see [PRIVATE_KEY_1] there",
    f"token {TOKEN}": "token [TOKEN_1]",
    "Authorization: Bearer abcdef0123456789": "Authorization: Bearer [TOKEN_1]",
    "password=hunter22 ok": "password=[PASSWORD_1] ok",
    "DB_PASSWORD: s3cr3t!x": "DB_PASSWORD: [PASSWORD_1]",
    "postgres://bob:pa55@db:5432/x": "postgres://bob:[PASSWORD_1]@db:5432/x",
    "card 4111 1111 1111 1111.": "card [CARD_1].",
    "card 5555-5555-5555-4444": "card [CARD_1]",
    "DE89 3704 0044 0532 0130 00": "[IBAN_1]",
    "call +49 170 1234567 or (555) 123-4567": "call [PHONE_1] or [PHONE_2]",
    "ssn 123-45-6789": "ssn [SSN_1]",
}
STAYS = (
    "The secret: practice. Password: required. A basic understanding of responsibilities, a bearer of news.",
    "time 1700000000000, id 4111111111111112, version 1.2.3.4, 2026-05-01 12:00:00, 3.14159265358979",
    "max_tokens=4096 token: foo @ me @home a@b task-1234 sk-learn risk-averse-people-of-the-world",
    "uuid 123e4567-e89b-12d3-a456-426614174000 sha 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    '{"password": {"type": "string"}, "required": ["password"]}',
    "https://example.com/a?b=c:d and C:\\new\\table",
)


@pytest.mark.parametrize("text", FOUND)
def test_the_rules_find(text: str) -> None:
    assert Scrubber().text(text) == FOUND[text]


@pytest.mark.parametrize("text", STAYS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Scrubber().text(text) == text


SECRETS = (
    *(KEY, "AKIAABCDEFGHIJKLMNOP", "github_pat_11ABCDEFG0abcdefghijkl_mn", "AIzaSyA-1234567890abcdefghijklmnopqrstu"),
    *(TOKEN, "john.doe@example.co.uk", "4111111111111111", "GB82WEST12345698765432", "123-45-6789", "+49 170 1234567"),
    PEM,
)
CARRIERS = (
    *("%", "is %.", '"%"', "<%>", "(%)", "`%`", "export K=%\n", "https://h/x?k=%&y=1", "k:%,", "\n%\r"),
    *("ü %", "x%3D%%", "[%]", "%;", "a\t%"),
)


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_found_in_what_carries_them(secret: str) -> None:
    """Alone, in prose and code, and as JSON in JSON in prose."""
    core = secret.splitlines()[secret.count("\n") // 2]
    for carrier in CARRIERS:
        held = carrier.replace("%%", "%").replace("%", secret, 1) if "%%" not in carrier else f"x%3D{secret}"
        quoted = json.dumps({"a": held})
        for text in (
            held,
            quoted,
            f"It said {quoted}, and {json.dumps({'b': quoted})}.",
            json.dumps([json.dumps(quoted)]),
        ):
            found = Scrubber().text(text)
            assert core not in found, (carrier, found)
            if text.startswith(("{", "[")) and text.endswith(("}", "]")) and text is not held:
                json.loads(found)


def test_marks_are_the_same_in_a_session_and_begin_again_in_the_next() -> None:
    scrubber = Scrubber()
    assert scrubber.text("x@a.de y@a.de x@a.de") == "[EMAIL_1] [EMAIL_2] [EMAIL_1]"
    assert scrubber.json({"y@a.de": ["x@a.de", 4111111111111111, 1.5, True]}) == {
        "[EMAIL_2]": ["[EMAIL_1]", "[CARD_1]", 1.5, True]
    }
    scrubber.begin()
    assert scrubber.text("y@a.de") == "[EMAIL_1]" and scrubber.taken["email"].count == 6


NAMING = {
    "my password is hunter22!": "hunter22!",
    '{"password": "pa\\"ss/w1"}': 'pa"ss/w1',
    '{"api_keys": [48213377]}': "48213377",
    "Authorization: Bearer abcdefghijklmnopqrstuvwxyz": "abcdefghijklmnopqrstuvwxyz",
    "https://bob:p@ssw0rd77@host": "p@ssw0rd77",
    "DB_PASSWORD=Größe-1234 x": "Größe-1234",
}
SAYING = ("I logged in with %", "% works", "(%)", "is it %?", "x=%&y", "\n%\n", "`%`", "a:%@b", "before % and %")


@pytest.mark.parametrize("naming", NAMING)
def test_a_secret_that_a_text_names_is_one_in_all_texts_of_its_session(naming: str) -> None:
    secret = NAMING[naming]
    said = [one.replace("%", secret) for one in SAYING]
    texts = [*said, naming, *(json.dumps({"a": one}) for one in said), *(f"so {json.dumps([one])}!" for one in said)]
    texts += [
        json.dumps({"a": json.dumps([secret])}),
        json.dumps({"n": [int(secret)]}) if secret.isdecimal() else "none",
    ]
    scrubber = Scrubber()
    for one in texts:
        assert naming == one or scrubber.text(one) == one, "no text but the one that names it has a form"
    for _ in range(2):
        scrubber.begin(texts)
        found = [scrubber.text(one) for one in texts]
        for one in found:
            assert secret not in one and json.dumps(secret)[1:-1] not in one, found
            assert one == "none" or "_1]" in one
        assert "_2]" not in str(found)
    scrubber.begin()
    assert [scrubber.text(one) for one in said] == said, "another session does not know it"


@pytest.mark.parametrize(
    ("naming", "other"),
    [
        ("password=swordfish", "a swordfish swims"),
        ("password: test1", "see test1"),
        ("password=self.password", "self.password = x"),
        ('{"password": "must have 8 characters"}', "it must have 8 characters"),
        ("password: 2024-01-01", "on 2024-01-01"),
        ("password=hunter22", "shunter22 hunter223 HUNTER22"),
        ("password=my_password_1", "my_password_1 = 3"),
    ],
)
def test_a_named_secret_takes_no_words_apart(naming: str, other: str) -> None:
    scrubber = Scrubber()
    scrubber.begin([naming, other])
    assert scrubber.text(naming) != naming and scrubber.text(other) == other


def test_a_session_of_a_log_has_none_of_its_named_secrets(tmp_path: Path) -> None:
    """Also where it is said before it is named, in another branch, or in a comment."""
    asked = ("try hunter22! on card 4111 1111 1111 1111 12/27", "with hunter22!", "yes, my password is hunter22!")
    records = [
        call(*asked, "I took hunter22!", session="a", feedback={"value": 1, "comment": "hunter22 is mine"}),
        call(asked[0], "hunter22! fails", session="a"),
        call(asked[0], "what is hunter22!?", session="b"),
    ]
    out = tmp_path / "out"
    assert main(["--source", str(write_lines(tmp_path / "log.jsonl", records)), "--out", str(out)]) == 0
    rows = {row["messages"][-1]["content"]: json.dumps(row) for row in written(out)}
    assert set(rows) == {"I took [PASSWORD_1]", "[PASSWORD_1] fails", "what is hunter22!?"}
    assert not any("4111" in row or ("hunter22" in row and "what is" not in row) for row in rows.values())


def test_a_pattern_is_found_in_a_text_with_every_character() -> None:
    text = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    assert Scrubber(Rules(patterns=(("x", "EMP-[0-9]+"),))).text(f"{text} EMP-12{text}") == f"{text} [X_1]{text}"


def test_json_in_texts_stays_json() -> None:
    """Also inside prose, where the text before a secret is an escape."""
    inner = json.dumps({"to": "a\nx@a.de", "n": [json.dumps({"key": f"\n{KEY}"})]})
    text = Scrubber().text(f"It said: {inner} - and ended.")
    found = json.loads(text.removeprefix("It said: ").removesuffix(" - and ended."))
    assert found["to"] == "a\n[EMAIL_1]" and json.loads(found["n"][0]) == {"key": "\n[API_KEY_1]"}
    assert json.loads(Scrubber().text(json.dumps({"é": "x@a.de", "b": 'say "no"'}))) == {
        "é": "[EMAIL_1]",
        "b": 'say "no"',
    }
    assert Scrubber().json({"password": "hunter22", "api_key": "k", "secret_length": "7"}) == {
        "password": "[PASSWORD_1]",
        "api_key": "[PASSWORD_2]",
        "secret_length": "7",
    }


def test_rules_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(
        "disable: [phone]\nenable: [ip]\nsecrets: ['Project \"Ünion\"', '77123']\nkeep: [help@a.de]\n"
        "patterns: {employee: 'EMP-[0-9]{4}', name: '\\bAnn\\b'}\n",
        encoding="utf-8",
    )
    scrubber = Scrubber(read_rules(path))
    text = 'Ann, Anna, EMP-1234 at 10.0.0.7, help@a.de, x@a.de, +49 170 1234567, Project "Ünion"'
    marked = "[NAME_1], Anna, [EMPLOYEE_1] at [IP_1], help@a.de, [EMAIL_1], +49 170 1234567, [SECRET_1]"
    assert scrubber.text(text) == marked
    quoted = json.dumps({"x": ['Project "Ünion"', 77123]})
    assert scrubber.text(f"so: {quoted}") == 'so: {"x": ["[SECRET_1]", [SECRET_2]]}'
    assert scrubber.text(quoted) == '{"x": ["[SECRET_1]", "[SECRET_2]"]}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("of: [x]", ("disable, enable, secrets, patterns, keep", "found of")),
        ("disable: [phones]", "found 'phones'"),
        ("disable: phone", "`disable`"),
        ("secrets: [12345]", "quotes"),
        ("secrets: [abc]", "fewer than 4"),
        ("patterns: {a: '(x+)\\1'}", ("`patterns.a`", "RE2")),
        ("patterns: {a: 'x*'}", "empty"),
        ("patterns: {Ab: x}", "small letters"),
        ("- a", "found list"),
        ("a: [", "YAML"),
    ],
)
def test_a_bad_file_of_rules(tmp_path: Path, text: str, words: Names) -> None:
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(DataError, match=r"rules\.yaml") as raised:
        read_rules(tmp_path / "rules.yaml")
    assert_names(raised.value, words)
    log = write_lines(tmp_path / "log.jsonl", [call("a", "1")])
    given = ["--source", str(log), "--out", str(tmp_path / "out"), "--scrub", str(tmp_path / "rules.yaml")]
    assert main(given) == 2 and not (tmp_path / "out").exists()


HOSTILE = (
    "a",
    "@a",
    "1 ",
    "1-",
    "-",
    "a.",
    "eyJ",
    "password=",
    "://a:",
    "-----BEGIN PRIVATE KEY-----",
    "\\",
    "+1(",
    "sk-",
    "DE00 ",
    "4111 ",
    "at61 ",
    "415 555 ",
    "+1 12/12/",
    "+41115555555555555555a ",
    'password="',
    "password is ",
    '"password": ["',
    "password=a(",
    "a@a.",
    "%40",
    "://a:a@",
    "authorization: bearer ",
    "-----BEGIN PRIVATE KEY-----\na: ",
)


def seconds(text: str) -> float:
    """CPU time of a text, the best of three."""
    best = float("inf")
    for _ in range(3):
        begun = time.process_time()
        Scrubber(Rules(DEFAULT, patterns=(("x", "(a+)+$"),))).text(text)
        best = min(best, time.process_time() - begun)
    return best


@pytest.mark.slice(4, "hostile")
@pytest.mark.parametrize("piece", HOSTILE)
def test_the_time_is_linear_in_the_text(piece: str) -> None:
    """Ten times the text takes less than thirty times as long; a quadratic pattern would take a hundred times.

    No text takes fifty times as long as another of its length: a pattern that tries all ways to cut one took hundreds.
    """
    short, long = (piece * (size // len(piece)) for size in (20_000, 200_000))
    assert seconds(short) < 50 * seconds("a" * len(short)) + 0.1
    assert seconds(long) < 30 * seconds(short) + 0.1


def test_the_time_is_linear_in_the_number_of_named_secrets() -> None:
    def seconds(count: int) -> float:
        texts = [f"password=aaaaaaaa{number}" for number in range(count)] + ["a" * 10 * count]
        best = float("inf")
        for _ in range(3):
            scrubber = Scrubber()
            begun = time.process_time()
            scrubber.begin(texts)
            for text in texts:
                scrubber.text(text)
            best = min(best, time.process_time() - begun)
        return best

    assert seconds(1000) < 30 * seconds(100) + 0.1


SECRET = "zebra-Quokka-4711"


def planted() -> list[dict[str, Any]]:
    """Records with the secret in 100 places, some of them bad."""
    number = 0

    def put(text: str = "%") -> str:
        nonlocal number
        number += 1
        return text.replace("%", f"{SECRET}")

    schema = {
        "type": "object",
        "description": put(),
        "properties": {put("p_%"): {"type": "string", "enum": [put()], "default": put()}, "text": {}},
    }
    tool: dict[str, Any] = {
        "type": "function",
        "function": {"name": "note", "description": put("a % b"), "parameters": schema},
    }
    nested = json.dumps({put(): json.dumps({"deep": json.dumps([put("\n%")])}), "x": put('"%"')})
    arguments = json.dumps({"text": {put(): [nested, put("é%"), {"n": put()}]}, f"p_{SECRET}": SECRET})
    made = {
        "role": "assistant",
        "content": put("said %"),
        "reasoning_content": put("thought %"),
        "tool_calls": [{"id": put("c%"), "type": "function", "function": {"name": "note", "arguments": arguments}}],
    }
    prompt: list[dict[str, Any]] = [
        {"role": "system", "content": put("You know %.")},
        {
            "role": "user",
            "content": [{"type": "text", "text": put()}, {"type": "text", "text": put("\\n%")}],
            "name": "u",
        },
        made,
        {"role": "tool", "tool_call_id": f"c{SECRET}", "content": put('Result: {"a": "\\n%"} %2F%')},
    ]
    good: dict[str, Any] = {
        "request": {"messages": prompt, "tools": [tool], "metadata": {"k": put()}, put(): put(), "user": put()},
        "response": {
            "id": put("r%"),
            "choices": [{"message": {"role": "assistant", "content": put("done %")}, "finish_reason": "stop"}],
            "model": put("model-%"),
            put(): put(),
        },
        "session": put("of %"),
        "comment": put("nice %"),
        "feedback": 1,
        "note": put(),
        put(): {put(): [put()]},
    }
    first = {**good, "request": {**good["request"], "messages": prompt[:2]}}
    first["response"] = {"id": "r0", "choices": [{"message": made, "finish_reason": "tool_calls"}]}
    bad: list[dict[str, Any]] = []
    answer: Any
    long = "x" * 70
    for content in (
        {"messages": [{"role": put(), "content": "a"}]},
        {
            "messages": [
                {"role": "user", "content": put(f"{long}%"), put(): 1},
                {"role": "tool", "content": put(), "tool_call_id": put()},
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": put(f"{long}%"), "text": put()}]}]},
        {
            "messages": [{"role": "user", "content": put()}],
            "tools": [{"type": "function", "function": {"name": put("a b%")}}],
        },
        {"messages": [{"role": "user", "content": {put(): put()}}]},
        {"input": [{"type": put(), "x": put()}], put(): 1},
        {"input": "a", "previous_response_id": put("resp_%")},
        {"input": "a", "prompt": {"id": put()}},
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{**tool, "function": {**tool["function"], "parameters": {"type": put()}}}],
        },
    ):
        answer = {"output": [{"type": "message", "role": "assistant", "content": put()}]}
        bad.append({"request": content, "response": answer if "input" in content else good["response"]})
    asked = [{"role": "user", "content": put()}]
    for name, text in (
        (put(), "{}"),
        ("note", put("{%")),
        ("note", json.dumps({"text": 1, put("q%"): put()})),
        ("note", json.dumps([put()])),
    ):
        wrong = {
            "role": "assistant",
            "tool_calls": [{"id": put(), "type": "function", "function": {"name": name, "arguments": text}}],
        }
        request = {"messages": [*asked, {"role": "assistant", "content": put()}, *asked], "tools": [tool]}
        bad.append({"request": request, "response": {"choices": [{"message": wrong, "finish_reason": "stop"}]}})
    for answer in (
        {"error": {"message": put(f"{long}%"), put(): 1}},
        put("<html>%"),
        {put(): put()},
        {"status_code": 500, "body": put()},
        [{put(): 1}],
    ):
        bad.append({"request": {"messages": asked}, "response": answer})
    bad += [
        {put(): put(), "level": put()},
        {"feedback": put(f"{long}%"), "session": put()},
        {"feedback": 1, "session": put("no %")},
    ]
    bad += [
        {"feedback": 1, "name": put(), "session": put()},
        {"feedback": -1, "response_id": f"r{SECRET}", "comment": put()},
    ]
    bad += [
        {"feedback": {"value": put(), "comment": put()}, "call_id": put()},
        {"type": "SPAN", "input": put(), put(): 1},
    ]
    span = {"name": "s", "context": {"trace_id": put(), "span_id": put()}, "start_time": put(), "attributes": {}}
    for held in (
        {"gen_ai.input.messages": put("[%")},
        {"gen_ai.output.messages": json.dumps([{"role": put(), "parts": [{"type": put(), "x": put()}]}])},
        {"gen_ai.operation.name": put()},
        {"gen_ai.operation.name": "chat", "error.type": put()},
    ):
        bad.append({**span, "attributes": held})
    assert number >= 100, number
    return [first, good, *bad]


@pytest.mark.parametrize("by", ["a literal", "a pattern"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_secret_in_100_places_is_in_nothing(
    tmp_path: Path, by: str, strict: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        f"secrets: ['{SECRET}']" if by == "a literal" else "patterns: {animal: 'zebra-[A-Za-z]+-[0-9]{4}'}"
    )
    records = planted()
    log = tmp_path / "log.jsonl"
    for number in range(2, len(records)) if strict else (0,):
        chosen = [*records[:2], records[number]] if strict else records
        lines = "".join(json.dumps(one) + "\n" for one in chosen)
        log.write_text(lines + ("" if strict else f'{{"{SECRET}": "{SECRET}\n{SECRET}\n[{SECRET}\n'))
        given = [
            "--source",
            str(log),
            "--out",
            str(tmp_path / "out"),
            "--scrub",
            str(rules),
            *(["--strict"] if strict else []),
        ]
        status = main(given)
        told = capsys.readouterr()
        assert SECRET not in told.out + told.err and "zebra" not in told.out + told.err
        files = list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else []
        for file in files:
            assert SECRET.encode() not in file.read_bytes() and b"zebra" not in file.read_bytes()
        if not strict:
            assert status == 0 and {file.name for file in files} == {"conversations.parquet", "report.json"}
            held = json.dumps(written(tmp_path / "out"))
            assert SECRET not in held and "zebra" not in held
            row = written(tmp_path / "out")[0]
            mark = "[SECRET_1]" if by == "a literal" else "[ANIMAL_1]"
            assert row["messages"][-1]["content"] == f"done {mark}" and row["session"] == "session-000001"
            arguments = json.loads(row["messages"][2]["tool_calls"][0]["function"]["arguments"])
            assert (
                arguments[f"p_{mark}"] == mark
                and json.loads(row["tools"])[0]["function"]["parameters"]["properties"][f"p_{mark}"]
            )
            assert json.loads(json.loads(json.loads(arguments["text"][mark][0])[mark])["deep"]) == [f"\n{mark}"]


ODD: tuple[Any, ...] = (
    None,
    [],
    {},
    7,
    -1.5,
    True,
    "",
    SECRET,
    [[]],
    [SECRET],
    {"a": 1},
    {SECRET: [SECRET]},
    "{",
    "[1]",
    [None],
)


def odd(value: Any, draw: random.Random) -> Any:
    """A value with some members replaced or taken out."""
    if draw.random() < 0.03:
        return draw.choice(ODD)
    if isinstance(value, dict):
        return {name: odd(held, draw) for name, held in value.items() if draw.random() > 0.02}
    if isinstance(value, list):
        return [odd(held, draw) for held in value if draw.random() > 0.02]
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            return json.dumps(odd(json.loads(value), draw))
    return value


@pytest.mark.slice(1, "hostile")
@pytest.mark.parametrize("seed", range(10))
def test_odd_values_anywhere_are_counted(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(seed)
    (tmp_path / "rules.yaml").write_text(f"secrets: ['{SECRET}']")
    shown = [*planted(), *FORMS.values(), *SPANS]
    log = write_lines(tmp_path / "log.jsonl", [odd(draw.choice(shown), draw) for _ in range(600)] + [call("a", "1")])
    given = ["--source", str(log), "--out", str(tmp_path / "out"), "--scrub", str(tmp_path / "rules.yaml")]
    assert main(given) == 0
    told = capsys.readouterr()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rows"] > 5 and sum(report["calls"].values()) > 100 and len(report["dropped"]) > 15
    assert SECRET not in told.out + told.err + json.dumps(report) + json.dumps(written(tmp_path / "out"))
