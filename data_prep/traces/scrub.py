"""Secrets and personal data in texts, replaced by marks such as [EMAIL_1].

In one session the same text gets the same mark, so that a tool's arguments and its answer still agree. A secret that
one text names (`password=...`) is taken out of the session's other texts, too. Each pattern here has bounds, and few
ends of a match are tried. Patterns of users are matched by RE2 (in pyarrow), which never goes back. So the time is
linear in the text, whatever it holds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from agentrl.errors import DataError
from agentrl.system.bounded_yaml import load_yaml
from agentrl.system.json_value import JSON


@dataclass(frozen=True, slots=True)
class Rule:
    """Texts of one kind. The mark replaces the group `secret`, or all of the match."""

    name: str
    pattern: re.Pattern[str]
    holds: Callable[[str], bool] = lambda text: True
    """Function that says whether a match is one."""
    hint: Callable[[str], bool] = lambda text: True
    """Function that says quickly whether a text may have a match."""
    among_others: bool = False
    """A match may have taken neighbours: its beginnings are tried, and then what follows its first character."""
    before: re.Pattern[str] | None = None
    """Part of a match in front of the pattern's, read backwards."""


def _has(*words: str) -> Callable[[str], bool]:
    return lambda text: any(word in text for word in words)


def _named(text: str) -> bool:
    return _SECRET_WORD.search(text) is not None


def _digits(text: str) -> str:
    return "".join(filter(str.isdecimal, text))


def is_card(text: str) -> bool:
    """Check a card's number: its first digits, its length, and Luhn's sum."""
    digits = _digits(text)
    lengths = next((lengths for first, lengths in _CARDS.items() if re.match(first, digits)), ())
    if len(digits) not in lengths:
        return False
    doubled = [int(one) * (1 + place % 2) for place, one in enumerate(reversed(digits))]
    return sum(one - 9 * (one > 9) for one in doubled) % 10 == 0


_CARDS = {
    "4": (13, 16, 19),
    "5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720": (16,),
    "3[47]": (15,),
    "6011|64[4-9]|65": (16, 19),
    "35": (16,),
    "3(0[0-5]|[68])": (14,),
    "62": (16, 17, 18, 19),
}
"""Lengths of numbers by their first digits."""


def is_iban(text: str) -> bool:
    """Check the length that the country has, and the check digits (ISO 13616)."""
    bare = "".join(filter(str.isalnum, text)).upper()
    if _IBANS.get(bare[:2]) != len(bare) or sum(map(str.isdecimal, bare)) < 10:
        return False
    return int("".join(str(int(one, 36)) for one in bare[4:] + bare[:4])) % 97 == 1


_IBANS = {
    country: length
    for length, countries in {
        15: "NO",
        16: "BE",
        18: "DK FI FK FO GL NL SD",
        19: "MK SI",
        20: "AT BA EE KZ LT LU MN XK",
        21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA",
        23: "AE GI IL IQ OM SO TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "AO CV GW LY MZ PT ST",
        26: "DZ IR IS TR",
        27: "BF BI CF CG CM DJ FR GA GQ GR IT KM MC MG MR SM TD",
        28: "AL AZ BJ BY CI CY DO GT HN HU LB MA ML NE NI PL SN SV TG",
        29: "BR EG PS QA UA",
        30: "JO KW MU YE",
        31: "MT SC",
        32: "LC",
        33: "RU",
    }.items()
    for country in countries.split()
}
"""Lengths of IBANs by country."""


def is_phone(text: str) -> bool:
    """Check the number of digits; numbers of +1 have 11 at most."""
    return 9 <= len(_digits(text)) <= (11 if text.startswith("+1") else 15)


def is_address(text: str) -> bool:
    """Check the four numbers of an IP address that is not of the machine itself."""
    return all(int(part) < 256 for part in text.split(".")) and not text.startswith(("127.", "0.0.0."))


