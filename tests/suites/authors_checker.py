"""BFCL's own runner, in an interpreter of its own: `python authors_checker.py WHEEL_FOLDER < answers > verdicts`.

A line of answers is {"category", "number", "calls"}: the text of an answer without calls, or a list of [name, JSON text
of arguments]. The packages of vendors that the runner imports, and does not use here, are empty stand-ins. With `tools`
as a further argument it prints the tools of each task instead.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

STAND_INS = frozenset(
    (
        *("anthropic", "boto3", "botocore", "bs4", "cohere", "datamodel_code_generator", "dotenv"),
        *("faiss", "filelock", "google", "html2text", "httpx", "huggingface_hub", "mistralai"),
        *("mpmath", "networkx", "numpy", "openai", "overrides", "pandas", "pydantic"),
        *("qwen_agent", "rank_bm25", "requests", "sentence_transformers", "serpapi", "tabulate", "tenacity"),
        *("torch", "tqdm", "transformers", "tree_sitter", "tree_sitter_java", "tree_sitter_javascript", "typer"),
        *("wandb", "writerai"),
    )
)


class Empty:
    """Stands for any class, decorator or context."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __call__(self, *args: Any, **kwargs: object) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        return Empty()

    def __or__(self, other: object) -> Empty:
        return self

    __ror__ = __or__

    def __enter__(self) -> Empty:
        return self

    def __exit__(self, *args: object) -> None: ...


class EmptyModule(ModuleType):
    """Has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty if name == "OSSHandler" or name[0].islower() is False else Empty()


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def main(folder: str, what: str = "verdicts") -> None:
    sys.path.insert(0, folder)
    sys.meta_path.insert(0, Missing())
    from bfcl_eval.constants.enums import Language, ModelStyle, ReturnFormat  # type: ignore[import-not-found]
    from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING  # type: ignore[import-not-found]
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI  # type: ignore[import-not-found]
    from bfcl_eval.eval_checker import eval_runner  # type: ignore[import-not-found]
    from bfcl_eval.model_handler.api_inference.openai_completion import (  # type: ignore[import-not-found]
        OpenAICompletionsHandler,
    )
    from bfcl_eval.model_handler.utils import convert_to_tool  # type: ignore[import-not-found]

    decode = OpenAICompletionsHandler.decode_ast
    handler = SimpleNamespace(
        decode_ast=lambda result, language, has_tool_call_tag: decode(
            SimpleNamespace(is_fc_model=True), result, language, has_tool_call_tag
        )
    )
    model = next(name for name, config in MODEL_CONFIG_MAPPING.items() if config.underscore_to_dot and "_" not in name)
    if what == "tools":
        for category in sys.stdin.read().split():
            for entry in eval_runner.load_dataset_entry(category):
                tools = convert_to_tool(entry["function"], GORILLA_TO_OPENAPI, ModelStyle.OPENAI_COMPLETIONS)
                print(json.dumps([category, entry["id"], entry["question"][0], tools]))
        return
    prompts: dict[str, Any] = {}
    truths: dict[str, Any] = {}
    for line in sys.stdin:
        answer = json.loads(line)
        category, number, calls = answer["category"], answer["number"], answer["calls"]
        if category not in prompts:
            prompts[category] = eval_runner.load_dataset_entry(category, include_language_specific_hint=False)
            if "relevance" not in category:
                truths[category] = eval_runner.load_ground_truth_entry(category)
        prompt = prompts[category][number]
        result = calls if isinstance(calls, str) else [{name: arguments} for name, arguments in calls]
        arguments = [handler, prompt["id"], result]
        if "relevance" in category:
            found = eval_runner._evaluate_single_relevance_entry(*arguments, prompt, model, category)
        else:
            language = {"simple_java": Language.JAVA, "simple_javascript": Language.JAVASCRIPT}
            form = ReturnFormat.JSON
            truth = truths[category][number]["ground_truth"]
            found = eval_runner._evaluate_single_ast_entry(
                *arguments, truth, prompt, model, category, language.get(category, Language.PYTHON), form
            )
        print(json.dumps(bool(found["valid"])))


if __name__ == "__main__":
    main(*sys.argv[1:])
