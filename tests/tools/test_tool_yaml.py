"""Tools named in YAML, and what a mistake in it is answered with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.tool import Tool, ToolResponse, tool
from agentrl.tool.toolset import ToolSet
from tests.naming import Names, assert_names, naming

Bind = Callable[[ToolSet], ToolSet]
HERE = __name__


class Echo(Tool):
    """Answers with its config."""

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        return ToolResponse(str(self.own_config))


class Counting(Echo):
    """Gives a reward by its calls."""

    async def calc_reward(self, instance_id: str) -> float:
        return 1.0


class Exploding(Echo):
    """Cannot be made."""

    def __init__(self, config: dict[str, Any], schema: dict[str, Any]) -> None:
        raise OSError("no licence")


def double(n: int) -> int:
    """Double it."""
    return 2 * n


@tool(timeout=3)
def triple(n: int) -> int:
    """Triple it."""
    return 3 * n


def untyped(n):  # type: ignore[no-untyped-def]
    return n


SCHEMA = "{type: function, function: {name: echo, description: Echoes., parameters: {type: object, properties: {}}}}"


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], ToolSet]:
    def write(text: str) -> ToolSet:
        path = tmp_path / "my_tools.yaml"
        path.write_text(text.replace("HERE", HERE))
        return ToolSet.from_yaml(path, timeout=7, max_response_tokens=999)

    return write


async def test_classes_functions_and_limits(load: Callable[[str], ToolSet], bound: Bind, tmp_path: Path) -> None:
    toolset = bound(
        load(
            f"""
tools:
  - class_name: HERE.Echo
    config: {{type: native, max_concurrent: 2, own: "${{yaml_dir}}/x", list: ["${{yaml_dir}}"]}}
    tool_schema: {SCHEMA}
  - function: HERE.double
    config: {{timeout: 1.5, on_error: fail}}
  - function: HERE.triple
  - class_name: tools.calculator.CalculatorTool
"""
        )
    )
    assert toolset.names == ["echo", "double", "triple", "calculator"]
    limits = [slot.limits for slot in toolset.slots.values()]
    assert [limit.timeout for limit in limits] == [7, 1.5, 3, 7]
    assert [limit.max_response_tokens for limit in limits] == [999] * 4
    assert [limit.max_concurrent for limit in limits] == [2, 1024, 1024, 1024]
    assert [limit.on_error for limit in limits] == ["tell", "fail", "tell", "tell"]
    session = await toolset.open("i", {})
    assert (await session.call("echo", {})).text == str({"own": f"{tmp_path}/x", "list": [str(tmp_path)]})
    assert (await session.call("double", {"n": 4})).text == "8"
    assert (await session.call("triple", {"n": 4})).text == "12"
    assert (await session.call("calculator", {"expression": "2*3"})).text == "6"


@pytest.mark.parametrize(("said", "found"), [("calls", "calls"), ("null", "none"), ("none", "none")])
def test_on_resume_comes_before_what_the_class_says(load: Callable[[str], ToolSet], said: str, found: str) -> None:
    toolset = load(f"tools: [{{class_name: HERE.Counting, config: {{on_resume: {said}}}, tool_schema: {SCHEMA}}}]")
    assert toolset.slots["echo"].on_resume == found


MINE = """
from agentrl.tool import Tool, ToolResponse

class Counter(Tool):
    async def execute(self, instance_id, arguments):
        return ToolResponse("1")

def add(n: int, m: int) -> int:
    "Add."
    return n + m
