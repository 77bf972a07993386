"""Names in configs, and the objects that they stand for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

from agentrl.errors import ConfigError
from agentrl.system.registry import Registry, configured, options_model, read_options
from agentrl.system.targets import load_file, load_target
from agentrl.system.texts import loaded_files, take_files
from tests.naming import Names, naming


class Options(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    strength: float = 1.0


def plain() -> int:
    return 1


def with_options(value: int, options: Options) -> float:
    return value * options.strength


class Made:
    def __init__(self, options: Options) -> None:
        self.options = options


@pytest.fixture
def registry() -> Registry:
    return Registry("measure", "a.measure", {"plain": f"{__name__}:plain", "dumps": "json:dumps"})


def test_a_built_in_name_a_registered_one_and_a_target_are_found(registry: Registry, tmp_path: Path) -> None:
    import json

    file = tmp_path / "mine.py"
    file.write_text("def measure():\n    return 7\n")
    registry.register("own")(with_options)
    assert registry.get("dumps") is json.dumps
    assert registry.get("own") is with_options
    assert registry.get("json:loads") is json.loads
    found = registry.get(f"{file}:measure")
    assert callable(found) and found() == 7
    assert registry.names() == ["dumps", "own", "plain"]


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(registry: Registry) -> None:
    with naming(ConfigError, "a.measure", "'dump'", "'dumps'", "unknown"):
        registry.get("dump")


def test_a_taken_name_is_refused_and_the_same_object_is_not(registry: Registry) -> None:
    registry.register("own")(plain)
    registry.register("own")(plain)
    with naming(ValueError, "'own'"):
        registry.register("own")(with_options)
    with naming(ValueError, "'dumps'", "already"):
        registry.register("dumps")(plain)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module_here:x", ("k:", "'no_such_module_here'")),
        ("json:dumbs", ("k:", "'dumbs'", "'dumps'")),
        ("/no/such/file.py:x", ("k:", "/no/such/file.py")),
        ("nothing", ("k:", "package.module:object", "path/to/file.py:object", "found 'nothing'")),
        ("json:JSONEncoder.nope", ("k:", "'nope'")),
        ("agentrl.system.registry:Regitry", ("'Registry'", "options_model")),
    ],
)
def test_a_target_that_is_not_there_is_told_with_its_key(target: str, said: Names) -> None:
    with naming(ConfigError, said):
        load_target(target, "k")


def test_a_file_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=r"running .*broken\.py failed: SystemExit: 3"):
        load_file(str(file))
    file.write_text("x = 1\n")
    assert load_file(str(file)).x == 1
    assert load_file(str(file)) is load_file(str(file)), "it is run once"


def test_a_base_is_asked_of_every_choice(tmp_path: Path) -> None:
    registry = Registry("encoder", "a.encoder", {"ours": "json:JSONDecoder"}, base="json:JSONEncoder")
    file = tmp_path / "encoders.py"
    file.write_text("import json\nclass Mine(json.JSONEncoder): ...\ndef other(): ...\n")
    assert getattr(registry.get(f"{file}:Mine"), "__name__", None) == "Mine"
    for name in ("ours", f"{file}:other"):
        with naming(ConfigError, "a.encoder", "json.encoder.JSONEncoder"):
            registry.get(name)


def test_names_from_data_never_import(tmp_path: Path) -> None:
    registry = Registry("loop", "agent_name", {"plain": "json:dumps"}, targets=False)
    file = tmp_path / "evil.py"
    file.write_text("raise SystemExit('run')\n")
    for name in ("os:system", f"{file}:f", "json:loads"):
        with naming(ConfigError, "agent_name:", "unknown"):
            registry.get(name)


def test_a_built_in_choice_is_checked_without_its_import_unless_it_has_options() -> None:
    registry = Registry("thing", "a.thing", {"heavy": "no_such_module_here:x", "made": f"{__name__}:Made"})
    registry.check("heavy", {})
    registry.check("made", {"strength": 3})
    with naming(ConfigError, "a.thing_options", "key 'weight'", "unknown"):
        registry.check("made", {"weight": 3}, options_key="a.thing_options")
    with naming(ConfigError, "a.thing", "'light'", "unknown"):
        registry.check("light", {})


def test_a_text_that_was_sent_is_run_in_place_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text("x = 2\n")
    take_files({str(file): "x = 1\n"})
    assert load_file(str(file)).x == 1


def test_a_file_goes_to_a_machine_that_does_not_have_it(tmp_path: Path) -> None:
    """The other machine is a process started where the relative path leads nowhere."""
    file = tmp_path / "sent.py"
    file.write_text("def f():\n    raise ValueError('seen')\n")
    load_file(str(file))
    source = loaded_files()[str(file)]
    file.unlink()
    program = (
        "import traceback, sys\nfrom agentrl.system.targets import load_target\n"
        "from agentrl.system.texts import take_files\n"
        f"take_files({{{str(file)!r}: {source!r}}})\n"
        f"try:\n    load_target({f'{file}:f'!r}, 'k')()\nexcept ValueError:\n    traceback.print_exc(file=sys.stdout)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "raise ValueError('seen')" in done.stdout, "its lines are shown in error messages"


def test_options_are_read_by_the_annotation() -> None:
    assert options_model(plain) is None
    assert options_model(with_options) is Options
    assert options_model(Made) is Options
    assert read_options(with_options, {"strength": 2}, "k") == Options(strength=2.0)
    assert read_options(plain, {}, "k") is None
    with naming(ConfigError, "k:", "key 'strenght'", "'strength'", "unknown"):
        read_options(Made, {"strenght": 2}, "k")
    assert configured(Made, {"strength": 3}, "k")().options.strength == 3.0
    assert configured(plain, {}, "k")() == 1
    with naming(ConfigError, "strength", "plain"):
        read_options(plain, {"strength": 2}, "k")


def test_options_of_a_users_file_need_no_care_of_the_user(tmp_path: Path) -> None:
    """Pydantic ignores unknown keys by default, and annotations may name what only type checkers import."""
    file = tmp_path / "careless.py"
    file.write_text(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nimport pydantic\n"
        "if TYPE_CHECKING:\n    from nowhere import Thing\n"
        "class Options(pydantic.BaseModel):\n    size: int = 1\n"
        "def f(thing: Thing, options: Options | None = None) -> Thing: ...\n"
    )
    f = load_target(f"{file}:f", "k")
    options = read_options(f, {"size": 2}, "k")
    assert options is not None and options.model_dump() == {"size": 2}
    with naming(ConfigError, "k:", "key 'sise'", "'size'", "unknown"):
        read_options(f, {"sise": 2}, "k")


def test_a_function_of_other_arguments_is_refused_with_the_config() -> None:
    """Before any model is loaded, and not where it is first called."""
    takes = Registry("measure", "a.measure", {}, takes=("value",))
    takes.check(f"{__name__}:with_options", {"strength": 2.0})
    takes.check("builtins:dict", None)  # compiled, without a signature
    with naming(ConfigError, f"a.measure={__name__}:plain", "(value)", "plain()"):
        takes.check(f"{__name__}:plain", None)
    with naming(ConfigError, "a.measure=builtins:pow", "(value)", "exp"):
        takes.check("builtins:pow", None)
