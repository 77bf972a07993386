"""What README and docs say is true: their files are written as shown, and their commands run as shown."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest
import yaml
from aiohttp import web

from agentrl.tool.toolset import ToolSet
from agentrl.trajectory.parquet import SCHEMA
from tests.e2e.conftest import PROJECT
from tests.e2e.test_train import lines
from tests.forked import forked
from tests.runs import Overrides

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


def run(arguments: list[str], cwd: Path) -> None:
    done = forked(arguments, cwd, timeout=240)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr}"


def scaled(words: list[str], policy_dir: Path) -> list[str]:
    """The command's arguments as a test runs it: the tiny policy for the model, and few steps."""
    words = [word.replace("Qwen/Qwen3-0.6B", str(policy_dir)) for word in words]
    if "agentrl.train" in words and "--help" not in words:
        return [*(word for word in words if not word.startswith("trainer.total_training_steps")), *SMALL]
    if "agentrl.sft" in words:
        return [*words, "trainer.total_training_steps=2", "data.train_batch_size=2"]
    return words


@pytest.mark.timeout(900)
def test_the_readmes_commands_run(
    tmp_path: Path, policy_dir: Path, data_dir: Path, gsm8k_excerpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(write_files("README.md", tmp_path)) == {"my_data.py", "my_tools.py", "my_reward.py", "my_tools.yaml"}
    (tmp_path / "gsm8k").symlink_to(gsm8k_excerpt)
    (tmp_path / "runs").mkdir()
    ran = []
    for line in commands("README.md"):
        words = shlex.split(line)
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=PROJECT, check=True, capture_output=True)
        else:
            assert words[0] == "python", line
            if words[1] == "-m" and "trainer.experiment_name=longer" in words:
                # The quickstart's own assets take minutes (test_quickstart makes them): here its data, few steps.
                small = [f"data.train_files={data_dir}/train.parquet", f"data.val_files={data_dir}/val.parquet"]
                small += [f"actor_rollout_ref.model.path={policy_dir}"]
                small += [f"actor_rollout_ref.rollout.multi_turn.tool_config_path={data_dir}/tools.yaml"]
                words += small
            run(scaled(words[1:], policy_dir), tmp_path)
        ran.append(words[:3])
    assert len(ran) == 10
    assert [line["step"] for line in lines(tmp_path / "runs" / "lengths")] == [0, 1]
    assert [line["step"] for line in lines(tmp_path / "runs" / "gsm8k")] == [0, 1]


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


def test_the_quickstart_pages_code_runs(small_run: Overrides, tmp_path: Path) -> None:
    run(["-m", "agentrl.train", *small_run(*SMALL, run_dir=tmp_path / "runs" / "quickstart")], tmp_path)
    assert write_files("docs/quickstart.md", tmp_path) == ["look.py", "look_closer.py"]
    run(["look.py"], tmp_path)
    run(["look_closer.py"], tmp_path)


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
    small_run: Overrides, tmp_path: Path, row: dict[str, object], keys: list[str]
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
    run(["-m", "agentrl.train", *overrides, *SMALL, *room, *files, *keys], tmp_path)
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
