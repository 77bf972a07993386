"""Made-up world and questions about it: none can be answered without its tools.

Numbers are too large to guess, and facts are about names that exist nowhere else. All facts are in the corpus, but the
facts and the sums that validation asks about are never asked about in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Literal
from zlib import crc32

Kind = Literal["arithmetic", "search", "two_step"]
Split = Literal["train", "val"]

KINDS: tuple[Kind, ...] = ("arithmetic", "search", "two_step")
NAMES = 200
ATTRIBUTES = ("code", "age", "price")
VALIDATION_SHARE = 5
"""One fact in so many, and one sum in so many, belongs to validation."""
OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
OPERANDS = {"plus": ((100, 999), (100, 999)), "minus": ((500, 999), (100, 399)), "times": ((12, 99), (12, 99))}
"""Ranges of both operands: results have three or four digits."""
FACTORS = (2, 9)
ARITHMETIC_PHRASES = ("What is {sum}?", "Compute {sum}.", "How much is {sum}?")
SEARCH_PHRASES = (
    "What is the {attribute} of {name}?",
    "Tell me the {attribute} of {name}.",
    "Find the {attribute} of {name}.",
)
TWO_STEP_PHRASES = (
    "What is the {attribute} of {name} times {factor}?",
    "Find the {attribute} of {name} times {factor}.",
)

_STARTS = (
    "Bar",
    "Cal",
    "Dor",
    "Fen",
    "Gal",
    "Hul",
    "Jor",
    "Kel",
    "Lom",
    "Mar",
    "Nev",
    "Pol",
    "Quin",
    "Ros",
    "Sel",
    "Tam",
    "Ulf",
    "Vor",
    "Wen",
    "Zor",
)
_ENDS = ("Ba", "Dex", "Fin", "Gor", "Kin", "Lan", "Mut", "Nor", "Pex", "Vik")


@dataclass(frozen=True, slots=True)
class Fact:
    """One document of the corpus."""

    name: str
    attribute: str
    value: int

    @property
    def query(self) -> str:
        """Search text that finds the fact."""
        return f"{self.attribute} of {self.name}"

    @property
    def document(self) -> str:
        """Text of the fact in the corpus."""
        return f"{self.attribute} of {self.name}: {self.value}"


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call with its answer."""

    tool: Literal["calculator", "search"]
    argument: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """Question, the calls that answer it, and the answer."""

    kind: Kind
    question: str
    calls: tuple[Call, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class World:
    """Facts, and a source of questions for each split. The same seed makes the same world and questions."""

    seed: int
    facts: tuple[Fact, ...] = field(init=False)

    def __post_init__(self) -> None:
        rng = Random(f"facts {self.seed}")
        names = [start + end for start, end in product(_STARTS, _ENDS)]
        assert len(names) == NAMES
        facts = [Fact(name, attribute, rng.randint(100, 999)) for name in names for attribute in ATTRIBUTES]
        rng.shuffle(facts)
        object.__setattr__(self, "facts", tuple(facts))

    def facts_of(self, split: Split) -> list[Fact]:
        """List the facts that `split` may ask about."""
        return [fact for index, fact in enumerate(self.facts) if (index % VALIDATION_SHARE == 0) == (split == "val")]

    def tasks(self, split: Split, purpose: str = "rows") -> Iterator[Task]:
        """Generate tasks without end, the three kinds in turn. Another `purpose` gives other ones of the same split."""
        rng = Random(f"{purpose} {split} {self.seed}")
        facts = self.facts_of(split)
        while True:
            yield arithmetic(rng, split)
            yield search(rng, rng.choice(facts))
            yield two_step(rng, rng.choice(facts))


def arithmetic(rng: Random, split: Split) -> Task:
    """Make a sum in words whose operands belong to `split`."""
    while True:
        word = rng.choice(tuple(OPERANDS))
        (low, high), (low_right, high_right) = OPERANDS[word]
        left, right = rng.randint(low, high), rng.randint(low_right, high_right)
        expression = f"{left}{OPERATORS[word]}{right}"
        if (crc32(expression.encode()) % VALIDATION_SHARE == 0) == (split == "val"):
            break
    call = calculate(expression)
    question = rng.choice(ARITHMETIC_PHRASES).format(sum=f"{left} {word} {right}")
    return Task("arithmetic", question, (call,), call.answer)


def search(rng: Random, fact: Fact) -> Task:
    """Make a question for one fact."""
    question = rng.choice(SEARCH_PHRASES).format(attribute=fact.attribute, name=fact.name)
    return Task("search", question, (look_up(fact),), str(fact.value))


def two_step(rng: Random, fact: Fact) -> Task:
    """Make a question for a fact to be looked up and multiplied."""
    factor = rng.randint(*FACTORS)
    multiply = calculate(f"{fact.value}*{factor}")
    question = rng.choice(TWO_STEP_PHRASES).format(attribute=fact.attribute, name=fact.name, factor=factor)
    return Task("two_step", question, (look_up(fact), multiply), multiply.answer)


def look_up(fact: Fact) -> Call:
    """Make the call that finds a fact."""
    return Call("search", fact.query, fact.document)


def calculate(expression: str) -> Call:
    """Make the calculator call on `a+b`, `a-b` or `a*b`."""
    for symbol in OPERATORS.values():
        left, found, right = expression.partition(symbol)
        if found and left:
            a, b = int(left), int(right)
            return Call("calculator", expression, str({"+": a + b, "-": a - b, "*": a * b}[symbol]))
    raise ValueError(f"not a sum of two numbers: {expression!r}")
