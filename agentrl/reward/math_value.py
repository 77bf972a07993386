"""The test of a mathematical answer: it equals the ground truth, by math-verify, and is a value.

Formulas are compared as they were read, so a problem that is written down again equals its own answer. Therefore an
answer may leave no work to its reader that the ground truth does not leave, too (`left_to_do`). Such work is seen in
the parsed tree, or in the text where parsing computes something already.

Loaded by `agentrl.reward.math_worker`, which bounds the cost of an answer; imports only `agentrl.reward.statement`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from latex2sympy2_extended.antlr_parser import PSParser
from math_verify import ExprExtractionConfig, LatexExtractionConfig, verify
from math_verify.errors import TimeoutException
from math_verify.grader import is_equation, take_last_relation
from math_verify.parser import ExtractionTarget, extract_match, get_extraction_regexes
from sympy import (
    Add,
    And,
    Basic,
    Derivative,
    Equality,
    FiniteSet,
    Float,
    Function,
    GreaterThan,
    Integer,
    Integral,
    Intersection,
    Interval,
    LessThan,
    Limit,
    MatMul,
    MatrixBase,
    MatrixExpr,
    Mul,
    N,
    Number,
    Or,
    Pow,
    Product,
    Rational,
    StrictGreaterThan,
    StrictLessThan,
    Sum,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    Union,
    exp,
    preorder_traversal,
)
from sympy.core.relational import Relational

from agentrl.reward.statement import (
    final_statement,
    hedges,
    is_glued,
    is_listed,
    is_scaled,
    last_box,
    numbers,
    other_numerals,
    relations,
    with_equation,
    without_gaps,
    without_point,
)

if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
    # The grammar for hydra-core's version of ANTLR lacks it, and percents, which are read after it, raised.
    PSParser.AtomContext.FUNC_GAMMA = lambda self: None

_COMMAND = re.compile(r"\\(?:begin|end)\s*\{\w+\}|\\[a-zA-Z]+|\\\||[!|]")
"""Signs that may compute something: a command, a factorial, a bar."""
_TEXT = re.compile(r"\\(?:text|mbox)\s*\{[^{}]*\}|_\s*\{[^{}]*\}")
_UPRIGHT = re.compile(r"\\(?:text(?:bf|it|rm|sf)?|math(?:bf|rm|sf)|mbox|operatorname)\s*\{([^{}]*)\}")
_LONGEST_PRODUCT = 3
"""Letters that may be a product of variables, as in `abc`; more are a word, whose letters have an order."""
_BASE = re.compile(r"\d\s?_\s?(?:\{\s?)?(?:\(\s?)?(\w+|\W)")
"""Base in which a number is written."""
_APPROX = re.compile(r"\\(?:approx|approxeq|thickapprox|simeq|cong|doteq)(?![a-zA-Z])|[≈≃≅]")
_MATH = re.compile(r"\$|\\[(\[]")
_EXACT, _ROUNDING = 1e-9, 0.01
"""Relative difference of two numbers that are said to be equal, and of a number and its rounding."""
_EQUALS = re.compile(r"(?<![\\<>!])=")
_DIVISION = re.compile(r"\\frac|\\div|[/:]")
_DEGREES = re.compile(r"\^\s*\{?\s*(?:\\circ|\\degree|°)")
_SPACE = re.compile(r"\\q?quad|\\[,;:! ]")
_SIDE_BY_SIDE = re.compile(
    r"(?<![a\]_^}{(\d.,-])(?:NUMBER|[({]+\s*NUMBER\s*[)}]+)(?:\s+\d|\s*[({]+\s*NUMBER\s*[)}]|(?<=[)}])\d)".replace(
        "NUMBER", r"\d+(?:\.\d+)?"
    )
)
"""Two numbers without a sign between them, where commands are written as `a`: the reader adds them."""
_MIXED = re.compile(r"\d\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_PLAIN = """
frac sqrt pi infty times cdot div pm mp cup setminus in approx le leq leqslant ge geq geqslant lt gt ne neq
text mbox mathbb mathcal left right lbrace rbrace lbrack rbrack langle rangle quad qquad circ degree emptyset
varnothing overline bar hat vec angle triangle ldots dots boxed imath ell prime
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi
varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
"""
_TABLES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array")
_TRIGONOMETRY = """
sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc asin acos atan acot asec acsc
"""
_HYPERBOLIC = [f"{prefix}{name}h" for name in ("sin", "cos", "tan") for prefix in ("", "arc", "ar", "a")]
_KINDS = {
    **{f"\\{name}": "" for name in _PLAIN.split()},
    **{f"\\{end}{{{name}}}": "" for name in _TABLES for end in ("begin", "end")},
    **{f"\\{name}": "trigonometry" for name in _TRIGONOMETRY.split()},
    **{f"\\{name}": "hyperbolic functions" for name in _HYPERBOLIC},
    **{f"\\{name}": "logarithm" for name in ("log", "ln", "lg")},
    "\\exp": "power or quotient",
    **dict.fromkeys(("|", "\\Abs", "\\lvert", "\\rvert", "\\vert"), "absolute value"),
    **dict.fromkeys(("!", "\\factorial"), "factorial"),
}
"""Kind of work of a command, or of a function by its class in sympy; "" for no work. Others are their own kind."""


class Formula(NamedTuple):
    """The last formula of a text that could be read."""

    tree: Basic | None
    """None if no formula could be read."""
    text: str
    """Its normalised LaTeX."""
    last: str
    """Text of the last formula, which is another one where that could not be read."""
    written: str = ""
    """All of a ground truth, with the units that reading drops; empty for an answer."""


def read_gold(ground_truth: str) -> Formula:
    """The formula of a ground truth. Raises ValueError without a formula."""
    written = without_gaps(without_point(ground_truth.strip().strip("$")))
    boxed = written if "\\boxed" in written else f"\\boxed{{{written}}}"
    gold = _last_formula(boxed, [LatexExtractionConfig()])
    if gold is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not mathematics that can be read")
    return gold._replace(written=ground_truth)


def is_right(solution: str, gold: Formula, *, expressions: bool = False, boxed: bool = False) -> bool:
    """Return True if a text states one answer, which equals `gold` and is a value.

    The answer is the content of the last box. Without a box it is the last sentence's statement; with `boxed`, nothing.
    With `expressions` any equal formula will do.
    """
    answer, stated = _read_answer(solution, boxed=boxed)
    if answer is None or not _states(stated, answer, gold):
        return False
    if words := _words(gold.last):
        said = _words(answer.last)
        if words == said:
            return True
        if len(words) > _LONGEST_PRODUCT or (said and _is_word(gold.last)):
            return False
    # Without math-verify's own deadlines, which count wall time, so that verdicts would depend on what else the machine
    # does.
    if not verify([gold.tree, gold.last], [answer.tree, answer.last], timeout_seconds=None):
        return False
    if answer.last == gold.last:
        return True
    return _holds(answer, stated) and (expressions or left_to_do(answer, gold) <= left_to_do(gold, gold))


def _read_answer(solution: str, *, boxed: bool) -> tuple[Formula | None, str]:
    """Read the formula of an answer, or None, and the text that states it."""
    ways = [LatexExtractionConfig(), ExprExtractionConfig()]
    box = last_box(solution)
    if box is not None:
        box = without_gaps(without_point(box))
        return _last_formula(f"\\boxed{{{box}}}", ways), box
    stated = with_equation(without_gaps(final_statement(solution)))
    if boxed or (is_glued(stated) and not _MATH.search(stated)):
        return None, stated
    return _last_formula(stated, ways), stated


def _states(stated: str, answer: Formula, gold: Formula) -> bool:
    """Return True if a text states the formula read in it, and no more, without denying, doubting or bounding it."""
    tree = gold.tree
    several = isinstance(tree, Tuple | Union | And | Or) or (isinstance(tree, FiniteSet) and len(tree) > 1)
    bounded = several or isinstance(tree, Interval | GreaterThan | LessThan | StrictGreaterThan | StrictLessThan)
    if hedges(stated) - hedges(gold.written) - ({"or", "either"} if several else set()):
        return False
    if relations(stated) - relations(gold.written) - {"approx"} - ({"less", "greater"} if bounded else set()):
        return False
    if other_numerals(stated) or set(_BASE.findall(stated)) - {"10"} - set(_BASE.findall(gold.written)):
        return False
    if is_scaled(stated) > is_scaled(gold.written) or is_listed(stated) > (is_listed(gold.written) or bounded):
        return False
    said = numbers(stated)
    return len(said) < 2 or "".join(said) in ("".join(numbers(text)) for text in (answer.text, gold.last))


def _holds(answer: Formula, stated: str) -> bool:
    """Return True if the equations between numbers in an answer are true, and its approximations roundings."""
    tree = answer.tree
    for equation in tree.atoms(Equality) if isinstance(tree, Basic) else ():
        one, other = map(_number, equation.args)
        if one is not None and other is not None and not _close(one, other, rounded=equation.has(Float)):
            return False
    parts = _APPROX.split(stated) if _APPROX.search(stated) else ()
    read = (_last_formula(f"\\boxed{{{part}}}", [LatexExtractionConfig()]) for part in parts)
    values = [None if formula is None else _number(formula.tree) for formula in read]
    exact = values[0] if values else None
    return all(exact is not None and value is not None and _close(exact, value, rounded=True) for value in values)


def _number(tree: object) -> complex | None:
    try:
        return complex(N(tree))
    except (TypeError, ValueError, AttributeError):
        return None


def _close(one: complex, other: complex, *, rounded: bool) -> bool:
    return abs(one - other) <= (_ROUNDING if rounded else _EXACT) * max(abs(one), abs(other))


def _is_word(text: str) -> bool:
    """Return True for letters that are a word or a name, whose order counts, and no product of variables."""
    plain = _UPRIGHT.sub(r"\1", text)
    return plain != text or plain.isupper() or plain in ("no", "yes", "odd")


def _words(text: str) -> str:
    """Return the words that a formula consists of, without commands for upright text; empty for any other formula."""
    plain = "".join(_UPRIGHT.sub(r"\1", text).casefold().split())
    return plain if plain.isalpha() else ""


def _last_formula(text: str, ways: list[ExtractionTarget]) -> Formula | None:
    """Find the formula that math-verify's `parse` finds, and its text; None where that raises or takes too long."""
    try:
        return _search(text, ways)
    except (Exception, TimeoutException):
        return None


