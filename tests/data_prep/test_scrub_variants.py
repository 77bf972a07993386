"""Each rule finds its texts among neighbours, in any carrier, and leaves what only looks like one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from data_prep.traces.scrub import Scrubber

CARDS = (
    *("4111111111111111", "4111 1111 1111 1111", "4111-1111-1111-1111", "4111.1111.1111.1111"),
    *("4111\u00a01111\u00a01111\u00a01111", "4111  1111  1111  1111", "4111 - 1111 - 1111 - 1111"),
    *("378282246310005", "3782 822463 10005", "3056 930902 5904", "6011 1111 1111 1117"),
)
IBANS = (
    *("AT611904300234573201", "AT61 1904 3002 3457 3201", "BE68 5390 0754 7034", "DE89 3704 0044 0532 0130 00"),
    *("GB82 WEST 1234 5698 7654 32", "NO93 8601 1117 947", "FR14 2004 1010 0505 0001 3M02 606"),
    *(
        "at61 1904 3002 3457 3201",
        "DE89-3704-0044-0532-0130-00",
        "DE89\u00a03704\u00a00044\u00a00532\u00a00130\u00a000",
    ),
    *("MT84 MALT 0110 0001 2345 MTLC AST0 01S", "LC55 HEMM 0001 0001 0012 0012 0002 3015"),
)
PHONES = (
    *("+1 415 555 1234", "+14155551234", "+1 (415) 555-1234", "+49 170 1234567", "+33 1.23.45.67.89"),
    *("(415) 555-1234", "(415)555-1234", "415-555-1234", "415.555.1234", "+44 20 7946 0958"),
)
NEIGHBOURS = (
    *("%", "%.", "no %, please", "%: that", "(%)", '"%"', "`%`", "**%**", "<b>%</b>", "x=%&y=1", "No.%", "%\n1. a"),
    *("% 12/27", "% 123", "12/27 % 123", "order 2 %", "% 2024-01-01", "2024-01-01 %", "% at 12:30", "3 × %", "% BIC X"),
    *("% BANK OF X", "% and 2 more", "1) %", "| % | 7 |", "%; %", "%\t5", "id 17: % (5)", "% - 3", "v1.2 %"),
)


def shown(text: str) -> Iterator[str]:
    """A text alone, in JSON, and in JSON that cannot be read or stands in other text."""
    quoted = json.dumps({"a": text}, ensure_ascii=False)
    yield from (text, quoted, json.dumps({"a": text}), json.dumps([quoted]))
    yield f"It said {quoted}."
    yield f"{quoted[:-1]}, {quoted[1:]}"
    yield f'{quoted[:-1]}, "x": 1e400}}'


@pytest.mark.parametrize("text", [*CARDS, *IBANS, *PHONES])
def test_numbers_are_found_among_numbers(text: str) -> None:
    for neighbour in NEIGHBOURS:
        for held in shown(neighbour.replace("%", text)):
            found = Scrubber().text(held)
            left = found.replace("\\u00a0", "\u00a0")
            assert text not in left and text[-4:] not in left.replace(" ", ""), (neighbour, held, found)
            assert "_1]" in found, found


BODY = "MIIEpAIBAAKCAQEA1234567890abcdefghij\nqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ\nlast+line/Qm=="
HEADS = {
    "RSA PRIVATE KEY": "",
    "PGP PRIVATE KEY BLOCK": 'Version: GnuPG v1.4.11 (GNU/Linux)\nComment: it\'s "mine"\n\n',
    "EC PRIVATE KEY": "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,0A1B2C3D4E5F60718293A4B5C6D7E8F9\n\n",
}
KEYS = [f"-----BEGIN {name}-----\n{head}{BODY}\n-----END {name}-----" for name, head in HEADS.items()]
PREFIXES = ("", "> ", ">> ", "file:2:", "src/a-b.pem-12-", "+", "    ", "12\t", "| ", "# ", " * ", '  "')


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("ends", [True, False])
def test_keys_are_found_in_quotes_and_lists_of_lines(key: str, ends: bool) -> None:
    """Also where the end of the key was cut off."""
    for prefix in PREFIXES:
        if not ends and '"' in prefix:
            continue
        lines = key.split("\n")
        text = "\n".join(prefix + line for line in (lines if ends else lines[:-1]))
        for held in shown(f"see\n{text}\nthere"):
            found = Scrubber().text(held)
            assert not any(line in found for line in BODY.split("\n")[:2]), (prefix, found)
            assert "there" in found and "see" in found, (prefix, found)


MAILS = {
    "bob@x.com": "[EMAIL_1]",
    "bob@münchen.de": "[EMAIL_1]",
    "bob@xn--mnchen-3ya.de": "[EMAIL_1]",
    "иван@пример.рф": "[EMAIL_1]",
    "bob@xn--e1afmkfd.xn--p1ai": "[EMAIL_1]",
    "bob@example.com你好": "[EMAIL_1]你好",
    "Bob" + "." * 70 + "bob@example.com": "Bob" + "." * 70 + "[EMAIL_1]",
    "-" * 80 + "bob@example.com": "-" * 80 + "[EMAIL_1]",
    "Bob..lee@example.com": "[EMAIL_1]",
    "q=bob%40example.com&x=1": "q=[EMAIL_1]&x=1",
    "q=%3Dbob%2Bx%40example.com": "q=%3D[EMAIL_1]",
    "a" * 200 + "@example.com": "[EMAIL_1]",
    "<mailto:bob@x.com>,ann@y.org;bob@x.com": "<mailto:[EMAIL_1]>,[EMAIL_2];[EMAIL_1]",
}


@pytest.mark.parametrize("text", MAILS)
def test_addresses_of_mail(text: str) -> None:
    assert Scrubber().text(text) == MAILS[text]


SECRETS = ("hunter22!", "Pa$$w0rd", "hunter2$xyz99", "48213377", "x9/Y+z=Q", "a-b_c-9", "$2b$10$abcdefghij")
ASSIGNED = (
    *("password=%", "password = %", "PASSWORD=%", 'password="%"', "password='%'", "password := %", "password => '%'"),
    *("password: %", "Password: %.", 'password: "%"', "password is %", "password was %.", "password is: %", "pwd=`%`"),
    *(
        "**Password:** %",
        "**Password**: %",
        "Password: **%**",
        "`password`: `%`",
        "my password is “%”",
        "DB_PASSWORD=%",
    ),
    *('if password == "%":', "https://x/?api_key=%&b=1", "X-Api-Key: %", "{'password': '%'}", "password=% next=1"),
    *('{"password": "%", "a": 1}', '{"password": ["%"]}', '{"password": ["%", "%"]}', '{"client_secret":"%"}'),
)


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_found_by_their_names(secret: str) -> None:
    for assigned in ASSIGNED:
        for held in shown(assigned.replace("%", secret)):
            found = Scrubber().text(held)
            assert secret not in found and secret[-3:] not in found and "[PASSWORD_1]" in found, (held, found)


NAMED = {
    'password="correct horse battery staple" ok': 'password="[PASSWORD_1]" ok',
    "password='it is \"mine\"';": "password='[PASSWORD_1]';",
    'password="a \\"b\\" c1"': 'password="[PASSWORD_1]"',
    '"password": "x1 y z"': '"password": "[PASSWORD_1]"',
    "my password is hunter22.": "my password is [PASSWORD_1].",
    'password="hunter22': 'password="[PASSWORD_1]',
    "password=b'hunter(22) x'": "password=b'[PASSWORD_1]'",
    "password: hunter22(x)": "password: [PASSWORD_1](x)",
    "password=ab`cd1234": "password=[PASSWORD_1]",
    "API key: abc-123-def, secret key = 12345": "API key: [PASSWORD_1], secret key = [PASSWORD_2]",
    "smtp://bob@x.com:pw@h": "smtp://[EMAIL_1]:[PASSWORD_1]@h",
    '"Authorization":"Basic dXNlcjpwYXNz"': '"Authorization":"Basic [TOKEN_1]"',
    "is the password: hunter22?": "is the password: [PASSWORD_1]?",
    "https://user:p@ss@host/x": "https://user:[PASSWORD_1]@host/x",
    "https://user:p@a:s@s@host:80/x?a=b@c": "https://user:[PASSWORD_1]@host:80/x?a=b@c",
    "https://user:pw@host?x=a/b@c": "https://user:[PASSWORD_1]@host?x=a/b@c",
    "Authorization: Bearer abcdefghijklmnopqrstuv": "Authorization: Bearer [TOKEN_1]",
    '{"Authorization": "Bearer abcdefghijklmnopqrstuv", "x": 1e400}': (
        '{"Authorization": "Bearer [TOKEN_1]", "x": 1e400}'
    ),
    "-H 'authorization: token abc12345'": "-H 'authorization: token [TOKEN_1]'",
    "Bearer abcdefghijklmnopqrstuvwxyz": "Bearer [TOKEN_1]",
    '{"password": 48213377, "pwd": [12345, "a", null, true]}': (
        '{"password": "[PASSWORD_1]", "pwd": ["[PASSWORD_2]", "[PASSWORD_3]", null, true]}'
    ),
    '{"password": "mail bob@x.com 99"}': '{"password": "[PASSWORD_1]"}',
    '{"password": "swordfish bob@x.com"}': '{"password": "[PASSWORD_1]"}',
    '{"authorization": "Bearer abcdef0123456789"}': '{"authorization": "Bearer [TOKEN_1]"}',
    '{"mail":"bob@x.com","mail":null}': '{"mail":"[EMAIL_1]","mail":null}',
    '{"x": 1e400, "m": "a@b.com"}': '{"x": 1e400, "m": "[EMAIL_1]"}',
    "call 415 555 1234": "call [PHONE_1]",
    "415 555 1234": "[PHONE_1]",
    "+1 415 555 1234 2024-01-01": "[PHONE_1] 2024-01-01",
    "+1 415 555 1234 12:30": "[PHONE_1] 12:30",
    "+1 415 555 1234x55": "[PHONE_1]x55",
    "2 +1 415 555 1234 12345 pieces": "2 [PHONE_1] 12345 pieces",
    "4111 1111 1111 1111 5555 5555 5555 4444": "[CARD_1] [CARD_2]",
    "order 2 4111 1111 1111 1111 12/27 123": "order 2 [CARD_1] 12/27 123",
    "AT61 1904 3002 3457 3201 BIC OPSKATWW": "[IBAN_1] BIC OPSKATWW",
}


@pytest.mark.parametrize("text", NAMED)
def test_what_is_taken_ends_where_the_secret_ends(text: str) -> None:
    assert Scrubber().text(text) == NAMED[text]


STAYS = (
    *('password = os.environ["X"]', 'password: os.environ["X"]', 'password = os.environ.get("X", "")', "password: str"),
    *(
        "def f(password: str = None, api_key: str | None = None)",
        "password: Optional[str] = None",
        "password = getpass()",
    ),
    *("password=$PASSWORD", "password=${DB_PASS}", 'password="$DB_PASS"', "password=$(cat /x)", "$password = $row[1];"),
    *('password = get_secret("x")', "password = {{ vault.x }}", "password=<your password>", "password: ********"),
    *('f"password={password}"', "password={password}", "if password == confirm_password: pass", "api_key=$1"),
    *('url = "password=" + x + "&a=" + y', "'password='+encodeURIComponent(p)+'&x='", "password = ''", 'password: ""'),
    *('label = {password: "Forgot your password?"}', 'password: "The password of the user."', "password: required"),
    *('{"password": {"type": "string", "minLength": 8}}', '{"required": ["password"], "secret": 0, "pwd": true}'),
    *("'password' => ['required', 'string', 'min:8']", '{"api_key": null, "secrets": []}', "a secret is a secret"),
    *("order 123 456 7890, 100-200-300", "order no. 4000-1234-5678-9010, 2024-0001-0002-0003", "EUR 1 234 567.89"),
    *("versions 1.2.3, 10.15.7, 2.0.0-rc.1, v4.1.1111", "2026-05-01T12:00:00Z 01.05.2026 05/01/2026 12:30:15.123456"),
    *("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b", "git show 5e1c309dae7f45e0f39b1bf3ac3cd9db12e7d689 4111111"),
    *("d41d8cd98f00b204e9800998ecf8427e be12345678901234abcdabcdabcdabcd", "10.0.0.1 192.168.1.254 8.8.8.8:53"),
    *(
        "123e4567-e89b-12d3-a456-426614174000",
        "1 234 567 890 123 456",
        "1700000000000 1700000000123456",
        "0.4111111111111111",
    ),
    *("4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1", "1024 2048 4096 8192 16384", "$1,234.56 and 1.234,56 €"),
    *("sizes 640 480 1024 768", "100 200 3000", "200 300 400 5000", "2024-2025 300-400", "ISBN 978-3-16-148410-0"),
    *("x = a @ b.T", "@app.route", "me@home", "react@18.2.0", "a bearer of responsibilities", "Bearer <token>"),
    *("Authorization: Bearer $TOKEN", "Authorization: Bearer YOUR_API_KEY", "basic internationalization"),
    *(
        "Authorization: Bearer {token}",
        "Authorization: Basic authentication",
        "https://host:8080/@user",
        "ssh://git@host:22/x",
    ),
    *(
        "http://h:80/a@b",
        "https://h/a:b@c",
        "AT61 1904 3002 3457 3202",
        "XX61 1904 3002 3457 3201",
        "AB12 CDEF GHIJ KLMN OPQR",
    ),
    *(
        '{"a": 1.10, "a": 2, "n": [NaN]}',
        "max_tokens=4096",
        "password_length=12345",
        "the password-protected 12345 files",
    ),
    *("mongodb://u@h:5432,u2@h2:5432/x", "the access token is valid", "private key: required", "C:\\x"),
    *("-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8A\n-----END PUBLIC KEY-----", "BEGIN PRIVATE KEY"),
)


@pytest.mark.parametrize("text", STAYS)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    for held in shown(text):
        assert Scrubber().text(held) == held