_WORDS = (
    r"pass(?:word|wd|phrase|code)|pwd|secret|api[ _-]?key|(?:access|secret|private|signing|encryption)[ _-]?key"
    r"|(?:access|auth|refresh|bearer|session|api)[ _-]?token|client[ _-]?secret|credentials?|authorization"
)
_SECRET_WORD = re.compile(_WORDS, re.IGNORECASE)
SECRET_MEMBER = re.compile(rf"[\w.-]{{0,64}}(?:{_WORDS}|cookie)s?", re.IGNORECASE)
"""Names of members whose texts and numbers are secrets."""
_KEYS = (
    r"sk-[A-Za-z0-9_-]{16,256}",
    r"(?:sk|rk|pk|whsec)_(?:live|test|prod)_[A-Za-z0-9]{10,256}|whsec_[A-Za-z0-9]{16,256}",
    r"gh[pousr]_[A-Za-z0-9]{20,255}|github_pat_[A-Za-z0-9_]{20,255}|glpat-[A-Za-z0-9_-]{16,64}",
    r"(?:AKIA|ASIA|AROA|AIDA|AGPA)[A-Z0-9]{16}",
    r"AIza[A-Za-z0-9_-]{30,64}|ya29\.[A-Za-z0-9_-]{16,256}|GOCSPX-[A-Za-z0-9_-]{16,64}",
    r"xox[abeoprs]-[A-Za-z0-9-]{10,256}|xapp-[A-Za-z0-9-]{10,256}",
    r"hf_[A-Za-z0-9]{16,128}|npm_[A-Za-z0-9]{30,64}|pypi-[A-Za-z0-9_-]{30,256}|gsk_[A-Za-z0-9]{20,128}",
    r"SG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,64}|key-[0-9a-f]{32}|dop_v1_[0-9a-f]{64}|shpat_[0-9a-fA-F]{32}",
    r"xai-[A-Za-z0-9]{20,128}|tvly-[A-Za-z0-9-]{16,64}|pplx-[A-Za-z0-9]{20,128}|r8_[A-Za-z0-9]{30,64}",
    r"hooks\.slack\.com/services/[A-Za-z0-9/]{20,128}",
)
_ESCAPED = r"(?<=\\[nrtbf])|(?<=\\u[0-9a-fA-F]{4})|(?<=%[0-9A-Fa-f]{2})"


def _not_after(characters: str) -> str:
    """Return the pattern of a place that follows none of these, or an escape of JSON or of an address."""
    return rf"(?:(?<![{characters}])|{_ESCAPED})"


_START = _not_after("A-Za-z0-9")
_NUMBER = rf"(?:(?<![0-9A-Za-z.])|(?<=[A-Za-z]\.)|{_ESCAPED})"
"""Place where a number begins: not in a word or a fraction, but after `No.`"""
_GAP = r"[ \t\u00a0\u202f.-]"
_DATE = (
    r"(?:(?:19|20)[0-9]{2}-[01][0-9]|[0-9]{1,2}:[0-9]{2}|[0-9]{1,2}(?P<slash>[./-])[0-9]{1,2}(?P=slash)(?:19|20)[0-9]{2}"
    r"(?![0-9]))"
)
_NAMED = rf"(?:{_WORDS})\\{{0,7}}[*_`\"']{{0,3}}\s{{0,4}}"
_OPEN = r"(?:\*\*|__)?\s{0,4}(?:\*\*)?(?:[rbuf]{0,2}(?P<escaped>\\{1,7})?(?P<quote>[\"'`])|[“‘«])?"
_PLAIN = r"[^\s\"'`\\,;&<>\[\](){}]"
_CODE = r"(?:[A-Za-z_]{1,64}|[A-Za-z_]\w{0,64}\.[\w.]{1,255})[\[(]"
_WORD = rf"(?:{_PLAIN}|`(?=\w)){{3,4095}}(?![.:?*”’»]){_PLAIN}"
_VALUE = (
    r"(?!\$[A-Za-z_{(]|\+[^\n\"'`]{0,255}\+[\"'`])(?P<secret>"
    rf"(?(quote)(?={_PLAIN})(?:(?!(?P=quote))[^\n\\]|(?(escaped)(?!)|\\[^\n])){{4,1024}}(?=\\{{0,7}}(?P=quote))|(?!))"
    rf"|(?(quote)|(?!{_CODE})){_WORD})"
)
"""Value: to its closing quote, or up to a space. Variables, calls, places of a list and joined texts are code."""
_LINE = r"(?:(?:[\r\n]|\\+[nr])(?:[^\r\n\\\"']|\\+t){0,80}?){1,4}"
"""Beginning of a key's line in a quote, a diff or a list of found lines, after empty ones."""

