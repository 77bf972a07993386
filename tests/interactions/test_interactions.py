"""The gsm8k interaction, and interactions named in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, DataError
from agentrl.interaction import Interaction, InteractionResponse, load_interactions
from agentrl.trajectory import Message
from interactions.gsm8k import NO_ANSWER, WRONG, Gsm8kInteraction
from tests.naming import Names, assert_names

HERE = __name__


class Picky(Interaction):
    """Refuses its config."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        raise ConfigError("needs a licence")

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None: ...

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        raise NotImplementedError


def said(text: str) -> list[Message]:
    return [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "#### 72"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": text},
    ]


@pytest.mark.parametrize(
    ("answer", "end", "text", "final"),
    [
        ("so #### 72.00", True, None, 1.0),
        ("so #### 71", False, WRONG, 0.1),
        ("so 72", False, NO_ANSWER, 0.0),
    ],
)
async def test_gsm8k_judges_the_last_answer(answer: str, end: bool, text: str | None, final: float) -> None:
    interaction = Gsm8kInteraction({}, "gsm8k")
    await interaction.start_interaction("a", ground_truth="72", query="ignored")
    response = await interaction.generate_response("a", said(answer))
    assert (response.should_end, response.score) == (end, 0.0), "the row's scorer pays"
    assert text is None or response.text == text
    assert await interaction.calculate_score("a") == final


async def test_gsm8k_keeps_trajectories_apart_and_forgets_them() -> None:
    interaction = Gsm8kInteraction({}, "gsm8k")
    await interaction.start_interaction("a", ground_truth="1")
    await interaction.start_interaction("b", ground_truth=2)
    assert not (await interaction.generate_response("a", said("#### 2"))).should_end
    assert (await interaction.generate_response("b", said("#### 2"))).should_end
    assert [await interaction.calculate_score(name) for name in "ab"] == [0.1, 1.0]
    for name in "ab":
        await interaction.finalize_interaction(name)
    assert not interaction._ground_truth
    assert not interaction._score


async def test_gsm8k_needs_a_ground_truth() -> None:
    for kwargs in ({"query": "?"}, {"ground_truth": None}):
        with pytest.raises(DataError, match=r"interaction_kwargs of gsm8k: .*ground_truth"):
            Gsm8kInteraction({}, "gsm8k").check_row(kwargs)
        with pytest.raises(DataError, match=r"interaction_kwargs of gsm8k: .*ground_truth"):
            await Gsm8kInteraction({}, "gsm8k").start_interaction("a", **kwargs)
    Gsm8kInteraction({}, "gsm8k").check_row({"ground_truth": "72", "query": "?"})


def test_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_interactions("interactions/gsm8k.yaml")
    assert list(loaded) == ["gsm8k"]
    assert isinstance(loaded["gsm8k"], Gsm8kInteraction)
    assert load_interactions(None) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tools: []", ("key `interaction`", "'tools'")),
        ("interaction:\n  - {name: a}", ("interaction[0]", "(a)", "`class_name`", "non-empty")),
        ("interaction:\n  - {name: a, class: x.Y}", ("key 'class'", "'class_name'", "unknown")),
        ("interaction:\n  - {name: a, class_name: tools.calculator.CalculatorTool}", "subclass"),
        ("interaction:\n  - {name: a, class_name: HERE.Picky}", ("interaction[0]", "(a)")),
        (
            "interaction:\n  - {name: a, class_name: interactions.gsm8k.Gsm8kInteraction, config: {x: 1}}",
            ("interaction[0]", "(a)", "key 'x'", "unknown"),
        ),
        (
            "interaction:\n  - {name: a, class_name: interactions.gsm8k.Gsm8kInteraction, on_resume: again}",
            ("interaction[0]", "(a)", "on_resume", "'again'"),
        ),
        (
            "interaction:\n  - {name: a, class_name: interactions.environment.EnvironmentInteraction, "
            "config: {factory: HERE.Picky}, on_resume: answers}",
            ("interaction[0]", "(a)", "on_resume", "'answers'"),
        ),
        (
            "interaction:\n  - {name: a, class_name: HERE.Picky, config: {on_resume: calls}}",
            ("interaction[0]", "(a)", "`on_resume`", "`config`"),
        ),
        (
            "interaction:\n" + "  - {name: a, class_name: interactions.gsm8k.Gsm8kInteraction}\n" * 2,
            ("interaction[1]", "(a)", "'a'"),
        ),
    ],
)
def test_mistakes_name_file_entry_and_remedy(tmp_path: Path, text: str, says: Names) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("HERE", HERE))
    with pytest.raises(ConfigError) as raised:
        load_interactions(path)
    assert str(path) in str(raised.value)
    assert_names(raised.value, says)
