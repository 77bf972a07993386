"""`python -m benchmarks.config_page > docs/config.md`: the page of every key, from the schema."""

from __future__ import annotations

import itertools
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, Union, get_args, get_origin

from agentrl.config.keys import MISSING, Key, all_keys, defaults, flatten, leaf_keys
from agentrl.config.rules import Place, shown
from agentrl.config.section import Section
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.sft import PreferencesConfig, SFTConfig
from agentrl.config.sections.training import Config
from agentrl.system.json_value import JSON
from benchmarks.no_options import no_options

HEAD = """\
# Every key

Lengths are in tokens, times in seconds. Set a key on the command line (`key=value`) or in a YAML file of your own
(`--config-path FOLDER --config-name NAME`; it builds on ours with `defaults: [train, _self_]`).

A start first reports all unknown keys and wrong values, and ends. When there are none, it reports all keys that
conflict or that have no effect, and ends. A key that you write to its default counts as set, so it must have an effect,
too. The exceptions are the defaults null, false, 0 and empty, which may be written anywhere. Runs and `--cfg job` write
files that begin with `every_key: true`. In such a file keys with their default count as not set.

The command line is Hydra's: `key=value`, `+key=value`, `~key`, `group=choice`, `--config-path`, `--config-name`,
`--config-dir`, `--cfg job`, `--package SECTION`, `--info`. Folders are relative to the working directory. YAML files
that yours builds on are searched in its own folder, then in `--config-path`, `--config-dir` and ours. `--multirun`
(`-m`), for `agentrl.train`, `agentrl.sft` and `agentrl.preferences`, runs a job for each combination of listed values,
one after another, and ends with a table. If a job fails, the others still run. Without lists there is one job. An
example with 18 jobs is:

    python -m agentrl.train --multirun trainer.seed=1,2,3 algorithm=grpo,ppo 'data.seed=range(1,4)'

Jobs that would share a run folder get folders below it, which name their values, e.g.
`<folder>/trainer.seed=1,algorithm=grpo,data.seed=1`, and its experiment's name gets the same ending. To continue all
jobs after an interruption, repeat the command.

Folders of your own for the jobs are named by values: `'trainer.default_local_dir=out/${trainer.seed}'`. Of Hydra's own
keys only `hydra.searchpath` is taken, which adds folders in which YAML files are searched. All others are refused, also
in YAML, with the key that does their work here. In a command of verl's they have no effect, and a line says so.
`hydra.job.chdir=false` and `hydra.output_subdir=null` ask for what happens anyway.

The defaults below hold with data and a model of your own. Until you name others, `data.train_files` and
`actor_rollout_ref.model.path` are `quickstart`. While one of them is `quickstart`, the values of its file hold instead:
`configs/recipe/data/quickstart.yaml` for the data, `configs/recipe/policy/quickstart.yaml` for the tiny policy. So with
only your data named, the tiny policy's lengths, learning rate and number of steps hold.
"""


READ = """\
The YAML of a training run, its `config.yaml` included, serves here too: keys that only training reads are ignored in
it. These keys of `python -m agentrl.train` are read:

"""


def page() -> str:
    """Write the whole page, in Markdown."""
    generate, training = all_keys(GenerateConfig), all_keys(Config)
    tables = [
        _table("python -m agentrl.train", Config, training),
        _table("python -m agentrl.sft", SFTConfig, all_keys(SFTConfig)),
        _table("python -m agentrl.preferences", PreferencesConfig, all_keys(PreferencesConfig)),
        _table(
            "python -m agentrl.generate",
            GenerateConfig,
            {path: key for path, key in generate.items() if path not in training or key.field.is_required()},
            READ + _listed([path for path in generate if path in training]) + "\n\nAnd these are its own:\n",
        ),
        _table("python -m agentrl.evaluate", EvaluateConfig, all_keys(EvaluateConfig)),
    ]
    return "\n".join([HEAD, *itertools.chain.from_iterable(tables)])


def _table(title: str, schema: type[Section], shown_keys: Mapping[str, Key], before: str = "") -> list[str]:
    """Write a table with a line for each of `shown_keys`, all keys of the schema or some."""
    keys, default = all_keys(schema), flatten(defaults(schema), leaf_keys(schema))
    return [
        f"## `{title}`",
        "",
        *([before] if before else []),
        "| key | kind | default | what it does |",
        "|---|---|---|---|",
        *(
            f"| `{path}` | {_kind(key.field.annotation)} | {_default(default[path])} | {_text(key, keys)} |"
            for path, key in shown_keys.items()
        ),
        "",
    ]


def _listed(paths: Iterable[str]) -> str:
    """Write a list with a line for each section and the keys directly in it."""
    sections: dict[str, list[str]] = {}
    for path in paths:
        section, _, name = path.rpartition(".")
        sections.setdefault(section, []).append(f"`{name}`")
    return "\n".join(f"- `{section}`: {', '.join(names)}" for section, names in sections.items())


def _text(key: Key, keys: Collection[str]) -> str:
    """Describe a key: its own text, then its rules, with the rules of the sections around it first."""
    rules = [rule.text(Place(section, keys)) for rule, section in key.rules]
    return " ".join(f"{key.field.description or ''} {' '.join(rules)}".split())


def _kind(annotation: object) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_kind, arguments))
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0])}"
    if origin is not None and arguments and origin is not dict:
        return _kind(arguments[0])
    kinds: dict[object, str] = {str: "text", bool: "true, false", int: "integer", float: "number"}
    return kinds.get(annotation, "mapping")


def _default(value: JSON) -> str:
    return "must be given" if value == MISSING else "null" if value is None else f"`{shown(value)}`"


if __name__ == "__main__":
    no_options(__doc__)
    print(page(), end="")
