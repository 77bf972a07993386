"""What README and docs say is true: their files are written as shown, and their commands run as shown."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import cast

import pyarrow
import pyarrow.parquet as pq
import pytest
import yaml
from aiohttp import web

from agentrl.algorithms import declare
from agentrl.config.overrides import as_config
from agentrl.system.config_files import find_file
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory.parquet import SCHEMA
from agentrl.trl import GRPOTrainer
from tests.e2e.conftest import PROJECT
from tests.e2e.test_train import lines
from tests.runs import Overrides
from tests.wheel import Run

SMALL = [
    "data.train_batch_size=4",
    "data.max_prompt_length=400",
    "data.max_response_length=40",
    "data.val_max_samples=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=1",
]
"""Added to the commands of documents so that they take seconds."""

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(document: str, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall((PROJECT / document).read_text()) if name == language]


def write_files(document: str, folder: Path) -> list[str]:
    """Write the code blocks that begin with a comment naming a file."""
    written = []
    for language in ("python", "yaml"):
        for text in blocks(document, language):
            named = re.match(r"# (\S+\.(?:py|yaml))\n", text)
            assert named, f"{document}: a {language} block without a file name: {text[:80]}"
            (folder / named.group(1)).write_text(text)
            written.append(named.group(1))
    return written


def commands(document: str) -> list[str]:
    joined = "\n".join(blocks(document, "bash")).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in joined.splitlines() if line.split("#")[0].strip()]


def scaled(words: list[str], policy_dir: Path) -> list[str]:
    """The command's arguments as a test runs it: the tiny policy for the model, and few steps."""
    words = [word.replace("Qwen/Qwen3-0.6B", str(policy_dir)) for word in words]
    if "agentrl.train" in words and "--help" not in words:
        return [*(word for word in words if not word.startswith("trainer.total_training_steps")), *SMALL]
    if "agentrl.sft" in words:
        return [*words, "trainer.total_training_steps=2", "data.train_batch_size=2"]
    return words


@pytest.mark.timeout(900)
def test_the_commands_of_a_first_run(run_wheel: Run, tmp_path: Path, policy_dir: Path, gsm8k_excerpt: Path) -> None:
    assert set(write_files("docs/first_run.md", tmp_path)) == {
        "my_data.py",
        "my_tools.py",
        "my_reward.py",
        "my_tools.yaml",
    }
    (tmp_path / "gsm8k").symlink_to(gsm8k_excerpt)
    (tmp_path / "runs").mkdir()
    ran = []
    for line in commands("docs/first_run.md"):
        words = shlex.split(line)
        assert words[0] == "python", line
        run_wheel(scaled(words[1:], policy_dir), tmp_path)
        ran.append(words[:3])
    assert len(ran) == 5
    assert [line["step"] for line in lines(tmp_path / "runs" / "lengths")] == [0, 1]
    assert [line["step"] for line in lines(tmp_path / "runs" / "gsm8k")] == [0, 1]


def test_the_readmes_commands_are_commands(
    tmp_path: Path, policy_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each resolves in a folder that has the files it names; pages run the same commands whole."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "test.parquet", "rows.parquet", "conversations.jsonl", "pairs.jsonl", "my_agent.py"):
        (tmp_path / name).touch()
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "mine" / "train.parquet").touch()
    (tmp_path / "train.sh").write_text("python3 -m verl.trainer.main_ppo data.train_batch_size=64\n", encoding="utf-8")
    resolved = dict[str, int]()
    for line in commands("README.md"):
        program, *words = shlex.split(line.replace("Qwen/Qwen3-0.6B", str(policy_dir)))
        if program == "make":
            subprocess.run(["make", "-n", *words], cwd=PROJECT, check=True, capture_output=True)
            continue
        assert (program, words[0]) == ("python", "-m"), line
        module, given = words[1], words[2:]
        if module in ("agentrl.train", "agentrl.sft", "agentrl.preferences"):
            with pytest.raises(SystemExit, match=r"^0$"):
                importlib.import_module(module).main([*given, "--cfg", "job"])
        elif module == "agentrl.plan":
            assert importlib.import_module("agentrl.plan.__main__").main(given) == 0
        elif module.startswith("agentrl.verl"):  # 1 where SGLang is not installed
            told = given if module == "agentrl.verl" else ["check", *shlex.split(line)]
            assert importlib.import_module("agentrl.verl.__main__").main(told) in (0, 1)
            assert "main_ppo, as ppo_trainer" in capsys.readouterr().out
        elif module == "data_prep.environment":
            entries = open_entries(given[given.index("--config") + 1])
            assert [entry["name"] for entry in entries] == ["verifiers"]
        else:
            assert module == "agentrl.view"
        resolved[module] = resolved.get(module, 0) + 1
    assert resolved["agentrl.train"] == 3 and len(resolved) == 8