def _search(text: str, ways: list[ExtractionTarget]) -> Formula | None:
    last = ""
    patterns = [(order, pattern, way) for found, way in get_extraction_regexes(ways) for pattern, order in found]
    patterns.sort(key=lambda one: one[0])
    for _, group in itertools.groupby(patterns, key=lambda one: one[0]):
        matches = [(match, way) for _, pattern, way in group for match in pattern.finditer(text)]
        matches.sort(key=lambda one: (-one[0].end(), one[0].start()))
        for match, way in matches:
            tree, said = extract_match(match, way)
            last = last or said
            if tree is not None:
                return Formula(tree, said, last)
    return Formula(None, last, last) if last else None


def left_to_do(formula: Formula, gold: Formula) -> set[str]:
    """Name the kinds of work that `formula` leaves to its reader: what it writes down, but does not compute.

    A formula is a value when nothing is left to do: whole numbers, decimals, fractions, mixed numbers, percents, a
    number times a power of ten; irrational roots, pi, e, infinity, and sums and multiples of these that combine no
    further; variables with what combines no further; tuples, sets, intervals, unions and matrices of values; equations
    and inequalities solved for a variable. Left to do are a sum, product or power of numbers, a root or a quotient that
    comes out, and a function's value. So is every command that is not known to compute nothing.
    """
    tree, text = formula.tree, formula.text
    if tree is None:
        return set()
    if is_equation(tree) and not is_equation(gold.tree):  # math-verify compares the part after the last sign
        tree, text = take_last_relation(tree).rhs, _EQUALS.split(text)[-1]
    text = _TEXT.sub("", text)
    kinds = {_KINDS.get(word, word) for word in _COMMAND.findall(text)} - {""}
    roots = text.count("\\sqrt")
    operations = len(_DIVISION.findall(text)) + text.count("^") - len(_DEGREES.findall(text)) + roots
    if operations > _operations_read(tree) - roots:
        kinds.add("power or quotient")  # it came out while it was read
    side_by_side = _SIDE_BY_SIDE.search(_COMMAND.sub("a", _SPACE.sub(" ", text)))
    if side_by_side or any(int(above) >= int(below) for above, below in _MIXED.findall(text)):
        kinds.add("sum")
    return kinds | _work(tree)


