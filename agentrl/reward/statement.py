"""The part of a text that is its final answer, and words and signs by which it states something else than one value.

Every function takes linear time. Imports nothing of ours: `math_worker` loads this file by its path.
"""

from __future__ import annotations

import re
import unicodedata

_HEDGES = """
no not never neither nor none cannot without except excluding unless unlike wrong incorrect false untrue instead
maybe perhaps possibly might may could either or versus vs between among unknown undefined unclear
approximately approx about around roughly nearly almost circa less more fewer greater larger smaller bigger lower
higher least most over under above below beyond exceeds exceed outside up
half twice double triple thrice halves quarter quarters thirds fourths fifths sixths eighths tenths hundredths
thousandths hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens
lakh lakhs crore crores squared cubed factorial root minus negative plus reciprocal inverse opposite but
"""
HEDGES = frozenset(_HEDGES.split())
"""Words that turn the statement of a number into a statement of another number, of several, or of no number."""
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_SENTENCE_END = re.compile(r"[.!?](?=\s)")
_COURTESY = re.compile(r"I hope (?:it|this) is correct\.?\Z", re.IGNORECASE)
_DISPLAYS = (("\\[", "\\]"), ("$$", "$$"))
_RELATIONS = {
    **dict.fromkeys(("ne", "neq", "not", "neg", "lnot", "notin", "≠", "!=", "¬"), "not"),
    **dict.fromkeys(("lt", "less", "ll", "<", "le", "leq", "leqslant", "leqq", "≤", "<="), "less"),
    **dict.fromkeys(("gt", "gg", ">", "ge", "geq", "geqslant", "geqq", "≥", ">="), "greater"),
    **dict.fromkeys(("approx", "approxeq", "thickapprox", "simeq", "cong", "doteq", "≈", "≃", "≅"), "approx"),
    **dict.fromkeys(("sim", "equiv", "mid", "nmid", "propto", "asymp", "parallel", "perp", "≡", "∝"), "related"),
    **dict.fromkeys(("to", "rightarrow", "longrightarrow", "Rightarrow", "Longrightarrow", "implies"), "arrow"),
    **dict.fromkeys(("xrightarrow", "leadsto", "mapsto", "gets", "leftarrow", "Leftarrow", "iff"), "arrow"),
    **dict.fromkeys(("leftrightarrow", "Leftrightarrow", "→", "⇒", "⟹", "⇔", "->", "=>"), "arrow"),
    **dict.fromkeys(("nleq", "ngeq", "nless", "ngtr", "lneq", "gneq", "lneqq", "gneqq", "prec", "succ"), "related"),
    **dict.fromkeys(("preceq", "succeq", "lesssim", "gtrsim", "subset", "subseteq", "supset", "supseteq"), "related"),
    **dict.fromkeys(("lor", "vee", "land", "wedge", "∨", "∧"), "logic"),
    **dict.fromkeys(("ldots", "dots", "cdots", "dotsc", "…", "..."), "dots"),
    "?": "question",
}
"""Signs, and commands without their backslash, to what they relate by."""
_SIGN = re.compile(r"\\([a-zA-Z]+)|(!=|<=|>=|->|=>|\.\.\.|[≠¬<≤>≥≈≃≅≡∝→⇒⟹⇔∨∧…?])")
_LIMIT = re.compile(r"\\lim\s?_\s?\{[^{}]*\}(?=\s?[^\s$])")
_NUMBER = re.compile(r"(?:\d[\d,]*)?\.?\d+|\d")
_GLUED = re.compile(r"\d[^\W\d]|\d\^|\d\s?\\(?!text|math|mbox|q?quad|degree|circ)[a-zA-Z]")
_UPRIGHT = r"\\(?:text|math|mbox)\w{0,2}\s?\{"
_MULTIPLIER = re.compile(
    rf"(?<![\^_])(?:\d(?:{_UPRIGHT})?[KMB](?![a-zA-Z])|\d\s?(?:[‰‱]|\\permil)|"
    rf"\d(?:\s|~|\\[,;:! ]){{0,3}}(?:{_UPRIGHT}\s{{0,3}})?(?:k|bn|mn)(?![a-zA-Z]))"
)
_ARITHMETIC = re.compile(r"[-+*/×÷·−^().,\d\s=]+")
_AROUND = " \t.,*"
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_GAP = r"(?:\\[,;: ]|~)"
_GROUPED = re.compile(rf"(?<![\d.^_])(?<!\d~)(?<!\d\\[,;: ])\d{{1,3}}(?:{_GAP}\d{{3}})+(?!\d|{_GAP}\d)")
"""Whole number whose digits stand in groups of three, with a gap between them."""
_PERCENT = re.compile(rf"(?<=\d)\s*(?:{_GAP}\s*)+(?=\\?%)")
_LISTED = re.compile(r"\\(?:[{}]|[lr]brace|[lr]angle)(?![a-zA-Z])")
_TAG = re.compile(r"</?\w+>")
_UNIT_POWER = re.compile(r"(?<=[a-zA-Z}])\s?\^\s?\{?[23]\}?")


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`; None without a box, and "" for an unclosed box."""
    place = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if place < 0:
        return None
    rest = text[place:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):
        return (rest.partition("$")[0].split() or [""])[0]
    depth, escaped = 0, False
    for end, sign in enumerate(rest):
        if not escaped and sign in "{}":
            depth += 1 if sign == "{" else -1
            if not depth:
                return rest[1:end]
        escaped = sign == "\\" and not escaped
    return ""


def without_gaps(text: str) -> str:
    r"""Return a text without gaps in whole numbers and before percents, as in `10\,000` and `30\,\%`.

    The reader of formulas takes the first for a product, and does not read the second.
    """
    return _PERCENT.sub("", _GROUPED.sub(lambda match: re.sub(_GAP, "", match[0]), text))


def without_point(text: str) -> str:
    """Return a formula without a sentence's point at its end, as in `10.`, which the reader of formulas cannot read."""
    bare = text.rstrip()
    return bare[:-1] if bare.endswith(".") and not bare.endswith("..") else text


def final_statement(text: str) -> str:
    """Return the last sentence of a text without its tags: a display of mathematics at its end, or of its last line."""
    text = _TAG.sub(" ", text).rstrip()
    if courtesy := _COURTESY.search(text[-40:]):
        text = text[: len(text) - len(courtesy[0])].rstrip()
    for opening, closing in _DISPLAYS:
        bare = text.rstrip(".").rstrip()
        if bare.endswith(closing) and (begin := bare.rfind(opening, 0, len(bare) - len(closing))) >= 0:
            return bare[begin:]
    line = text[max(text.rfind("\n"), text.rfind("\r")) + 1 :]
    ends = [match.end() for match in _SENTENCE_END.finditer(line)]
    return line[ends[-1] if ends else 0 :].strip()


def hedges(text: str) -> set[str]:
    """Return the words of `HEDGES` in a text, and words that end in n't. Commands are no words."""
    words = _WORD.findall(_COMMAND.sub(" ", text).casefold().replace("\u2019", "'"))
    return {word for word in words if word in HEDGES or word.endswith("n't")}


def relations(text: str) -> set[str]:
    """Return the kinds of signs in a text, other than an equals sign, that relate one thing to another."""
    found = (_RELATIONS.get(command or sign) for command, sign in _SIGN.findall(_LIMIT.sub("", text)))
    return {kind for kind in found if kind is not None}


def numbers(text: str) -> list[str]:
    """Return the numbers of a text, without the powers of units, as they are written but for commas."""
    return [number.replace(",", "") for number in _NUMBER.findall(_UNIT_POWER.sub("", text))]


def is_glued(text: str) -> bool:
    r"""Say whether a letter or a command stands right after a digit, as in 34x, 34th and 34\pi."""
    return _GLUED.search(text) is not None


def is_scaled(text: str) -> bool:
    r"""Say whether a letter or sign multiplies a number, as in 34k, 34\text{M}, 34 bn and 34‰.

    K, M and B do so without a space: `34\text{ K}` is a temperature.
    """
    return _MULTIPLIER.search(text) is not None


def is_listed(text: str) -> bool:
    r"""Say whether a text writes a set or a vector, `\{34\}` or `\langle 34 \rangle`."""
    return _LISTED.search(text) is not None


def with_equation(text: str) -> str:
    """Return a sentence whose one equation between numbers stands between dollar signs."""
    found = [run for run in _ARITHMETIC.finditer(text) if "=" in run[0]]
    if len(found) != 1:
        return text
    run = found[0]
    equation, behind = run[0].strip(_AROUND).lstrip("= "), text[run.end() :]
    if "=" not in equation or not equation[-1].isdigit() or (behind and run[0][-1] not in _AROUND):
        return text
    return f"{text[: run.start()]} {run[0].partition(equation)[0]}${_THOUSANDS.sub('', equation)}$ {behind}"


def other_numerals(text: str) -> bool:
    """Say whether a digit of another kind stands in a text, as in ½ or ², other than after a letter."""
    return any(
        unicodedata.category(sign) in ("No", "Nl") and not before.isalpha()
        for before, sign in zip(" " + text, text, strict=False)
    )