"""


async def test_a_class_and_a_function_of_a_file(load: Callable[[str], ToolSet], bound: Bind, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    counter = f"class_name: '${{yaml_dir}}/mine.py:Counter', tool_schema: {SCHEMA}"
    toolset = bound(load(f"tools: [{{{counter}}}, {{function: '${{yaml_dir}}/mine.py:add'}}]"))
    session = await toolset.open("i", {})
    assert (await session.call("echo", {})).text == "1"
    assert (await session.call("add", {"n": 2, "m": 3})).text == "5"


def test_no_path_is_no_tools() -> None:
    assert ToolSet.from_yaml(None).names == []


@pytest.mark.parametrize("name", ["tools/search.yaml"])
def test_our_own_files_are_found_from_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.jsonl").write_text('{"contents": "a fact"}')
    assert ToolSet.from_yaml(name).names == ["search"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tools: [", "YAML"),
        ("- a", "key `tools`"),
        ("tool: []", ("key `tools`", "'tool'")),
        ("tools: {a: 1}", "`tools`"),
        ("tools: []\nmcp: []", ("key 'mcp'", "unknown")),
        ("tools: [x]", ("tools[0]", "found 'x'")),
        ("tools:\n  - {}", "`class_name`"),
        ("tools:\n  - {class_name: a.B, class_name: a.C}", ("'class_name'", "twice")),
        ("tools:\n  - {class_name: HERE.Echo, function: HERE.double}", "`class_name`"),
        ("tools:\n  - {class_name: HERE.Echo, confg: {}}", ("key 'confg'", "'config'", "unknown")),
        ("tools:\n  - {class_name: HERE.Echo, config: 3}", "`config`"),
        ("tools:\n  - {class_name: 3}", ("`class_name`", "non-empty", "found 3")),
        (
            "tools:\n  - {class_name: Echo}",
            ("`my.module.Name`", "path/to/file.py:Name", "found 'Echo'"),
        ),
        (
            "tools:\n  - {class_name: '${yaml_dir}/mine.py:Countre'}",
            ("tools[0]", "(DIR/mine.py:Countre)", "DIR/mine.py", "'Countre'", "'Counter'", "Counter"),
        ),
        ("tools:\n  - {class_name: '${yaml_dir}/mine.py:add'}", "agentrl.tool.Tool"),
        ("tools:\n  - {class_name: '${yaml_dir}/other.py:X'}", "DIR/other.py"),
        (
            "tools:\n  - {class_name: HERE.Ecko}",
            ("'Ecko'", "'Echo'", "Counting", "Echo", "Exploding"),
        ),
        (
            "tools:\n  - {class_name: HERE.double}",
            ("agentrl.tool.Tool", "agentrl.tool.ToolSource", "found <function", "double"),
        ),
        (
            "tools:\n  - {class_name: tools.calculater.X}",
            ("'tools.calculater'", "'calculator'"),
        ),
        ("tools:\n  - {class_name: nowhere.X}", "'nowhere'"),
        ("tools:\n  - {class_name: HERE.Echo}", ("TypeError", "default_schema")),
        ("tools:\n  - {class_name: HERE.Exploding, tool_schema: SCHEMA}", "OSError"),
        ("tools:\n  - {class_name: HERE.Echo, tool_schema: {name: x}}", ("tool_schema:", "{type: function")),
        (
            "tools:\n  - {class_name: HERE.Echo, tool_schema: {function: {name: a b}}}",
            ("function.name", "64 letters"),
        ),
        (
            "tools:\n  - {class_name: HERE.Echo, tool_schema: {function: {name: a, parameters: {type: object,"
            " properties: {x: {type: int}}}}}}",
            ("tool_schema", "'a'", "function.parameters", "JSON", "valid"),
        ),
        (
            "tools:\n  - {class_name: HERE.Echo, tool_schema: {function: {name: a, parameters: {type: object,"
            ' properties: {x: {$ref: "http://127.0.0.1:9/x.json"}}}}}}',
            "#/$defs/name",
        ),
        (
            "tools:\n  - {class_name: HERE.Echo, tool_schema: {function: {name: a, parameters: {type: array}}}}",
            ("JSON", "object"),
        ),
        (
            "tools:\n  - {class_name: HERE.Echo, tool_schema: SCHEMA, config: {timeout: -1}}",
            ("'echo'", "found -1"),
        ),
        (
            "tools:\n  - {class_name: HERE.Echo, tool_schema: SCHEMA, config: {on_error: ignore}}",
            ("on_error:", "'tell'", "'fail'", "found 'ignore'"),
        ),
        (
            "tools:\n  - {class_name: HERE.Echo, tool_schema: SCHEMA, config: {on_resume: again}}",
            ("tools[0]", "(HERE.Echo)", "'echo'", "on_resume", "'answers'", "'calls'", "'none'", "found 'again'"),
        ),
        (
            "tools:\n  - {class_name: HERE.Counting, tool_schema: SCHEMA, config: {on_resume: answers}}",
            ("tools[0]", "(HERE.Counting)", "'echo'", "on_resume", "'answers'"),
        ),
        (
            "tools:\n  - {class_name: tools.code_interpreter.CodeInterpreterTool, config: {url: 'http://x', session: "
            "true, on_resume: answers}}",
            ("calls", "none", "or none"),
        ),
        (
            "tools:\n  - {class_name: HERE.Echo, tool_schema: SCHEMA, config: {type: grpc}}",
            ("tools[0]", "(HERE.Echo)", "of tool"),
        ),
        (
            "tools:\n  - {class_name: tools.calculator.CalculatorTool, config: {time_out: 3}}",
            ("config:", "key 'time_out'", "'timeout'", "unknown"),
        ),
        ("tools:\n  - {class_name: tools.search.SearchTool}", ("config:", "key 'corpus_path'", "missing")),
        (
            "tools:\n  - {class_name: tools.search.SearchTool, config: {corpus_path: /no/x.jsonl}}",
            "/no/x.jsonl",
        ),
        (
            "tools:\n  - {class_name: tools.search.SearchTool, config: {corpus_path: x, top_k: 3}}",
            ("key 'top_k'", "'topk'", "unknown"),
        ),
        (
            "tools:\n  - {class_name: tools.remote_search.RemoteSearchTool, config: {url: '127.0.0.1:8000'}}",
            ("url:", "http://HOST:PORT", "found '127.0.0.1:8000'"),
        ),
        (
            "tools:\n  - {class_name: tools.remote_search.RemoteSearchTool, config: {url: 'http://127.0.0.1:1'},"
            " tool_schema: {function: {name: look, parameters: {type: object, properties: {q: {}}}}}}",
            ("tool_schema", "`query`"),
        ),
        ("tools:\n  - {function: HERE.doubble}", ("'doubble'", "'double'")),
        ("tools:\n  - {function: HERE.Echo}", "`class_name`"),
        ("tools:\n  - {function: HERE.untyped}", ("untyped", "`n`")),
        ("tools:\n  - {function: HERE.double, tool_schema: {}}", ("key 'tool_schema'", "unknown")),
        (
            "tools:\n  - {function: HERE.double, config: {max_concurent: 3}}",
            ("key 'max_concurent'", "'max_concurrent'", "unknown"),
        ),
        (
            "tools:\n  - {function: HERE.double}\n  - {function: HERE.double}",
            ("tools[1]", "(HERE.double)", "'double'"),
        ),
    ],
)
def test_mistakes_name_file_entry_and_remedy(
    load: Callable[[str], ToolSet], text: str, says: Names, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ConfigError) as raised:
        load(text.replace("SCHEMA", SCHEMA))
    message = str(raised.value).replace(HERE, "HERE").replace(str(tmp_path), "DIR")
    assert "my_tools.yaml" in message
    assert_names(message, says)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with naming(ConfigError, "nope.yaml"):
        ToolSet.from_yaml(tmp_path / "nope.yaml")


def run_in(folder: Path, class_name: str) -> str:
    """The error of loading a tool class in a process that starts in `folder`, like `python -m agentrl.train`."""
    (folder / "t.yaml").write_text(f"tools:\n  - class_name: {class_name}\n")
    program = (
        "import sys; sys.path.insert(0, '')\n"
        "from agentrl.errors import UserError\n"
        "from agentrl.tool.toolset import ToolSet\n"
        "try: print(ToolSet.from_yaml('t.yaml').names)\n"
        "except UserError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_users_own_tools_folder_adds_to_ours(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "mine.py").write_text(
        "from tools.calculator import CalculatorTool\nclass Mine(CalculatorTool): ...\n"
    )
    assert run_in(tmp_path, "tools.calculator.CalculatorTool") == "['calculator']"
    assert run_in(tmp_path, "tools.mine.Mine") == "['calculator']"


@pytest.mark.parametrize("hiding", ["tools/__init__.py", "tools.py"])
def test_a_users_file_that_hides_ours_is_named(tmp_path: Path, hiding: str) -> None:
    (tmp_path / hiding).parent.mkdir(exist_ok=True)
    (tmp_path / hiding).write_text("")
    message = run_in(tmp_path, "tools.calculator.CalculatorTool")
    assert str(tmp_path / hiding) in message
    assert "hides agentrl's own `tools/`; rename that file" in message


def test_a_module_that_fails_to_import_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import not_installed_anywhere\n")
    assert "importing module 'mine' failed: No module named 'not_installed_anywhere'" in run_in(tmp_path, "mine.Tool")
    (tmp_path / "mine2.py").write_text("1 / 0\n")
    assert "importing module 'mine2' failed: ZeroDivisionError" in run_in(tmp_path, "mine2.Tool")


def test_no_torch() -> None:
    program = (
        "import sys, agentrl.tool.toolset, agentrl.interaction, agentrl.reward\n"
        "import tools.calculator, tools.search, interactions.gsm8k\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


async def test_a_runs_options_stand_in_place_of_the_files(tmp_path: Path, bound: Bind) -> None:
    (tmp_path / "t.yaml").write_text(
        f"tools:\n  - {{class_name: {HERE}.Echo, config: {{a: 1, b: 2}}, tool_schema: {SCHEMA}}}\n"
        f"  - {{function: {HERE}.double, config: {{timeout: 5}}}}\n"
    )
    options: dict[str, dict[str, Any]] = {"echo": {"b": 3, "timeout": 9}, "double": {"timeout": 4}}
    tools = bound(ToolSet.from_yaml(tmp_path / "t.yaml", options=options))
    assert (tools.slots["echo"].limits.timeout, tools.slots["double"].limits.timeout) == (9, 4)
    session = await tools.open("t/0.0", {})
    assert (await session.call("echo", {})).text == "{'a': 1, 'b': 3}"
    await session.close()
    with pytest.raises(ConfigError, match=r"tool_options: unknown tool 'ecko'.*has echo, double"):
        ToolSet.from_yaml(tmp_path / "t.yaml", options={"ecko": {}})