def _operations_read(tree: Basic) -> int:
    """Powers, quotients and roots; roots count twice."""
    every = [node for part in _parts(tree) for node in preorder_traversal(part)]
    fractions = sum(isinstance(node, Rational) and node.q != 1 for node in every)
    percents = sum(isinstance(node, UnevaluatedExpr) for node in every)
    return sum(isinstance(node, Pow | exp) for node in every) + fractions - percents


def _parts(tree: Basic) -> list[Basic]:
    return list(tree.flat()) if isinstance(tree, MatrixBase) else [tree]


def _work(tree: Basic) -> set[str]:
    """The kinds of work that are left in a tree, as it was written: nothing in it has been evaluated."""
    if isinstance(tree, MatrixBase):
        return set[str]().union(*map(_work, tree.flat()))
    below = set[str]().union(*map(_work, tree.args))
    if isinstance(tree, Number | UnevaluatedExpr):
        return set()
    if isinstance(tree, MatMul):
        return below | ({"matrices"} if sum(getattr(part, "is_Matrix", False) for part in tree.args) > 1 else set())
    if isinstance(tree, MatrixExpr | Intersection | Sum | Product | Integral | Limit | Derivative | Function):
        name = type(tree).__name__
        return below | {_KINDS.get(f"\\{name}", name)}
    if isinstance(tree, Add):
        return below | _work_of_sum(tree)
    if isinstance(tree, Mul):
        return below | _work_of_product(tree)
    if isinstance(tree, Pow):
        return below | _work_of_power(tree)
    if isinstance(tree, Relational):
        return below | _work_of_relation(tree)
    return below


