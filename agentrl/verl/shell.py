"""Reading launch scripts without running them: variables are substituted, nothing is executed.

A value that a script would compute (`$(...)`, variables from outside, values set under a condition) is unknown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

UNKNOWN = "\x00"
"""Replaces, in a text, a part that is unknown before the script runs."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_DOCUMENT = re.compile(r"\s*(['\"]?)(\w+)\1")
_ARRAY = re.compile(r'"\$\{?(\w+\[@\]|@)\}?"')
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_DEPTH = {
    **dict.fromkeys(("if", "case", "for", "while", "until", "select", "{"), 1),
    **dict.fromkeys(("fi", "esac", "done", "}"), -1),
}
_SKIPPED = frozenset({*_DEPTH, "then", "else", "elif", "do", "!", "time", "function"})
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.FloorDiv: lambda a, b: int(a / b),
}


class Token(NamedTuple):
    """A word as it is written, quotes and all, or an operator."""

    text: str
    line: int
    is_operator: bool


class Command(NamedTuple):
    """A simple command with its variables substituted; `UNKNOWN` replaces unknown parts of words."""

    words: list[str]
    written: list[str]
    """The words as they are written, words of arrays in full; as many as `words`."""
    line: int


@dataclass(slots=True)
class Variables:
    """The variables of a script so far; arrays as lists."""

    values: dict[str, list[str]] = field(default_factory=lambda: {"HOME": [str(Path.home())], "PWD": [str(Path.cwd())]})

    def set(self, name: str, value: list[str], *, appends: bool, is_certain: bool) -> None:
        """Assign a value.

        A value set under a condition is known only where it changes nothing; a value appended to an array under a
        condition is one more unknown word.
        """
        old = self.values.get(name)
        if appends:
            is_text = len(value) == 1 and old is not None and len(old) == 1
            if is_text or is_certain:
                value = [(old or [""])[0] + value[0]] if is_text else [*(old or []), *value]
            else:
                value, is_certain = [*(old or []), UNKNOWN], True
        self.values[name] = value if is_certain or value == old else [UNKNOWN]


def commands(text: str) -> list[Command]:
    """List the simple commands of a script, in their order."""
    variables, found, depth = Variables(), [], 0
    for tokens in _simple_commands(list(_tokens(text))):
        words = [token.text for token in tokens]
        while words and words[0] in _SKIPPED:
            depth += _DEPTH.get(words[0], 0)
            if words[0] in ("for", "select") and len(words) > 1:
                variables.set(words[1], [UNKNOWN], appends=False, is_certain=True)
                words = words[:1]
            words = words[1:]
        command = _command(words, variables, tokens[0].line, is_certain=depth <= 0)
        if command is not None and command.words[:1] in (["cd"], ["pushd"], ["popd"]):
            variables.set("PWD", [UNKNOWN], appends=False, is_certain=True)
        if command is not None:
            found.append(command)
    return found


def _command(words: list[str], variables: Variables, line: int, *, is_certain: bool) -> Command | None:
    """Substitute in one command; assignments alone change the variables, and are no command."""
    leading = 0
    while leading < len(words) and _ASSIGNMENT.fullmatch(words[leading]):
        leading += 1
    rest = words[leading:]
    if not rest or rest[0] in _DECLARING:
        for word in words[:leading] + [word for word in rest[1:] if _ASSIGNMENT.fullmatch(word)]:
            _assign(word, variables, is_certain=is_certain)
        return None
    expanded = [(one, word) for word in rest for one in expand(word, variables)]
    return Command([one for one, _ in expanded], [word for _, word in expanded], line)


def _assign(word: str, variables: Variables, *, is_certain: bool) -> None:
    match = _ASSIGNMENT.fullmatch(word)
    assert match is not None
    name, plus, written = match.groups()
    if written.startswith("("):
        inner = [token.text for token in _tokens(written[1:-1]) if not token.is_operator]
        value = [one for text in inner for one in expand(text, variables)]
    else:
        value = [" ".join(expand(written, variables, splits=False))]
    variables.set(name, value, appends=bool(plus), is_certain=is_certain)


def _simple_commands(tokens: list[Token]) -> Iterator[list[Token]]:
    """Group words between operators, without redirections."""
    group: list[Token] = []
    is_target = False
    for token in tokens:
        if token.is_operator and token.text[0] in "<>":
            is_target = True
        elif token.is_operator:
            if group:
                yield group
            group, is_target = [], False
        elif is_target:
            is_target = False
        else:
            group.append(token)
    if group:
        yield group


def _tokens(text: str) -> Iterator[Token]:
    """Split a script into words and operators. Comments and here-documents are left out."""
    text = text.replace("\r\n", "\n").replace("\\\n", "\x01").removesuffix("\\")  # it continues nothing
    position, line, word = 0, 1, ""
    documents: list[str] = []
    while position < len(text):
        char = text[position]
        if char == "#" and not word:  # a backslash at its end continues nothing
            position = min(_until(text, "\n", position), _until(text, "\x01", position))
            if text.startswith("\x01", position):
                yield Token("\n", line, True)
        elif char == "(" and word.endswith("=") and _ASSIGNMENT.fullmatch(word):
            end = _closing(text, position, "(", ")")
            word, position = word + text[position:end], end
        elif char in " \t\x01\n;&|()<>":
            operator_text = _operator(text, position)
            if _is_word(word, char):
                yield Token(word.replace("\x01", ""), line, False)
            word = ""
            position += len(operator_text)
            if char not in " \t\x01":
                yield Token(operator_text, line, True)
            if operator_text in ("<<", "<<-") and (match := _DOCUMENT.match(text, position)):
                documents.append(match[2])
            if char == "\n":
                position, documents = _behind_documents(text, position, documents), []
            line = 1 + text.count("\n", 0, position) + text.count("\x01", 0, position)
        else:
            end = _part(text, position)
            word, position = word + text[position:end], end
    if word:
        yield Token(word.replace("\x01", ""), line, False)


def _is_word(word: str, char: str) -> bool:
    """Check whether `word` is one before `char`: a number before a redirection is a file's."""
    return bool(word) and not (word.isdigit() and char in "<>")


def _behind_documents(text: str, position: int, names: list[str]) -> int:
    """Find the end of the here-documents that begin at a position."""
    for name in names:
        last = re.compile(rf"^\s*{name}\s*$", re.MULTILINE).search(text, position)
        position = len(text) if last is None else last.end()
    return position


def _operator(text: str, position: int) -> str:
    """Return the operator, or the blank, at a position."""
    for known in ("<<<", "<<-", "&>>", "<<", ">>", ">&", "<&", "&>", "&&", "||", ";;"):
        if text.startswith(known, position):
            return known
    return text[position]


def _part(text: str, position: int) -> int:
    """Find the end of the item at a position: a quotation, a substitution, or one character."""
    char, following = text[position], text[position + 1 : position + 2]
    if char == "\\":
        return position + 2
    if char == "'":
        return _until(text, "'", position + 1) + 1
    if char == '"':
        position += 1
        while position < len(text) and text[position] != '"':
            position = position + 1 if text[position] == "'" else _part(text, position)
        return position + 1
    if char == "`":
        return _until(text, "`", position + 1) + 1
    if char == "$" and following in ("(", "{"):
        return _closing(text, position + 1, following, {"(": ")", "{": "}"}[following])
    return position + 1


def _until(text: str, char: str, position: int) -> int:
    found = text.find(char, position)
    return len(text) if found < 0 else found


def _closing(text: str, position: int, opening: str, closing: str) -> int:
    """Find the end of a bracketed part that opens at a position."""
    depth = 0
    while position < len(text):
        if text[position] == opening:
            depth += 1
            position += 1
        elif text[position] == closing:
            depth -= 1
            position += 1
            if depth == 0:
                return position
        elif text[position] == "#" and text[position - 1] in " \t\n\x01" and opening == "(":
            position = _until(text, "\n", position)
        else:
            position = _part(text, position)
    return position


def expand(word: str, variables: Variables, *, splits: bool = True) -> list[str]:
    """Substitute the variables of a word as it is written; without quotes a value is split at blanks."""
    fields: list[str] = []
    current, position = _home(word, variables)
    while position < len(word):
        end = _part(word, position)
        piece = word[position:end]
        position = end
        if _ARRAY.fullmatch(piece):
            # Items of an array in quotes, or of the script's arguments, which are empty.
            name = re.sub(r"\W|\[@\]", "", piece)
            values = variables.values.get(name, [UNKNOWN]) if name else []
            if values:
                fields += [(current or "") + values[0], *values[1:]]
                current = fields.pop()
        elif piece[0] in "\"'\\":
            current = (current or "") + _unquoted(piece, variables)
        elif piece[0] in "$`":
            if piece == "$" and (match := _NAME.match(word, position)):
                piece, position = piece + match[0], match.end()
            value = _value(piece, variables)
            current = _split_into(fields, current, value) if splits else (current or "") + value
        else:
            current = (current or "") + piece
    return fields + ([current] if current is not None else [])


def _home(word: str, variables: Variables) -> tuple[str | None, int]:
    """Substitute a ~ at the beginning; return (text, None where there is no ~; characters that it takes)."""
    if word != "~" and not word.startswith("~/"):
        return None, 0
    return " ".join(variables.values["HOME"]), 1


def _split_into(fields: list[str], current: str | None, value: str) -> str | None:
    """Append a value without quotes to the field that is being written, and begin another at each blank; return it."""
    first, *others = re.split(r"\s+", value) if value else [""]
    current = (current or "") + first if first or current else current
    for one in others:
        fields += [current] if current else []
        current = one
    return current


def _unquoted(piece: str, variables: Variables) -> str:
    """Return the text of a quotation or of an escaped character."""
    if piece[0] == "'":
        return piece[1:].removesuffix("'")
    if piece[0] == "\\":
        return piece[1:]
    inner, text, position = piece[1:].removesuffix('"'), "", 0
    while position < len(inner):
        if inner[position] == "\\" and inner[position + 1 : position + 2] in ('"', "\\", "$", "`"):
            text, position = text + inner[position + 1], position + 2
        elif inner[position] in "$`":
            end = _part(inner, position)
            if inner[position:end] == "$" and (match := _NAME.match(inner, end)):
                end = match.end()
            text, position = text + _value(inner[position:end], variables), end
        else:
            text, position = text + inner[position], position + 1
    return text


def _value(piece: str, variables: Variables) -> str:
    """Return the value of a substitution; `UNKNOWN` for a command, or for a value from outside."""
    if piece == "$":
        return piece
    if piece.startswith("$((") and piece.endswith("))"):
        return _arithmetic(piece[3:-2], variables)
    if piece.startswith(("$(", "`")):
        return variables.values["PWD"][0] if piece.strip("$()` ") == "pwd" else UNKNOWN
    match = _BRACED.fullmatch(piece[2:-1] if piece.startswith("${") else piece[1:])
    if match is None:
        return UNKNOWN
    name, _, operation, other = match.groups()
    values = [] if name in "@*" else variables.values.get(name)
    text = None if values is None else " ".join(values)
    if operation is None:
        return UNKNOWN if text is None else text
    return _with_default(name, text, operation, other, variables)


def _with_default(name: str, text: str | None, operation: str, other: str, variables: Variables) -> str:
    """Return the value of `${name:-other}` and the like, of a variable that is `text`, or not set."""
    is_set = bool(text) if operation.startswith(":") else text is not None
    if operation.endswith("+"):
        return " ".join(expand(other, variables, splits=False)) if is_set else ""
    if is_set and text is not None:
        return text
    if operation.endswith("?"):
        return UNKNOWN
    value = " ".join(expand(other, variables, splits=False))
    if operation.endswith("="):
        variables.values[name] = [value]
    return value


def _arithmetic(text: str, variables: Variables) -> str:
    """Compute with whole numbers; `UNKNOWN` where that is not all there is."""
    plain = " ".join(expand(text.replace('"', ""), variables, splits=False))
    plain = re.sub(r"[A-Za-z_]\w*", lambda found: " ".join(variables.values.get(found[0], [UNKNOWN])), plain)
    try:
        return str(_computed(ast.parse(plain.replace("/", "//").strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return UNKNOWN


def _computed(node: ast.expr) -> int:
    """Raises ValueError for anything but + - * / % of whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise ValueError("no whole number")