DEFAULT = (
    Rule(
        "private_key",
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:"
            # up to its end, whatever stands between
            r"(?:(?![A-Za-z0-9+/=]{16}|-----(?:BEGIN|END))[\s\S]){0,4000}+[A-Za-z0-9+/=]{16}"
            r"(?:[^-]|-(?!----(?:BEGIN|END))){0,60000}+-----END[^-]{0,60}-----"
            r"|(?:[A-Za-z0-9+/=\s\\:,.]|-(?!----)){0,20000}+-----END [A-Z0-9 ]{0,40}-----"
            # without an end: the lines that read as a key's
            rf"|(?:{_LINE}[A-Za-z-]{{1,40}}: (?:[^\r\n\\]|\\+[\"']){{0,200}}){{0,8}}+"
            r"(?:(?:\s|\\+[nr]){0,8}[A-Za-z0-9+/=]{16,2048}"
            rf"|{_LINE}[A-Za-z0-9+/=]{{16,2048}}(?=[ \t]{{0,8}}(?:[\r\n\\\"']|\Z))){{0,900}}+)"
        ),
        hint=_has("PRIVATE KEY"),
    ),
    Rule(
        "token",
        re.compile(rf"{_START}eyJ[A-Za-z0-9_-]{{8,4096}}\.[A-Za-z0-9_-]{{4,8192}}\.[A-Za-z0-9_-]{{0,2048}}"),
        hint=_has("eyJ"),
    ),
    Rule("api_key", re.compile(rf"{_START}(?:{'|'.join(_KEYS)})")),
    Rule(
        "token",
        re.compile(
            r"\b(?:bearer|basic)\s{1,4}"
            r"(?P<secret>(?=[A-Za-z._~+/=-]{0,64}[0-9])[A-Za-z0-9._~+/=-]{12,4096}|[A-Za-z]{24,4096})",
            re.I,
        ),
        hint=lambda text: "bearer" in text.lower() or "basic" in text.lower(),
    ),
    Rule(
        "token",
        re.compile(
            r"authorization\\{0,7}[\"']?\s{0,4}[:=]\s{0,4}\\{0,7}[\"']?(?:bearer|basic|token|apikey)\s{1,4}"
            r"(?P<secret>(?=[A-Za-z._~+/=-]{0,64}[0-9])[A-Za-z0-9._~+/=-]{6,4096}|[A-Za-z]{16,4096}"
            r"|(?<=basic\s)(?-i:(?=[A-Za-z]{0,64}[a-z][A-Z]))[A-Za-z]{8,4096}={0,2})",
            re.I,
        ),
        hint=lambda text: "authorization" in text.lower(),
    ),
    Rule(
        "password",
        re.compile(
            rf"{_NAMED}(?:={{2,3}}(?=\s{{0,4}}\\{{0,7}}[\"'])|=>?|:=|(?P<told>(?:is|was)(?:\s{{0,4}}:|\s)|:)){_OPEN}"
            rf"(?(told)(?={_PLAIN}{{0,64}}[0-9!@#%^*_+~|?$-])){_VALUE}",
            re.I,
        ),
        hint=_named,
    ),
    Rule(
        "password",
        re.compile(
            rf"(?:{_WORDS})s?\\{{0,7}}\"\s{{0,4}}:\s{{0,4}}\[\s{{0,4}}\\{{0,7}}\""
            r"(?P<secret>[^\[\]{}\n]{1,1024}?)\\{0,7}\"\s{0,4}\]",
            re.I,
        ),
        hint=_named,
    ),
    Rule(
        "password",
        re.compile(
            r"(?<=://)[^\s/:@\"'\\]{0,128}(?:(?<=[^/])@[\w.-]{1,128})?:(?![0-9]{1,5}[,/])"
            r"(?P<secret>[^\s/@\"'\\]{1,256}(?:@[^\s/@\"'\\?#,;<>()]{1,256}(?=@)){0,8})@"
        ),
        hint=_has("://"),
    ),
    Rule(
        "email",
        re.compile(
            r"(?<=[\w.+-])(?:@|%40)(?:(?:[^\W_]|-){1,63}\.){1,8}"
            r"(?:xn--[A-Za-z0-9-]{2,59}|[A-Za-z]{2,24}(?![A-Za-z])|[^\W\d_]{2,24}(?![^\W\d_]))"
        ),
        hint=_has("@", "%40"),
        before=re.compile(r"(?:[.-]{0,2}(?:[Bb]2%|[\w+])){1,256}"),
    ),
    Rule(
        "iban",
        re.compile(rf"{_START}[A-Z]{{2}}[0-9]{{2}}(?:{_GAP}?[A-Z0-9]){{11,29}}(?![A-Z0-9])", re.I),
        is_iban,
        among_others=True,
    ),
    Rule(
        "card",
        re.compile(
            rf"{_NUMBER}(?:[0-9]{{13,19}}"
            rf"|[0-9]{{4}}(?P<gap> - |{_GAP}{{1,2}})(?:[0-9]{{4}}(?P=gap)[0-9]{{4}}(?P=gap)[0-9]{{4}}"
            r"(?:(?P=gap)[0-9]{3})?|[0-9]{6}(?P=gap)[0-9]{4,5}))(?![0-9A-Za-z])"
        ),
        is_card,
        among_others=True,
    ),
    Rule("card", re.compile(_not_after("0-9A-Za-z.") + r"(?:[0-9][ -]?){12,18}[0-9](?![0-9A-Za-z])"), is_card),
    Rule(
        "ssn", re.compile(_not_after("0-9A-Za-z-") + r"(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![0-9-])")
    ),
    Rule(
        "phone",
        re.compile(
            # one digit at a time: groups of digits could be cut in thousands of ways
            rf"(?<!\+){_NUMBER}(?:\+[0-9](?:(?:(?: - |{_GAP}|/)(?!{_DATE}))?[0-9]|{_GAP}?\([0-9]{{1,5}}\)){{5,20}}"
            rf"|\([0-9]{{3}}\){_GAP}?[0-9]{{3}}{_GAP}[0-9]{{4}}|[0-9]{{3}}[.-][0-9]{{3}}[.-][0-9]{{4}}"
            # ten digits in a row of numbers are no phone's
            r"|(?<![0-9][ \u00a0])[2-9][0-9]{2}[ \u00a0][0-9]{3}[ \u00a0][0-9]{4}(?![ \u00a0][0-9]{1,9}(?![0-9:/.-])))"
            r"(?!-?[0-9]|-[A-Za-z]|(?!x[0-9])[A-Za-z])"
        ),
        is_phone,
        among_others=True,
    ),
)
OPTIONAL = (
    Rule("ip", re.compile(_not_after("0-9A-Za-z.-") + r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![0-9A-Za-z.-])"), is_address),
)
"""Rules that are off unless a file turns them on: versions look like addresses."""
KNOWN = 8
"""Characters by which a session's secrets are looked for in all its texts; shorter ones may be words."""
ALIKE = 64
"""Number of secrets that begin alike and are looked for; without a bound the time would not be linear."""
CLEAN = 50_000_000
"""Characters of texts without a finding that are remembered, as system prompts and tools come in every session."""
MEMBERS = ("disable", "enable", "secrets", "patterns", "keep")


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a run."""

    built_in: tuple[Rule, ...] = DEFAULT
    literals: tuple[tuple[str, re.Pattern[str]], ...] = ()
    """Texts that are secrets in any case of letters, each with its forms in JSON and in addresses."""
    patterns: tuple[tuple[str, str], ...] = ()
    """Names and patterns of the user's."""
    keep: frozenset[str] = frozenset()
    """Texts that stay."""


def read_rules(path: Path) -> Rules:
    """Read a file of rules. Raises DataError naming the member."""
    try:
        given = load_yaml(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(
            f"{path}: cannot be read as YAML ({type(error).__name__}); --scrub names a file of rules"
        ) from None
    if not isinstance(given, dict) or (strange := [str(name) for name in given if name not in MEMBERS]):
        found = ", ".join(strange) if isinstance(given, dict) else type(given).__name__
        raise DataError(f"{path}: expected the members {', '.join(MEMBERS)}, found {found}")
    names = {rule.name for rule in (*DEFAULT, *OPTIONAL)}
    off, on, secrets, keep = (_texts(path, given, name) for name in ("disable", "enable", "secrets", "keep"))
    for name in (*off, *on):
        if name not in names:
            raise DataError(f"{path}: `disable` and `enable` name rules ({', '.join(sorted(names))}), found {name!r}")
    if any(len(text) < 4 for text in secrets):
        raise DataError(f"{path}: `secrets` holds a text of fewer than 4 characters, which would take words apart")
    patterns = given.get("patterns") or {}
    if not isinstance(patterns, dict):
        raise DataError(f"{path}: expected `patterns` as name: pattern, found a {type(patterns).__name__}")
    built_in = [rule for rule in DEFAULT if rule.name not in off] + [rule for rule in OPTIONAL if rule.name in on]
    literals = sorted(secrets, key=len, reverse=True)
    return Rules(
        tuple(built_in),
        tuple((text, _literal(text)) for text in literals),
        tuple((_name(path, name), _pattern(path, name, text)) for name, text in patterns.items()),
        frozenset(keep),
    )


def _texts(path: Path, given: Mapping[object, object], name: str) -> list[str]:
    value = given.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise DataError(f"{path}: expected a list of texts as `{name}`; numbers need quotes")
    return value


def _name(path: Path, name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z_]{0,30}", name):
        raise DataError(f"{path}: expected small letters and _ as a pattern's name, found {name!r}")
    return name


def _pattern(path: Path, name: object, text: object) -> str:
    """Check a pattern as RE2 reads it: no looking around, no references back."""
    try:
        if not isinstance(text, str) or pc.match_substring_regex(pa.scalar(""), text).as_py():
            raise ValueError("it matches the empty text")
    except (ValueError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: `patterns.{name}` is no pattern for RE2 ({error}); mend it, or take `secrets`"
        ) from None
    return text


def _literal(text: str) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(one) for one in sorted(_forms(text), key=len, reverse=True)), re.IGNORECASE)


