"""Row sources: the same rows make the same samples, and the same faults, wherever they lie."""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.chat import Chat
from agentrl.config import Config
from agentrl.config.sections.offline import EvaluateConfig
from agentrl.config.sections.sft import PairDataConfig, SFTDataConfig
from agentrl.data.bad_rows import BadRow
from agentrl.data.contract import Dataset
from agentrl.data.dataset import FileDataset
from agentrl.data.messages import Unfit
from agentrl.data.own import load_own
from agentrl.data.pairs import load_pairs
from agentrl.data.sft import load_transcripts
from agentrl.data.table import RowTable, open_table, values_of
from agentrl.errors import CodeError, ConfigError, DataError
from agentrl.offline.scores import ResponseFiles
from agentrl.system.parts import of_distributions
from agentrl.trajectory import Message
from agentrl.trajectory.sample import Sample
from tests.chat.templates import HERMES
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.naming import assert_names, naming

Row = dict[str, Any]
ASKED: Message = {"role": "user", "content": "?"}
SAID: Message = {"role": "assistant", "content": "-"}
BETTER: Message = {"role": "assistant", "content": "+"}
PLAIN: Row = {"prompt": [ASKED], "data_source": "made/up", "reward_model": {"ground_truth": "7"}}
KNOWN: dict[str, list[str]] = {
    "agent_names": ["single_turn", "tool_agent"],
    "tool_names": ["search"],
    "interaction_names": ["quiz"],
}
OWN = """
import json
from pathlib import Path
from agentrl.data.rows import Columns
from agentrl.verl import RLHFDataset


class Own:
    def __init__(self, files):
        lines = [line for file in files for line in Path(file).read_text().splitlines() if line]
        self.rows = list(map(json.loads, lines))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        columns = Columns()
        return columns.sample(self.rows[index], columns.messages(self.rows[index]))[0]


class Verl(RLHFDataset):
    pass
"""


