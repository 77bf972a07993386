"""Exact and bounded arithmetic for a model, without `eval`.

Values are integers and fractions, so that 0.1 + 0.2 is 0.3; only roots, and what would need very many digits, are
rounded (to 30 digits). Every operation is bounded before it is done: no expression takes more than milliseconds,
whoever wrote it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Context, Decimal, DecimalException
from fractions import Fraction
from typing import Any

import pydantic

from agentrl.tool import Tool, ToolError, ToolResponse

Number = int | Fraction

MAX_LENGTH = 1000
"""Characters of an expression."""
MAX_DEPTH = 50
"""Brackets, signs and powers within one another."""
MAX_BITS = 4096
"""Bits of every numerator and denominator on the way."""
MAX_DIGITS = 300
"""Digits of a result."""
SHOWN_DIGITS = 12
"""Significant digits of a result that has no short exact form."""
EXACT_DIGITS = 20
"""Significant digits up to which a result is shown exactly."""

_ROOTS = Context(prec=40, Emax=1000, Emin=-1000)
_SHORTER = Context(prec=30)
_SHOWN = Context(prec=SHOWN_DIGITS)
_EXACT = Context(prec=EXACT_DIGITS)
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?")
_WORD = re.compile(r"[^\W\d]\w*")
_OPERATOR = re.compile(r"\*\*|//|[-+*/%(),]")
_SAME = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


class CalculatorConfig(pydantic.BaseModel):
    """Config of the calculator, which has no keys of its own."""

    model_config = pydantic.ConfigDict(extra="forbid")


class CalculatorTool(Tool):
    """Tool `calculator(expression)`."""

    config_model = CalculatorConfig
    default_schema = {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression exactly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "Numbers, + - * / // % **, brackets, abs, min, max, round, sqrt. "
                        "Example: (3 + 4.5) * 2",
                    }
                },
                "required": ["expression"],
            },
        },
    }

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        return ToolResponse(calculate(str(arguments["expression"])))


def calculate(expression: str) -> str:
    """Evaluate an expression and write its value as a person would. Raises ToolError."""
    return show(evaluate(expression))


def evaluate(expression: str) -> Number:
    """Evaluate an expression exactly. Raises ToolError."""
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed")
    return _Parser(expression.translate(_SAME)).parse()


def show(value: Number) -> str:
    """Write an integer as it is; any other value exactly when short, else rounded to 12 significant digits.

    Raises ToolError when it is too large.
    """
    if abs(value) >= 10**MAX_DIGITS:
        raise _too_large()
    if isinstance(value, int):
        return str(value)
    exact = _EXACT.divide(Decimal(value.numerator), Decimal(value.denominator))
    decimal = exact if Fraction(exact) == value else _SHOWN.plus(exact)
    decimal = decimal.normalize(_EXACT)
    return f"{decimal:f}" if -7 <= decimal.adjusted() <= EXACT_DIGITS else f"{decimal:e}"


class _Parser:
    """Recursive-descent parser and evaluator, with Python's precedences.

    sum: product (+|- product)*;  product: signed (*|/|//|% signed)*;  signed: (+|-) signed | power;
    power: atom [** signed];  atom: number | name ( arguments ) | ( sum ).
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.in_call = False
        """True directly inside a function's brackets, where a comma separates arguments."""

    def parse(self) -> Number:
        value = self.sum()
        if self.peek() or self.at < len(self.text):
            raise self.unexpected("an operator or the end")
        return value

    def peek(self) -> str:
        """Return the operator that comes next, or nothing."""
        self.skip()
        match = _OPERATOR.match(self.text, self.at)
        return match[0] if match else ""

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, *operators: str) -> str:
        """Consume the next operator if it is one of these."""
        found = self.peek()
        if found not in operators:
            return ""
        self.at += len(found)
        return found

    def sum(self) -> Number:
        value = self.product()
        while operator := self.take("+", "-"):
            other = self.product()
            value = _bounded(value + other if operator == "+" else value - other)
        return value

    def product(self) -> Number:
        value = self.signed()
        while operator := self.take("*", "/", "//", "%"):
            value = _PRODUCTS[operator](value, self.signed())
        return value

    def signed(self) -> Number:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ToolError(f"the expression is nested more than {MAX_DEPTH} deep")
        sign = self.take("+", "-")
        value = self.signed() if sign else self.power()
        self.depth -= 1
        return -value if sign == "-" else value

    def power(self) -> Number:
        base = self.atom()
        return _power(base, self.signed()) if self.take("**") else base

    def atom(self) -> Number:
        if self.take("("):
            outer, self.in_call = self.in_call, False
            value = self.sum()
            self.close()
            self.in_call = outer
            return value
        self.skip()
        if word := _WORD.match(self.text, self.at):
            return self.call(word)
        if not self.in_call and (grouped := _GROUPED.match(self.text, self.at)):
            self.at = grouped.end()
            return _number(grouped[0].replace(",", ""))
        if number := _NUMBER.match(self.text, self.at):
            if self.in_call and re.match(r"0\d", number[0]):
                raise ToolError("write numbers without commas between the arguments of a function")
            self.at = number.end()
            return _number(number[0])
        raise self.unexpected("a number")

    def call(self, word: re.Match[str]) -> Number:
        if word[0] not in _FUNCTIONS:
            raise ToolError(f"unknown name {word[0][:40]!r}; functions are {', '.join(_FUNCTIONS)}")
        self.at = word.end()
        if not self.take("("):
            raise self.unexpected(f"( after {word[0]}")
        outer, self.in_call = self.in_call, True
        arguments = [self.sum()]
        while self.take(","):
            arguments.append(self.sum())
        self.close()
        self.in_call = outer
        return _bounded(_FUNCTIONS[word[0]](*arguments))

    def close(self) -> None:
        if not self.take(")"):
            raise self.unexpected(")")

    def unexpected(self, expected: str) -> ToolError:
        self.skip()
        rest = self.text[self.at :]
        if not rest:
            return ToolError(f"the expression ends where {expected} was expected")
        if rest[0] == "^":
            return ToolError("^ is not an operator here: write ** for powers")
        return ToolError(f"expected {expected} at position {self.at + 1}, found {rest[:20]!r}")