def _forms(text: str) -> set[str]:
    """Return a text as JSON, JSON in JSON and addresses write it."""
    forms = {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], quote(text, safe="")}
    return forms | {json.dumps(one)[1:-1] for one in forms}


@dataclass(frozen=True, slots=True)
class Span:
    """Place of a secret in a text."""

    begin: int
    end: int
    name: str
    secret: str
    """Text by which the mark is chosen."""


@dataclass(frozen=True, slots=True)
class Known:
    """One way to write a secret of a session."""

    text: str
    name: str
    secret: str


@dataclass(slots=True)
class Taken:
    """Number of texts that a rule took, and where the first was."""

    first: str
    count: int = 0


@dataclass(slots=True)
class Scrubber:
    """Replaces in the texts of one session after another."""

    rules: Rules = field(default_factory=Rules)
    taken: dict[str, Taken] = field(default_factory=dict)
    where: str = ""
    """Place that is noted with what is taken."""
    counts: bool = True
    known: dict[str, list[Known]] = field(default_factory=dict)
    """Secrets that texts of the session name, by their beginnings."""
    _marks: dict[tuple[str, str], str] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _done: dict[str, str] = field(default_factory=dict)
    """Texts of the session, scrubbed."""
    _clean: set[str] = field(default_factory=set)
    """Texts of all sessions in which nothing was found."""
    _kept: int = 0
    """Number of characters of these."""

    def begin(self, texts: Iterable[JSON] = ()) -> None:
        """Begin a session: marks count from 1 again, and a secret that one of `texts` names is one in all of them."""
        self._marks.clear()
        self._numbers.clear()
        self._done.clear()
        first = Scrubber(self.rules, counts=False, _clean=self._clean, _kept=self._kept)
        for one in texts:
            first.json(one)
        self._kept = first._kept
        self.known = {}
        for name, secret in first._marks:
            for shown in {secret, secret.rstrip("!?")} if name in ("password", "token") else ():
                for form in _forms(shown) if _is_telling(shown) else ():
                    self.known.setdefault(form[:KNOWN], []).append(Known(form, name, secret))
        for alike in self.known.values():
            alike.sort(key=lambda one: len(one.text), reverse=True)
            del alike[ALIKE:]

    def json(self, value: JSON) -> JSON:
        """Replace in every text of a value, keys included, in numbers that are a card's, and in JSON within texts."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(name): self._member(name, item) for name, item in value.items()}
        if isinstance(value, Sequence):
            return [self.json(item) for item in value]
        may_be = isinstance(value, int) and (value > 10**11 or self.known or self.rules.literals or self.rules.patterns)
        if may_be and not isinstance(value, bool):
            shown = self.text(str(value))
            return value if shown == str(value) else shown
        return value

    def _member(self, name: str, item: JSON) -> JSON:
        """Replace in a member. Under a name that says so, a text is a secret as a whole, and so is a long number."""
        is_on = any(rule.name == "password" for rule in self.rules.built_in)
        return self._secret(item) if is_on and SECRET_MEMBER.fullmatch(name) else self.json(item)

    def _secret(self, item: JSON) -> JSON:
        if isinstance(item, list):
            return [self._secret(one) for one in item]
        is_number = isinstance(item, int | float) and not isinstance(item, bool) and len(str(item)) >= 4
        if not is_number and not (isinstance(item, str) and item):
            return self.json(item)
        whole = self.text(str(item))
        if str(item) in self.rules.keep:
            return item
        return whole if _ONE_MARK.fullmatch(whole) else self._mark("password", str(item))

    def text(self, text: str) -> str:
        """Replace in a text. JSON in it stays JSON. Half a surrogate pair, which no file can hold, becomes a ?."""
        if not text.isascii():
            text = text.encode(errors="replace").decode()
        if len(text) < 4 or (text in self._clean and not any(self._known_in(text))):
            return text
        if (found := self._done.get(text)) is None:
            found = self._scrubbed(text)
            if found != text:
                self._done[text] = found
            elif self._kept + len(text) < CLEAN:
                self._kept += len(text)
                self._clean.add(text)
        return found

    def _scrubbed(self, text: str) -> str:
        bare = text.strip()
        if bare[:1] + bare[-1:] in ("{}", "[]", '""') and len(bare) > 2:
            try:
                value: JSON = json.loads(bare, object_pairs_hook=_object, parse_float=_float)
                changed = self.json(value)
                return text if changed == value else json.dumps(changed, ensure_ascii=False)
            except (ValueError, RecursionError):
                pass  # other text, and JSON that would not come back the same; it is scrubbed as text
        for secret, pattern in self.rules.literals:
            text = self._replaced(text, (Span(*m.span(), "secret", secret) for m in pattern.finditer(text)))
        text = self._replaced(text, self._known_in(text))
        for name, written in self.rules.patterns:
            text = self._replaced(text, _by_re2(name, written, text))
        for rule in self.rules.built_in:
            if rule.hint(text):
                text = self._replaced(text, _by_rule(rule, text))
        return text

    def _known_in(self, text: str) -> Iterator[Span]:
        """Find the session's secrets, but not within words."""
        for at in range(len(text) - KNOWN + 1) if self.known else ():
            for one in self.known.get(text[at : at + KNOWN], ()):
                end = at + len(one.text)
                if text.startswith(one.text, at) and _WHOLE.match(text, at) and _WHOLE.match(text, end):
                    yield Span(at, end, one.name, one.secret)
                    break

    def _replaced(self, text: str, spans: Iterable[Span]) -> str:
        pieces, last = list[str](), 0
        for span in spans:
            if span.begin < last or not self.rules.keep.isdisjoint({span.secret, text[span.begin : span.end]}):
                continue
            pieces += [text[last : span.begin], self._mark(span.name, span.secret)]
            last = span.end
        return "".join([*pieces, text[last:]]) if pieces else text

    def _mark(self, name: str, secret: str) -> str:
        mark = self._marks.get((name, secret))
        if mark is None:
            number = self._numbers[name] = self._numbers.get(name, 0) + 1
            mark = self._marks[name, secret] = f"[{name.upper()}_{number}]"
        if self.counts:
            self.taken.setdefault(name, Taken(self.where)).count += 1
        return mark