def as_parquet(path: Path, rows: list[Any]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return str(path.with_suffix(".parquet"))


def as_lines(path: Path, rows: list[Any]) -> str:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return str(path.with_suffix(".jsonl"))


def as_packed(path: Path, rows: list[Any]) -> str:
    path.with_suffix(".ndjson.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return str(path.with_suffix(".ndjson.gz"))


def as_array(path: Path, rows: list[Any]) -> str:
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    return str(path.with_suffix(".json"))


def as_saved(path: Path, rows: list[Any]) -> str:
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return f"hf:{path}"


class Rows(RowTable):
    """A format of a distribution: the repr of one row after the other."""

    def rows(self) -> Iterator[dict[str, object] | BadRow]:
        for row in Path(self.file).read_text().split("\x1e")[:-1]:
            value = ast.literal_eval(row)
            yield value if isinstance(value, dict) else Unfit("", "a JSON object", value)


def as_own_format(path: Path, rows: list[Any]) -> str:
    path.with_suffix(".py.rows").write_text("".join(f"{row!r}\x1e" for row in rows))
    return str(path.with_suffix(".py.rows"))


@pytest.fixture(autouse=True, scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A distribution that says which class reads `*.rows`."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "of_rows-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of_rows\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[agentrl.tables]\n.rows = {__name__}:Rows\n.wrong = {__name__}:Sources\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        of_distributions.cache_clear()
        yield
    of_distributions.cache_clear()


WRITERS: dict[str, Callable[[Path, list[Any]], str]] = {
    "parquet": as_parquet,
    "JSON lines": as_lines,
    "gzipped": as_packed,
    "JSON array": as_array,
    "hf": as_saved,
    "a distribution's": as_own_format,
}
OF_CLASSES = {"own class": as_lines, "verl's class": as_parquet}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("model"), QWEN, "<|im_end|>", HERMES)


@pytest.fixture(scope="module")
def chat(model: str) -> Chat:
    return Chat.from_pretrained(model)


class Sources:
    """Opens rows behind every door that makes samples of them; `place` is how messages name a row."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model

    def opened(self, source: str, rows: list[Any], on_bad_row: Any = "error") -> Dataset:
        file = self.written(source, rows)
        if source in WRITERS:
            return FileDataset(file, on_bad_row=on_bad_row)
        (self.folder / "own.py").write_text(OWN)
        name = {"own class": "Own", "verl's class": "Verl"}[source]
        given = {
            "data": {"custom_cls": {"path": f"{self.folder}/own.py", "name": name}, "on_bad_row": on_bad_row},
            "actor_rollout_ref": {"model": {"path": self.model}},
        }
        config = Config.model_validate(given)
        return load_own(config.data.custom_cls, [file], config, None)

    def written(self, source: str, rows: list[Any]) -> str:
        return ({**WRITERS, **OF_CLASSES})[source](self.folder / "rows", rows)

    def place(self, source: str, row: int) -> str:
        if source in OF_CLASSES:
            return f"data set {'Own' if source == 'own class' else 'Verl'}, sample {row}"
        return f"{self.written(source, [])}, row {row} (the first is 0)"


@pytest.fixture
def sources(tmp_path: Path, model: str) -> Sources:
    return Sources(tmp_path, model)


GOOD: dict[str, tuple[Row, Sample]] = {
    "a prompt alone": ({"prompt": [ASKED]}, Sample([ASKED], "unknown", "single_turn")),
    "a prompt as text": (
        {**PLAIN, "prompt": json.dumps([ASKED])},
        Sample([ASKED], "made/up", "single_turn", ground_truth="7"),
    ),
    "every column": (
        {
            **PLAIN,
            "ability": "math",
            "agent_name": "tool_agent",
            "tools_kwargs": {"search": {"create_kwargs": {"k": 1}}},
            "interaction_kwargs": {"name": "quiz", "of": ["x", None]},
            "extra_info": {"index": 3, "empty": None},
        },
        Sample(
            [ASKED],
            "made/up",
            "tool_agent",
            "7",
            "math",
            {"search": {"create_kwargs": {"k": 1}}},
            {"name": "quiz", "of": ["x", None]},
            {"index": 3},
        ),
    ),
    "columns in extra_info": (
        {
            **PLAIN,
            "extra_info": {
                "agent_name": "tool_agent",
                "tools_kwargs": {"search": {"x": 1}},
                "interaction_kwargs": {"name": "quiz"},
            },
        },
        Sample(
            [ASKED],
            "made/up",
            "tool_agent",
            "7",
            tools_kwargs={"search": {"x": 1}},
            interaction_kwargs={"name": "quiz"},
            extra_info={
                "agent_name": "tool_agent",
                "tools_kwargs": {"search": {"x": 1}},
                "interaction_kwargs": {"name": "quiz"},
            },
        ),
    ),
    "verl's name of a loop, and a call": (
        {
            **PLAIN,
            "agent_name": "single_turn_agent",
            "prompt": [
                ASKED,
                {"role": "assistant", "content": None, "function_call": {"name": "search", "arguments": "{}"}},
                {"role": "function", "content": "5"},
            ],
        },
        Sample(
            [
                ASKED,
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "search", "arguments": "{}"}}],
                },
                {"role": "tool", "content": "5"},
            ],
            "made/up",
            "single_turn",
            "7",
        ),
    ),
}
BAD: dict[str, tuple[Row, str, str, str]] = {
    "no message": ({"prompt": []}, "prompt", "a list of messages", "[]"),
    "a number as prompt": ({"prompt": 3}, "prompt", "a list of messages", "3"),
    "text as prompt": ({"prompt": "hi"}, "prompt", "one in JSON text", "'hi'"),
    "an unknown role": ({"prompt": [{**ASKED, "role": "x"}]}, "prompt, message 0", "as role", "'x'"),
    "an answer to nothing": ({"prompt": [{"role": "tool", "content": "5"}]}, "prompt, message 0", "behind", "'5'"),
    "a source that is null": ({"data_source": None}, "data_source", "text", "null"),
    "a source that is a number": ({"data_source": 3}, "data_source", "text", "3"),
    "a loop that is a list": ({"agent_name": ["x"]}, "agent_name", "text", "['x']"),
    "an ability that is a number": ({"ability": 1.5}, "ability", "text", "1.5"),
    "a reward that is text": ({"reward_model": "x"}, "reward_model", "a mapping", "'x'"),
    "tools that are text": ({"tools_kwargs": "{}"}, "tools_kwargs", "a mapping", "'{}'"),
    "a tool's that is a number": ({"tools_kwargs": {"f": 1}}, "tools_kwargs.f", "a mapping such as {create", "1"),
    "tools in extra_info": ({"extra_info": {"tools_kwargs": [1]}}, "extra_info.tools_kwargs", "a mapping", "[1]"),
    "an interaction": ({"extra_info": {"interaction_kwargs": "x"}}, "extra_info.interaction_kwargs", "a map", "'x'"),
    "an unknown tool": ({"tools_kwargs": {"serach": {"x": 1}}}, "tools_kwargs", "did you mean 'search'", "'serach'"),
    "an unknown loop": ({"agent_name": "tol_agent"}, "agent_name", "did you mean 'tool_agent'", "'tol_agent'"),
    "no interaction's name": ({"interaction_kwargs": {"x": 1}}, "interaction_kwargs.name", "name of an inter", "none"),
}
IMAGES = "a list of images"
FAULTS_OF_FILES: dict[str, tuple[Any, str]] = {
    "no prompt": ({"question": "?"}, "there is no column 'prompt'; its columns are question. .* data.prompt_key"),
    "images that are text": ({**PLAIN, "images": "x"}, f"column images: expected {IMAGES} .*image_key=null.*found 'x'"),
}


@pytest.mark.parametrize("source", [*WRITERS, *OF_CLASSES])
class TestRowsOfSamples:
    """Contract of the sources of a run's data set: files of each kind, a user's class, a class of verl's."""

    @pytest.mark.slice(14, "matrix")
    @pytest.mark.parametrize("case", GOOD)
    def test_a_row_is_the_same_sample(self, sources: Sources, source: str, case: str) -> None:
        row, expected = GOOD[case]
        data = sources.opened(source, [row, row])
        assert data.check(**KNOWN) == [expected.data_source]
        bare = [replace(sample, file="", row=0, index=0) for sample in data]
        if source == "verl's class":  # its rows have verl's own fields inside extra_info, too
            bare = [replace(sample, extra_info=expected.extra_info) for sample in bare]
        assert bare == [expected] * 2
        assert [sample.index for sample in data] == [0, 1]
        assert data.without_loop == 2 * ("agent_name" not in str(row)) and data.sources() == [expected.data_source] * 2

    @pytest.mark.slice(28, "matrix")
    @pytest.mark.parametrize("case", BAD)
    def test_a_fault_is_named_by_row_and_column(self, sources: Sources, source: str, case: str) -> None:
        change, column, expected, found = BAD[case]
        if source == "verl's class":
            column = column.replace("prompt", "raw_prompt").removeprefix("extra_info.")  # by verl's class itself
        with pytest.raises(DataError) as error:
            sources.opened(source, [{**PLAIN, **change}]).check(**KNOWN)
        place, message = sources.place(source, 0), str(error.value)
        assert message.startswith(f"{place}, column {column}: ")
        said = message.removeprefix(f"{place}, column {column}: ")
        assert expected in said and found in said and "data.on_bad_row=skip" in said

    def test_bad_rows_are_left_out_and_counted(self, sources: Sources, source: str) -> None:
        rows = [{**PLAIN, "agent_name": name} for name in ("single_turn", "nobody", "tool_agent", "nobody")]
        rows[3]["prompt"] = [{**ASKED, "role": "x"}]
        data = sources.opened(source, rows, on_bad_row="skip")
        data.check(**KNOWN)
        assert [sample.agent_name for sample in data] == ["single_turn", "tool_agent"]
        assert data.bad.count == 2
        assert "row" in data.bad.first or "sample" in data.bad.first

    def test_what_is_too_long_or_cannot_be_rendered_is_named(self, sources: Sources, source: str) -> None:
        def length(sample: Sample) -> int:
            if sample.ground_truth == "2":
                raise ValueError("no such template")
            return 9 if sample.ground_truth == "1" else 1

        rows = [{**PLAIN, "reward_model": {"ground_truth": str(number)}} for number in range(3)]
        with pytest.raises(DataError) as error:
            sources.opened(source, rows).filter_overlong(length, 5, refuse=True)
        assert_names(error.value, f"{sources.place(source, 1)}", "9 tokens")
        with pytest.raises(DataError) as error:
            sources.opened(source, rows).filter_overlong(length, 5)
        assert_names(error.value, f"{sources.place(source, 2)}")
        data = sources.opened(source, rows, on_bad_row="skip")
        assert (data.filter_overlong(length, 5), len(data), data.bad.count) == (1, 1, 1)

    def test_its_fingerprint_follows_what_is_left(self, sources: Sources, source: str) -> None:
        rows = [{**PLAIN, "agent_name": "single_turn"}, {**PLAIN, "agent_name": "nobody"}]
        data = sources.opened(source, rows, on_bad_row="skip")
        whole = data.fingerprint
        data.check(**KNOWN)
        again = sources.opened(source, rows, on_bad_row="skip")
        again.check(**KNOWN)
        assert whole != data.fingerprint == again.fingerprint and again.is_of(data.fingerprint)
        other = sources.opened(source, [{**PLAIN, "reward_model": {"ground_truth": "8"}}, *rows[1:]], on_bad_row="skip")
        other.check(**KNOWN)
        assert not other.is_of(data.fingerprint)


def evaluated(file: str) -> int:
    config = EvaluateConfig.model_validate({"data": {"path": file}})
    rows = ResponseFiles([file], config)
    assert rows.rows == len([row for chunk in rows for row in chunk])
    return rows.rows


class TestReaders:
    """Contract of everything that reads files: the same faults of files and of rows that no reader can take."""

    ROW: Row = {
        **PLAIN,
        "messages": [ASKED, SAID],
        "chosen": [ASKED, BETTER],
        "rejected": [ASKED, SAID],
        "responses": ["7"],
    }

    def read(self, reader: str, file: str, chat: Chat, on_bad_row: Any = "error") -> int:
        """Number of rows that can be used."""
        if reader == "prompts":
            return len(FileDataset(file, on_bad_row=on_bad_row))
        if reader == "transcripts":
            config = SFTDataConfig(train_files="x", on_bad_row=on_bad_row, row_format="messages")
            return len(load_transcripts(file, config, chat).samples)
        if reader == "pairs":
            pairs = PairDataConfig(train_files="x", on_bad_row=on_bad_row)
            return len(load_pairs(file, pairs, chat, lambda rows: None).samples)
        return evaluated(file)

    NEEDED = {"prompts": "prompt", "transcripts": "messages", "pairs": "rejected", "responses": "responses"}

    @pytest.mark.parametrize("kind", WRITERS)
    @pytest.mark.parametrize("reader", NEEDED)
    def test_every_kind_of_file_is_read(self, tmp_path: Path, chat: Chat, reader: str, kind: str) -> None:
        assert self.read(reader, WRITERS[kind](tmp_path / "rows", [self.ROW] * 3), chat) == 3

    @pytest.mark.parametrize("kind", WRITERS)
    def test_a_response_is_scored_with_the_sample_of_training(self, tmp_path: Path, kind: str) -> None:
        for number, (row, expected) in enumerate(GOOD.values()):
            if "reward_model" in row:
                file = WRITERS[kind](tmp_path / str(number), [{**row, "responses": "7"}])
                (chunk,) = ResponseFiles([file], EvaluateConfig.model_validate({"data": {"path": file}}))
                assert [one.sample for one in chunk] == [replace(expected, file=file)] == list(FileDataset(file))

    @pytest.mark.parametrize("kind", WRITERS)
    def test_a_response_is_refused_as_the_row_of_training_is(self, tmp_path: Path, kind: str) -> None:
        for number, (change, column, expected, found) in enumerate(BAD.values()):
            if column.startswith("prompt") or "mean" in expected or "inter" in expected:
                continue  # any prompt can be scored, and no name is used
            file = WRITERS[kind](tmp_path / str(number), [{**self.ROW, **change}])
            with pytest.raises(DataError) as error:
                evaluated(file)
            place = f"{file}, row 0 (the first is 0), column {column}: "
            said = str(error.value).removeprefix(place)
            assert str(error.value).startswith(place) and expected in said and found in said
            assert "on_bad_row" not in said, "a key that agentrl.evaluate has not"

    @pytest.mark.parametrize("kind", WRITERS)
    @pytest.mark.parametrize("reader", NEEDED)
    def test_a_missing_column_is_named_with_its_key(self, tmp_path: Path, chat: Chat, reader: str, kind: str) -> None:
        rows = [{name: value for name, value in self.ROW.items() if name != self.NEEDED[reader]}]
        file = WRITERS[kind](tmp_path / "rows", rows)
        with pytest.raises(DataError) as error:
            self.read(reader, file, chat)
        message = str(error.value)
        key = {"prompts": "data.prompt_key", "transcripts": "data.messages_key", "pairs": "data.rejected_key"}
        assert message.startswith(file) and f"no column {self.NEEDED[reader]!r}" in message
        assert key.get(reader, "data.response_key") in message and "data_source" in message

    @pytest.mark.parametrize("reader", NEEDED)
    @pytest.mark.parametrize("kind", ["JSON lines", "parquet"])
    def test_what_python_cannot_hold_is_named_or_skipped(
        self, tmp_path: Path, chat: Chat, reader: str, kind: str
    ) -> None:
        """A text that is not UTF-8, in the middle of good rows."""
        file = WRITERS[kind](tmp_path / "rows", [self.ROW, {**self.ROW, "data_source": "here"}, self.ROW])
        rotten = {"messages": json.dumps([ASKED, SAID]), "prompt": json.dumps([ASKED]), "responses": "7"}
        rotten |= {"rejected": json.dumps([ASKED, SAID])}
        if kind == "JSON lines":
            Path(file).write_bytes(Path(file).read_bytes().replace(b"here", b"\xff"))
        else:
            table = pa.Table.from_pylist([{**self.ROW, **rotten}] * 3)
            column = self.NEEDED[reader]
            texts = [value.encode() for value in table.column(column).to_pylist()]
            texts[1] = b"\xff" + texts[1]
            raw = pa.array(texts, pa.binary()).view(pa.string())
            pq.write_table(table.set_column(table.schema.get_field_index(column), column, raw), file)
        with naming(DataError, "row 1", "UTF-8", "found b'") as error:
            self.read(reader, file, chat)
        assert str(error.value).startswith(file)
        if reader != "responses":
            assert self.read(reader, file, chat, "skip") == 2

    @pytest.mark.parametrize("reader", NEEDED)
    @pytest.mark.parametrize("row", ['["x"]', '{"a": ', "3"])
    def test_a_row_that_is_no_object_is_named_or_skipped(
        self, tmp_path: Path, chat: Chat, reader: str, row: str
    ) -> None:
        good = json.dumps(self.ROW)
        (tmp_path / "a.jsonl").write_text(f"{good}\n{row}\n{good}\n")
        with pytest.raises(DataError, match=r"a\.jsonl, row 1 \(the first is 0\): expected (a JSON object|JSON )"):
            self.read(reader, str(tmp_path / "a.jsonl"), chat)
        if reader != "responses":
            assert self.read(reader, str(tmp_path / "a.jsonl"), chat, "skip") == 2

    @pytest.mark.parametrize("reader", NEEDED)
    @pytest.mark.parametrize("rows", [["{}", 0, 0], ["{}", "{}"]])
    def test_a_row_without_members_hides_no_other(
        self, tmp_path: Path, chat: Chat, reader: str, rows: list[Any]
    ) -> None:
        (tmp_path / "a.jsonl").write_text("".join(f"{row or json.dumps(self.ROW)}\n" for row in rows))
        with naming(DataError, "a.jsonl", "row 0"):
            self.read(reader, str(tmp_path / "a.jsonl"), chat)
        if reader != "responses" and 0 in rows:
            assert self.read(reader, str(tmp_path / "a.jsonl"), chat, "skip") == 2

    @pytest.mark.parametrize("reader", NEEDED)
    def test_a_row_that_is_nested_too_deeply_is_named(self, tmp_path: Path, chat: Chat, reader: str) -> None:
        deep = '{"a": ' * 900 + "1" + "}" * 900
        column = "extra_info" if reader in ("prompts", "responses") else "tools"
        row = f'{json.dumps(self.ROW)[:-1]}, "{column}": {deep if column == "extra_info" else f"[{deep}]"}}}'
        (tmp_path / "a.jsonl").write_text(f"{json.dumps(self.ROW)}\n{row}\n")
        with naming(DataError, "a.jsonl", "row 1", "nested too deeply"):
            self.read(reader, str(tmp_path / "a.jsonl"), chat)

    @pytest.mark.parametrize("reader", NEEDED)
    def test_a_column_that_is_there_twice_is_refused(self, tmp_path: Path, chat: Chat, reader: str) -> None:
        table = pa.Table.from_pylist([self.ROW])
        column = self.NEEDED[reader]
        file = str(tmp_path / "a.parquet")
        pq.write_table(table.append_column(column, table.column(column)), file)
        with naming(DataError, "a.parquet", f"column {column}"):
            self.read(reader, file, chat)

    @pytest.mark.parametrize("kind", ["parquet", "JSON lines"])
    @pytest.mark.parametrize("reader", NEEDED)
    def test_a_file_without_rows_is_refused(self, tmp_path: Path, chat: Chat, reader: str, kind: str) -> None:
        file = WRITERS[kind](tmp_path / "rows", [self.ROW])
        if kind == "parquet":
            pq.write_table(pq.read_table(file).slice(1), file)
        else:
            Path(file).write_text("\n\n")
        with pytest.raises(DataError, match=r"(no row in|there are no rows)"):
            self.read(reader, file, chat)


@pytest.mark.parametrize("case", FAULTS_OF_FILES)
@pytest.mark.parametrize("kind", WRITERS)
def test_faults_that_only_files_have(tmp_path: Path, kind: str, case: str) -> None:
    row, said = FAULTS_OF_FILES[case]
    with pytest.raises(DataError, match=said):
        FileDataset(WRITERS[kind](tmp_path / "rows", [row]))


def test_values_are_those_of_arrow() -> None:
    """The decoder of lists and structs agrees with pyarrow's own, in slices, too."""
    struct = pa.struct({"a": pa.int64(), "b": pa.list_(pa.struct({"c": pa.string()}))})
    rows = [{"a": 1, "b": [{"c": "x"}, None, {"c": None}]}, None, {"a": None, "b": None}, {"a": 2, "b": []}]
    arrays = [
        pa.array(rows, struct),
        pa.array([rows, None, [], rows[:1]], pa.list_(struct)),
        pa.array([rows, None, [], rows[:1]], pa.large_list(struct)),
        pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2)),
        pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        pa.array([{"m": [("k", [1])]}, {"m": None}], pa.struct({"m": pa.map_(pa.string(), pa.list_(pa.int8()))})),
        pa.array(["x", "y", None, "x"]).dictionary_encode(),
        pa.array([None, None]),
        pa.array([{}, None], pa.struct([])),
        pa.array([b"\x00", None], pa.large_binary()),
    ]
    for array in arrays:
        for part in (array, array.slice(1), array.slice(1, 1), array.slice(0, 0)):
            assert values_of(part) == part.to_pylist(maps_as_pydicts="strict"), array.type


def test_a_format_of_a_distribution_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.rows").write_text("{'prompt': \x1e")
    problem = r"a\.rows: Rows \(.*rows\): SyntaxError: (?s:.*)test_row_sources\.py:\d+ in rows"
    with pytest.raises(CodeError, match=problem):
        FileDataset(str(tmp_path / "a.rows"))
    (tmp_path / "a.rows").write_bytes(b"\xff\x1e")
    with pytest.raises(CodeError, match="UnicodeDecodeError"):
        FileDataset(str(tmp_path / "a.rows"))
    (tmp_path / "a.wrong").touch()
    with naming(ConfigError, "agentrl.tables", "RowTable"):
        open_table(str(tmp_path / "a.wrong"))


def test_a_folder_holds_files_of_one_kind(tmp_path: Path) -> None:
    as_own_format(tmp_path / "a", [PLAIN])
    assert len(FileDataset(str(tmp_path))) == 1
    as_lines(tmp_path / "b", [PLAIN])
    with pytest.raises(DataError, match=r"holds \*\.json files and \*\.rows files|\*\.rows files and \*\.json files"):
        FileDataset(str(tmp_path))
