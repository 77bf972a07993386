"""Secrets and personal data in texts, replaced by marks such as [EMAIL_1].

In one session the same text gets the same mark, so that a tool's arguments and its answer still agree. No pattern here
looks back over what it has read, and each has bounds; patterns of users are matched by RE2 (in pyarrow), which has no
others. So the time is linear in the text, whatever it holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from agentrl.errors import DataError
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
    """Check an IBAN's length and its check digits (ISO 13616)."""
    bare = text.replace(" ", "")
    if not 15 <= len(bare) <= 34:
        return False
    return int("".join(str(int(one, 36)) for one in bare[4:] + bare[:4])) % 97 == 1


def is_phone(text: str) -> bool:
    """Check the number of digits."""
    return 9 <= len(_digits(text)) <= 15


def is_address(text: str) -> bool:
    """Check the four numbers of an IP address that is not of the machine itself."""
    return all(int(part) < 256 for part in text.split(".")) and not text.startswith(("127.", "0.0.0."))


_WORDS = (
    r"pass(?:word|wd|phrase|code)|pwd|secret|api[_-]?key|(?:access|secret|private|signing|encryption)[_-]?key"
    r"|(?:access|auth|refresh|bearer|session|api)[_-]?token|client[_-]?secret|credentials?|authorization"
)
_SECRET_WORD = re.compile(_WORDS, re.IGNORECASE)
SECRET_MEMBER = re.compile(rf"[\w.-]{{0,64}}(?:{_WORDS}|cookie)", re.IGNORECASE)
"""Names of members whose text is a secret."""
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
_VALUE = r"(?P<secret>[^\s\"'\\,;&<>\[\](){}$]{%d,256})"