def _number(text: str) -> Number:
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and (len(exponent) > 5 or abs(int(exponent)) > 1000):
        raise _too_large()
    whole, _, digits = mantissa.partition(".")
    if not digits and not exponent:
        return _bounded(int(whole))
    value = Fraction(int((whole or "0") + digits), 10 ** len(digits))
    return _bounded(value * Fraction(10) ** int(exponent or 0))


def _bounded(value: Number) -> Number:
    """Reduce a value: an int where it is whole, 30 digits where it would need very many. Raises ToolError: too
    large."""
    if value.denominator == 1:
        if value.numerator.bit_length() > MAX_BITS:
            raise _too_large()
        return value.numerator
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        return _rounded(lambda: _decimal(value))
    return value


def _rounded(compute: Callable[[], Decimal]) -> Number:
    """Round to 30 digits what is computed with 40, so that 8 ** (1/3) is 2. Raises ToolError: too large."""
    try:
        value = Fraction(_SHORTER.plus(compute()))
    except DecimalException as error:
        raise _too_large() from error
    return value.numerator if value.denominator == 1 else value


def _too_large() -> ToolError:
    return ToolError(f"the numbers get too large; a result may have {MAX_DIGITS} digits")


def _nonzero(value: Number) -> Number:
    if value == 0:
        raise ToolError("division by zero")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    if isinstance(exponent, int):
        if base in (0, 1, -1):
            return int(base) ** abs(exponent)
        # x**n has at least (bits of x - 1) * n bits: looked at before it is computed.
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if bits * abs(exponent) <= MAX_BITS:
            return _bounded(Fraction(base) ** exponent)
    elif base < 0:
        raise ToolError("a negative number has no real root of this kind")
    elif exponent == Fraction(1, 2):
        return _sqrt(base)
    return _rounded(lambda: _ROOTS.power(_decimal(base), _decimal(exponent)))


def _decimal(value: Number) -> Decimal:
    return _ROOTS.divide(Decimal(value.numerator), Decimal(value.denominator))


def _sqrt(value: Number) -> Number:
    if value < 0:
        raise ToolError("sqrt of a negative number")
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top == value.numerator and bottom * bottom == value.denominator:
        return _bounded(Fraction(top, bottom))
    return _rounded(lambda: _ROOTS.sqrt(_decimal(value)))


def _round(value: Number, *digits: Number) -> Number:
    if not digits:
        return round(value)
    if len(digits) > 1 or not isinstance(digits[0], int) or abs(digits[0]) > 100:
        raise ToolError("round takes a number and, if given, how many digits (a whole number up to 100)")
    return round(Fraction(value), digits[0])


def _single(name: str, function: Callable[[Number], Number]) -> Callable[..., Number]:
    def checked(*arguments: Number) -> Number:
        if len(arguments) != 1:
            raise ToolError(f"{name} takes one argument, found {len(arguments)}")
        return function(arguments[0])

    return checked


_PRODUCTS: dict[str, Callable[[Number, Number], Number]] = {
    "*": lambda a, b: _bounded(a * b),
    "/": lambda a, b: _bounded(Fraction(a) / _nonzero(b)),
    "//": lambda a, b: _bounded(a // _nonzero(b)),
    "%": lambda a, b: _bounded(a % _nonzero(b)),
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": _single("abs", lambda value: abs(Fraction(value))),
    "min": lambda *arguments: min(arguments),
    "max": lambda *arguments: max(arguments),
    "round": _round,
    "sqrt": _single("sqrt", _sqrt),
}