def test_the_readmes_lines_of_python_work(tmp_path: Path, policy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the training itself, which the pages' scripts do whole."""
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("README.md", "python")
    body = ast.parse(block.replace("Qwen/Qwen3-0.6B", str(policy_dir))).body
    made = [one for one in body if isinstance(one, (ast.Assign, ast.Import, ast.ImportFrom))]
    assert [ast.unparse(one) for one in body if one not in made] == [
        "trainer.train()",
        "with agentrl.training(config) as run:\n    metrics = list(run)",
    ]
    rows = [{"prompt": [{"role": "user", "content": "What is 2 * 3?"}], "answer": 6}] * 8
    given: dict[str, object] = {"rows": rows, "correct": correct, "multiply": multiply}
    given |= {"above_median": of_a_paper, "few_answers": of_a_paper}
    exec(compile(ast.Module(list[ast.stmt](made), []), "README.md", "exec"), given)
    assert isinstance(given["trainer"], GRPOTrainer)
    config = as_config(cast("dict[str, str]", given["config"]))
    assert config.algorithm.adv_estimator == f"{__name__}:of_a_paper"


def correct(completions: list[object], **kwargs: object) -> list[float]:
    return [1.0 for _ in completions]


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


@declare()
def of_a_paper(columns: object, config: object) -> None: ...


def open_entries(config: str) -> list[dict[str, object]]:
    """Read one of the YAML files that come with the package."""
    found: list[dict[str, object]] = yaml.safe_load(Path(find_file("", config)).read_text(encoding="utf-8"))
    return found


@pytest.fixture
def gsm8k_excerpt(tmp_path: Path) -> Path:
    """A few questions in GSM8K's format, so that the README's commands run where the data set is not."""
    folder = tmp_path / "excerpt"
    folder.mkdir()
    line = '{"question": "Ann has %d pens and buys %d more. How many?", "answer": "<<%d+%d=%d>>%d pens.\\n#### %d"}\n'
    for name in ("train", "test"):
        text = "".join(line % (a, 3, a, 3, a + 3, a + 3, a + 3) for a in range(2, 18))
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def test_the_quickstart_pages_code_runs(run_wheel: Run, small_run: Overrides, tmp_path: Path) -> None:
    run_wheel(["-m", "agentrl.train", *small_run(*SMALL, run_dir=tmp_path / "runs" / "quickstart")], tmp_path)
    assert write_files("docs/quickstart.md", tmp_path) == ["look.py", "look_closer.py"]
    run_wheel(["look.py"], tmp_path)
    run_wheel(["look_closer.py"], tmp_path)


def test_the_quickstart_page_names_every_column_of_trajectories() -> None:
    text = (PROJECT / "docs" / "quickstart.md").read_text()
    assert [name for name in SCHEMA.names if f"`{name}`" not in text] == []


@pytest.mark.parametrize(("page", "config"), [("code_interpreter", "code_interpreter"), ("retriever", "remote_search")])
def test_a_file_that_a_page_shows_is_the_file(page: str, config: str) -> None:
    there = yaml.safe_load((PROJECT / "configs" / "tools" / f"{config}.yaml").read_text())
    assert there in [yaml.safe_load(block) for block in blocks(f"docs/{page}.md", "yaml")]


def test_every_link_and_picture_of_the_documents_is_there() -> None:
    documents = [PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md")]
    links = [
        (document, link)
        for document in documents
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text())
        if "://" not in link
    ]
    assert len(links) > 8
    assert [(str(document), link) for document, link in links if not (document.parent / link).exists()] == []


@pytest.mark.slice(1, "documents")
@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (
            {"agent_name": "tool_agent", "tools_kwargs": {"count": {"create_kwargs": {"start": 5}}}},
            ["actor_rollout_ref.rollout.multi_turn.tool_config_path=my_counter.yaml"],
        ),
        (
            {"agent_name": "ask_twice"},
            [
                "actor_rollout_ref.rollout.agent.agent_loop_config_path=my_loops.yaml",
                "actor_rollout_ref.rollout.agent.observers=[my_journal.py:Journal]",
            ],
        ),
        (
            {"agent_name": "calc"},
            [
                "actor_rollout_ref.rollout.agent.agent_loop_config_path=my_tags.yaml",
                "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools/calculator.yaml",
            ],
        ),
        (
            {"agent_name": "look_up"},
            [
                "actor_rollout_ref.rollout.agent.agent_loop_config_path=my_lookup.yaml",
                "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools/calculator.yaml",
            ],
        ),
    ],
    ids=["tool class", "agent loop and observer", "tags", "calls of a loop"],
)
def test_the_examples_of_docs_tools_run(
    run_wheel: Run, small_run: Overrides, tmp_path: Path, row: dict[str, object], keys: list[str]
) -> None:
    write_files("docs/tools.md", tmp_path)
    base = {
        "prompt": [{"role": "user", "content": "Say please."}],
        "data_source": "quickstart/arithmetic",
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    pq.write_table(pyarrow.Table.from_pylist([{**base, **row}] * 8), tmp_path / "rows.parquet")
    overrides = [word for word in small_run() if "tool_config_path" not in word]
    files = ["data.train_files=rows.parquet", "data.val_files=rows.parquet"]
    room = ["data.max_response_length=90", "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=8"]
    run_wheel(["-m", "agentrl.train", *overrides, *SMALL, *room, *files, *keys], tmp_path)
    metrics = lines(tmp_path / "run")[-1]
    assert metrics["left_out/failed"] == 0
    assert metrics["turns/mean"] == (2.0 if "ask_twice" in str(row) else 1.0)
    assert metrics["tool/calls_mean"] >= ("look_up" in str(row))
    seen = "".join(file.read_text() for file in (tmp_path / "run").glob("turns.*.jsonl"))
    assert ("Are you sure?" in seen) == ("my_journal" in str(keys))


async def test_the_page_of_remote_tools_tool_asks_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def weather(request: web.Request) -> web.Response:
        return web.json_response({"text": f"rain in {request.match_info['city']}"})

    app = web.Application()
    app.router.add_get("/weather/{city}", weather)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        assert set(write_files("docs/remote_tools.md", tmp_path)) == {"my_weather.py", "my_weather.yaml"}
        file = tmp_path / "my_weather.yaml"
        file.write_text(file.read_text().replace("9000", str(runner.addresses[0][1])))
        monkeypatch.syspath_prepend(tmp_path)
        tools = ToolSet.from_yaml(file)
        tools.bind(lambda text: list(text.encode()), lambda ids: bytes(ids).decode())
        session = await tools.open("t/0", {})
        result = await session.call("weather", {"city": "São Paulo/../x?"})
        assert (result.text, result.error) == ("rain in São Paulo/../x?", None)
        await tools.close()
    finally:
        await runner.cleanup()