DEFAULT = (
    Rule(
        "private_key",
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:(?:[A-Za-z0-9+/=\s\\:,.]|-(?!----)){0,20000}+-----END [A-Z0-9 ]{0,40}-----"
            r"|(?:(?:\s|\\+[nr]){0,8}[A-Za-z0-9+/=]{16,2048}){0,400})"
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
            r"\b(?:bearer|basic)\s{1,4}(?P<secret>(?=[A-Za-z._~+/=-]{0,64}[0-9])[A-Za-z0-9._~+/=-]{12,4096})", re.I
        ),
        hint=lambda text: "bearer" in text.lower() or "basic" in text.lower(),
    ),
    Rule(
        "password",
        re.compile(rf"(?:{_WORDS})\\?[\"']?\s{{0,4}}(?:=>?|:=)\s{{0,4}}\\?[\"']?{_VALUE % 4}", re.I),
        hint=_named,
    ),
    Rule(
        "password",
        re.compile(
            rf"(?:{_WORDS})\\?[\"']?\s{{0,4}}(?:is\s|:)\s{{0,4}}\\?[\"']?"
            rf"(?=[^\s\"'\\,;&<>\[\](){{}}$]{{0,64}}[0-9!@#%^*_+~|?-]){_VALUE % 4}",
            re.I,
        ),
        hint=_named,
    ),
    Rule(
        "password",
        re.compile(r"(?<=://)[^\s/:@\"'\\]{0,128}:(?P<secret>[^\s/@\"'\\]{1,256})@"),
        hint=_has("://"),
    ),
    Rule(
        "email",
        re.compile(r"(?<![\w.%+-])[\w.%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![A-Za-z])"),
        hint=_has("@"),
    ),
    Rule(
        "iban",
        re.compile(_START + r"[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])"),
        is_iban,
    ),
    Rule("card", re.compile(_not_after("0-9A-Za-z.") + r"(?:[0-9][ -]?){12,18}[0-9](?![0-9A-Za-z])"), is_card),
    Rule(
        "ssn", re.compile(_not_after("0-9A-Za-z-") + r"(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![0-9-])")
    ),
    Rule(
        "phone",
        re.compile(
            _not_after("0-9A-Za-z+.") + r"(?:\+[0-9]{1,3}[ .-]?(?:\(?[0-9]{1,5}\)?[ ./-]?){2,6}[0-9]{2,4}"
            r"|\([0-9]{3}\) ?[0-9]{3}[ .-][0-9]{4}|[0-9]{3}[.-][0-9]{3}[.-][0-9]{4})(?![0-9A-Za-z-])"
        ),
        is_phone,
    ),
)
OPTIONAL = (
    Rule("ip", re.compile(_not_after("0-9A-Za-z.-") + r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![0-9A-Za-z.-])"), is_address),
)
"""Rules that are off unless a file turns them on: versions look like addresses."""
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
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
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
    forms = {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], quote(text, safe="")}
    forms |= {json.dumps(one)[1:-1] for one in forms}
    return re.compile("|".join(re.escape(one) for one in sorted(forms, key=len, reverse=True)), re.IGNORECASE)


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
    _marks: dict[tuple[str, str], str] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _done: dict[str, str] = field(default_factory=dict)
    """Texts of the session, scrubbed."""
    _clean: set[str] = field(default_factory=set)
    """Texts of all sessions in which nothing was found."""
    _kept: int = 0
    """Number of characters of these."""

    def begin(self) -> None:
        """Begin a session: marks count from 1 again."""
        self._marks.clear()
        self._numbers.clear()
        self._done.clear()

    def json(self, value: JSON) -> JSON:
        """Replace in every text of a value, keys included, in numbers that are a card's, and in JSON within texts."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(name): self._member(name, item) for name, item in value.items()}
        if isinstance(value, Sequence):
            return [self.json(item) for item in value]
        may_be = isinstance(value, int) and (value > 10**11 or self.rules.literals or self.rules.patterns)
        if may_be and not isinstance(value, bool):
            shown = self.text(str(value))
            return value if shown == str(value) else shown
        return value

    def _member(self, name: str, item: JSON) -> JSON:
        """Replace in a member. Under a name that says so, a text is a secret as a whole."""
        is_on = any(rule.name == "password" for rule in self.rules.built_in)
        if is_on and isinstance(item, str) and item and SECRET_MEMBER.fullmatch(name):
            whole = self.text(item)
            return whole if whole != item or item in self.rules.keep else self._mark("password", item)
        return self.json(item)

    def text(self, text: str) -> str:
        """Replace in a text. JSON in it stays JSON. Half a surrogate pair, which no file can hold, becomes a ?."""
        if not text.isascii():
            text = text.encode(errors="replace").decode()
        if len(text) < 4 or text in self._clean:
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
                value: JSON = json.loads(bare)
                changed = self.json(value)
                return text if changed == value else json.dumps(changed, ensure_ascii=False)
            except (ValueError, RecursionError):
                pass  # other text, and JSON so deep that it is scrubbed as text
        for secret, pattern in self.rules.literals:
            text = self._replaced(text, "secret", ((*m.span(), secret) for m in pattern.finditer(text)))
        for name, written in self.rules.patterns:
            text = self._replaced(text, name, _by_re2(written, text))
        for rule in self.rules.built_in:
            if rule.hint(text):
                text = self._replaced(text, rule.name, _by_rule(rule, text))
        return text

    def _replaced(self, text: str, name: str, spans: Iterator[tuple[int, int, str]]) -> str:
        pieces, last = list[str](), 0
        for begin, end, secret in spans:
            if name != "secret":
                begin += _escape_before(text, begin)
            if begin < last or begin >= end or secret in self.rules.keep or text[begin:end] in self.rules.keep:
                continue
            pieces += [text[last:begin], self._mark(name, secret if name == "secret" else text[begin:end])]
            last = end
        return "".join([*pieces, text[last:]]) if pieces else text

    def _mark(self, name: str, secret: str) -> str:
        mark = self._marks.get((name, secret))
        if mark is None:
            number = self._numbers[name] = self._numbers.get(name, 0) + 1
            mark = self._marks[name, secret] = f"[{name.upper()}_{number}]"
        if self.counts:
            self.taken.setdefault(name, Taken(self.where)).count += 1
        return mark


_HEX = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = re.compile(r"(?:[^\\]|\A)(?:\\\\)*\\\Z")


def _escape_before(text: str, begin: int) -> int:
    """Return how many characters of a match belong to an escape of JSON before it, which stays whole."""
    if begin == 0 or text[begin - 1] != "\\" or not _ESCAPES.search(text[max(0, begin - 8) : begin]):
        return 0
    if text[begin] == "u" and _HEX.fullmatch(text[begin + 1 : begin + 5]):
        return 5
    return int(text[begin] in "nrtbf")


def _by_rule(rule: Rule, text: str) -> Iterator[tuple[int, int, str]]:
    group: str | int = "secret" if "secret" in rule.pattern.groupindex else 0
    for match in rule.pattern.finditer(text):
        if rule.holds(match[group]) and not _MARK.fullmatch(match[group]):
            yield (*match.span(group), match[group])


_MARK = re.compile(r"\[?[A-Z_]{2,31}_[0-9]{1,9}\]?")


def _by_re2(pattern: str, text: str) -> Iterator[tuple[int, int, str]]:
    """Find all matches of a user's pattern: RE2 puts marks around them."""
    opens, closes = [mark for mark in map(chr, range(0xFDD0, 0xFDEF)) if mark not in text][:2]
    marked = pc.replace_substring_regex(
        pa.scalar(text), pattern=f"({pattern})", replacement=rf"{opens}\1{closes}"
    ).as_py()
    before, *pieces = str(marked).split(opens)
    at = len(before)
    for piece in pieces:
        secret, _, rest = piece.partition(closes)
        yield at, at + len(secret), secret
        at += len(secret) + len(rest)