_WHOLE = re.compile(rf"{_START}|(?![A-Za-z0-9])")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = re.compile(r"(?:[^\\]|\A)(?:\\\\)*\\\Z")


def _escape_before(text: str, begin: int) -> int:
    """Return how many characters of a match belong to an escape of JSON before it, which stays whole."""
    if begin == 0 or text[begin - 1] != "\\" or not _ESCAPES.search(text[max(0, begin - 8) : begin]):
        return 0
    if text[begin] == "u" and _HEX.fullmatch(text[begin + 1 : begin + 5]):
        return 5
    return int(text[begin] in "nrtbf")


def _by_rule(rule: Rule, text: str) -> Iterator[Span]:
    """Find all texts of a kind."""
    group: str | int = "secret" if "secret" in rule.pattern.groupindex else 0
    at = 0
    while match := rule.pattern.search(text, at):
        begin, whole = match.span(group)
        if rule.before is not None:
            found = rule.before.match(text[max(at, begin - 512) : begin][::-1])
            begin -= found.end() if found else 0
            begin += 2 * bool(_PERCENT.match(text, begin - 1))
        ends = [whole, *reversed([one.start() for one in _BORDER.finditer(text, begin, whole)])]
        tried = ends if rule.among_others else ends[:1]
        end = next((one for one in tried if rule.holds(text[begin:one])), None)
        if end is not None and not _MARK.fullmatch(text, begin, end):
            yield from _spans(text, begin, end, rule.name)
        if rule.among_others:
            at = match.start() + 1 if end is None else end
        else:
            at = match.end()