def _work_of_sum(tree: Add) -> set[str]:
    terms = [term for part in tree.args for term in Add.make_args(part.doit())]
    kinds = [term.as_coeff_Mul()[1] for term in terms]
    return {"sum"} if len(set(kinds)) < len(kinds) else set()


def _work_of_product(tree: Mul) -> set[str]:
    factors = list(_factors(tree))
    above, below = _numbers(factors)
    kinds = {"product"} if max(len(above), len(below)) > 1 or _combine(factors) else set()
    if above and below and getattr(above[0] / below[0], "q", 1) == 1:
        kinds.add("power or quotient")
    return kinds


def _combine(factors: list[tuple[Basic, int]]) -> bool:
    """Return True if factors other than numbers combine: two roots of one kind, two of one base, two sums."""
    roots = [(base.exp, power) for base, power in factors if _is_root(base)]
    others = [base for base, _ in factors if not isinstance(base, Number) and not _is_root(base)]
    bases = [factor.as_base_exp()[0] for factor in others]
    sums = [factor for factor in others if isinstance(factor, Add) and not factor.free_symbols]
    return len(set(roots)) < len(roots) or len(set(bases)) < len(bases) or len(sums) > 1


def _is_root(base: Basic) -> bool:
    return isinstance(base, Pow) and isinstance(base.base, Number) and not isinstance(base.exp, Integer)


def _numbers(factors: list[tuple[Basic, int]]) -> tuple[list[Number], list[Number]]:
    """The numbers above and below the fraction bar, but for 1 and -1."""
    parts = [base.as_numer_denom()[::power] for base, power in factors if isinstance(base, Number)]
    above, below = ([pair[side] for pair in parts if abs(pair[side]) != 1] for side in (0, 1))
    return above, below


def _factors(tree: Mul, power: int = 1) -> Iterator[tuple[Basic, int]]:
    for part in tree.args:
        if isinstance(part, Mul):
            yield from _factors(part, power)
        elif isinstance(part, Pow) and part.exp == -1:
            yield from _factors(part.base, -power) if isinstance(part.base, Mul) else [(part.base, -power)]
        elif not isinstance(part, UnevaluatedExpr):
            yield part, power


def _work_of_power(tree: Pow) -> set[str]:
    base, power = tree.args
    if base.free_symbols or power.free_symbols:
        return set()
    if isinstance(power, Integer):
        return set() if base == 10 or (power == -1 and not isinstance(base, Add)) else {"power or quotient"}
    return {"root"} if isinstance(base, Add) or tree.doit().is_rational else set()


def _work_of_relation(tree: Relational) -> set[str]:
    """An equation between variables is one; one of a single variable with numbers is to be solved for it."""
    solved = len(tree.free_symbols) != 1 or any(isinstance(side, Symbol) for side in tree.args)
    return set() if solved else {"solution"}