_MARK = re.compile(r"\[?[A-Z_]{2,31}_[0-9]{1,9}\]?")
_ONE_MARK = re.compile(r"(?:(?:bearer|basic|token|apikey) )?\[(?-i:[A-Z_]{2,31})_[0-9]{1,9}\]", re.IGNORECASE)
_BORDER = re.compile(r"(?<=[0-9A-Za-z)])(?![0-9A-Za-z)])")
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}")


def _by_re2(name: str, pattern: str, text: str) -> Iterator[Span]:
    """Find all matches of a user's pattern: RE2 puts marks around them, which the text cannot hold."""
    mark = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    opens, closes = f"<{mark}>", f"</{mark}>"
    marked = pc.replace_substring_regex(
        pa.scalar(text), pattern=f"({pattern})", replacement=rf"{opens}\1{closes}"
    ).as_py()
    before, *pieces = str(marked).split(opens)
    at = len(before)
    for piece in pieces:
        secret, _, rest = piece.partition(closes)
        yield from _spans(text, at, at + len(secret), name)
        at += len(secret) + len(rest)


def _spans(text: str, begin: int, end: int, name: str) -> Iterator[Span]:
    """Iterate over a match without the escape before it, where something is left."""
    begin += _escape_before(text, begin)
    if begin < end:
        yield Span(begin, end, name, text[begin:end])


def _is_telling(secret: str) -> bool:
    """Check that a secret is nothing that other texts say, too: a word, a name in code, a short number."""
    if not KNOWN <= len(secret) <= 512 or re.search(r"\s", secret) or _SECRET_WORD.search(secret):
        return False
    if secret.isdecimal() or (secret.isalpha() and len(secret) >= 24):
        return True
    return re.search(r"[^\W\d_]", secret) is not None and re.search(r"[0-9!@#$%^&*+~|?]", secret) is not None


def _object(members: list[tuple[str, JSON]]) -> dict[str, JSON]:
    """Make a JSON object. Raises ValueError for two members of one name, of which one would be lost."""
    made = dict(members)
    if len(made) < len(members):
        raise ValueError("two members have the same name")
    return made


def _float(text: str) -> float:
    """Parse a number. Raises ValueError for one that JSON could not write again."""
    if not math.isfinite(value := float(text)):
        raise ValueError("the number is too large")
    return value
