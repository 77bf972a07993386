"""Loading: from the command line and YAML files to a checked config."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, TypeVar, Union, get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from agentrl.config.checks import check, idle_keys
from agentrl.config.command_line import CommandLine, parse_command_line
from agentrl.config.dialect import DIALECT, Reading, advice, all_dialects, dialect_of
from agentrl.config.hydra_section import (
    ASKS_NOTHING,
    SEARCHPATH,
    faults_of_yaml,
    is_of_hydra,
    quoted,
    read_override,
    refused,
)
from agentrl.config.keys import (
    MISSING,
    all_keys,
    defaults,
    differing,
    flatten,
    leaf_keys,
    nearest,
    nested,
    unknown_keys,
)
from agentrl.config.read_back import (
    END,
    EVERY_KEY,
    is_read_back,
    refuse_aliases,
    refuse_cut,
    refuse_other_files,
    refuse_uses,
    refusing_unreadable,
)
from agentrl.config.rules import NO_SCRIPT, FromScript, NamesFile, shown
from agentrl.config.section import Section
from agentrl.config.sections.algorithm import OF_STALE_TOKENS
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.sft import PreferencesConfig, SFTConfig
from agentrl.config.sections.training import ACTOR, CORRECTION, Config, even_sizes
from agentrl.errors import ConfigError
from agentrl.system.config_files import configs_dir, find_file, our_folders
from agentrl.system.json_value import JSON, as_list
from agentrl.system.publish import published
from agentrl.system.versions import check_folder, this_agentrl, writer_of

logger = logging.getLogger(__name__)

SchemaT = TypeVar("SchemaT", Config, SFTConfig, PreferencesConfig, GenerateConfig, EvaluateConfig)

RECIPES = {"recipe/data": "data.train_files", "recipe/policy": "actor_rollout_ref.model.path"}
"""Config groups that hold only while their key says `quickstart`: values for the tiny policy suit no other."""
FOLDER = "trainer.default_local_dir"
STALENESS = "async_training.max_staleness"
MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
IDLE = "without_effect"
"""The list of the keys of such a file that have no effect with the others, as a dialect allows: not given, too."""


def load_config(
    argv: Sequence[str],
    config_name: str = "train",
    schema: type[SchemaT] = Config,  # type: ignore[assignment]
    *,
    about: str | None = None,
    script: FromScript = NO_SCRIPT,
) -> SchemaT:
    """Load `configs/<config_name>.yaml` with the overrides and flags of a command line.

    about: what `--help` says of a command that has the schema of another. `--help` and `--cfg job` print and raise
    SystemExit(0). Raises ConfigError with a line for each wrong key. Unknown keys and values of the wrong kind come
    first, then keys that do not fit together.
    """
    command = parse_command_line(argv, config_name, schema, about=about)
    if command.multirun:
        raise ConfigError(
            "--multirun: several jobs are run by the commands agentrl.train, agentrl.sft and agentrl.preferences, from "
            "the command line only"
        )
    return load_command(command, schema, script)


def load_command(command: CommandLine, schema: type[SchemaT], script: FromScript = NO_SCRIPT) -> SchemaT:
    """Load the config of a command for one job, as `load_config` does."""
    with told_as_config_errors():
        if command.info is not None:
            show_info(command, schema)
            raise SystemExit(0)
        config = checked(compose_keys(command, schema), schema, script)
    if command.show_config:
        sys.stdout.write(shown_config(config, command.package))
        raise SystemExit(0)
    return config


@contextmanager
def told_as_config_errors() -> Iterator[None]:
    """Raise ConfigError for errors of Hydra, OmegaConf and the YAML parser."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error).partition("Config search path")[0].strip()
        raise ConfigError(f"the config cannot be put together: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"a config file is not valid YAML: {error}") from error


def shown_config(config: Section, package: str | None) -> str:
    """Write the output of `--cfg job`: the config, or the section `package`. Raises ConfigError for no section."""
    if package is None:
        return config_to_yaml(config)
    tree: JSON = config_to_dict(config)
    for name in package.split("."):
        if not isinstance(tree, dict) or not isinstance(tree.get(name), dict):
            sections = sorted({key.rpartition(".")[0] for key in leaf_keys(type(config))})
            near = nearest(package, sections)
            raise ConfigError(f"--package {package}: no such section" + (f"; did you mean {near[0]}?" if near else ""))
        tree = tree[name]
    return f"# @package {package}\n{OmegaConf.to_yaml(tree)}"


def show_info(command: CommandLine, schema: type[Section]) -> None:
    """Have Hydra print how it puts the config together, without our checks."""
    assert command.info is not None
    searched, _, texts = read_overrides(command, schema)
    with initialize_config_dir(str(searched[0]), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        root = logging.getLogger()
        kept = root.level, root.handlers[:]
        try:
            hydra.show_info(command.info, command.config_name, with_search_path(searched, texts))
        finally:  # it logs everything to the standard output from then on
            root.setLevel(kept[0])
            root.handlers[:] = kept[1]


def config_to_dict(config: Section) -> dict[str, JSON]:
    """Convert a config to plain values, ready for YAML and JSON."""
    return config.model_dump(mode="json")


def config_to_yaml(config: Section) -> str:
    """Convert a config to YAML with every key, which loads as the same config."""
    idle = idle_keys(config, differing(config))
    return OmegaConf.to_yaml({EVERY_KEY: True, **({IDLE: list(idle)} if idle else {}), **config_to_dict(config)})


def write_config(config: Section, path: Path) -> None:
    """Write the config as YAML, whole or not at all; `--config-path <its folder> --config-name config` loads it."""
    with published(path) as temporary:
        temporary.write_text(config_to_yaml(config) + END, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that YAML files and command line name."""

    values: Mapping[str, JSON]
    """Values by dotted path, interpolations unresolved."""
    given: Collection[str]
    """The keys that the user gave, not a recipe of ours."""
    typed: Collection[str] = ()
    """The keys and sections on the command line."""
    faults: Sequence[str] = ()
    """Messages for overrides that are wrong by themselves."""
    tree: DictConfig | None = None
    """The tree that Hydra composed, with its own section `hydra`."""
    is_whole: bool = False
    """A file among the YAML files holds every key."""
    readings: Sequence[Reading] = ()
    """Dialects' readings: one of the whole config, or some of the keys that are not ours."""
    is_translated: bool = False
    """The config is written in a dialect as a whole."""
    strangers: Sequence[str] = ()
    """Keys that nobody knows."""


def read_overrides(command: CommandLine, schema: type[Section]) -> tuple[list[Path], list[Override], list[str]]:
    """Read the overrides: the folders in which YAML files are searched, the overrides, and their texts for Hydra.

    Raises ConfigError for a file that is not there and for an override that cannot be read.
    """
    searched = folders_of(command)
    overrides = [Override.parse(text, searched, schema) for text in command.overrides]
    return searched, overrides, [override.text for override in overrides if override.text is not None]


def compose_keys(command: CommandLine, schema: type[Section]) -> Keys:
    """Let Hydra put YAML files and overrides together.

    Raises ConfigError for a file that is not there and for an override that cannot be read.
    """
    searched, overrides, texts = read_overrides(command, schema)
    tree, own = compose_trees(searched, command.config_name, texts, schema)
    faults = [override.fault for override in overrides if override.fault is not None]
    keys = keys_of(tree, own, overrides, schema, faults)
    of_hydra = [override.unused for override in overrides if override.unused is not None]
    of_hydra += faults_of_yaml(tree, hydras_own())
    if keys.is_translated:  # a command of another trainer is to run as it is
        say(of_hydra)
    else:
        keys = replace(keys, faults=[*keys.faults, *of_hydra])
    file = start_file(command, searched)
    is_runs = is_of_a_run(file)
    if not command.trust and (keys.is_whole or is_runs):
        refuse_uses(file, resolve(keys, schema), schema, keys.typed)
    if is_runs and any(not is_at(key, keys.typed) for key in keys.strangers):
        wrote = f"{file} was written by {writer_of(file.parent)}, and this is {this_agentrl()}"
        keys = replace(
            keys, faults=[*keys.faults, f"{wrote}: use that one, or take out the keys that are unknown here"]
        )
    return keys


def start_file(command: CommandLine, searched: Sequence[Path]) -> Path:
    """Return the YAML file that a command starts from. searched: as `folders_of` lists them."""
    return searched[0] / f"{command.config_name.removesuffix('.yaml')}.yaml"


def is_of_a_run(file: Path) -> bool:
    """Check whether a run wrote a config file; our own files never count, even next to a run's files."""
    return not is_ours(file) and is_read_back(file)


def keys_of(
    tree: DictConfig, own: DictConfig, overrides: Sequence[Override], schema: type[Section], faults: list[str]
) -> Keys:
    """Take the keys out of the tree that Hydra composed. `own`: the tree without the quickstart's recipes."""
    typed = [override.key for override in overrides]
    deleted = [override.deletes for override in overrides if override.deletes is not None]
    known = known_by(schema)
    values = {key: value for key, value in flat(tree, known).items() if not is_at(key, deleted)}
    if schema is Config and isinstance(values.get(DIALECT), str):
        return translated_keys(tree, schema, typed, faults, deleted)
    mine = {key: value for key, value in flat(own, known).items() if key in values}
    idle = [key for key in as_list(values.pop(IDLE, None)) if not is_at(str(key), typed)]
    is_whole = bool(values.pop(EVERY_KEY, False))
    strangers, readings = spelled(values, schema)
    for reading in readings:
        values |= reading.values
        mine |= reading.values
    given = set_of(mine, schema, typed).difference(idle) if is_whole else mine.keys()
    return Keys(values, given, typed, faults, tree, is_whole, readings, strangers=strangers)


def spelled(values: dict[str, JSON], schema: type[Section]) -> tuple[list[str], list[Reading]]:
    """Take the keys that are not ours out of `values`, and let dialects read them; return unknown keys, and readings.

    Where all keys are ours no dialect is looked up.
    """
    known = known_by(schema)
    unknown = {key: value for key, value in values.items() if key not in known and not is_section(key, known)}
    for key in unknown:
        del values[key]
    unknown = {key: value for key, value in unknown.items() if value != {}}
    readings: list[Reading] = []
    for dialect in all_dialects() if unknown else ():
        reading = dialect.spelled(unknown, values, schema)
        unknown = {key: unknown[key] for key in reading.strangers}
        say(reading.said)
        readings.append(reading)
    return list(unknown), readings


def say(texts: Iterable[str]) -> None:
    """Log the notes about the config for the user."""
    for text in texts:
        logger.warning("%s", text)


def translated_keys(
    tree: DictConfig, schema: type[Section], typed: Collection[str], faults: list[str], deleted: Collection[str]
) -> Keys:
    """Translate a config that is written in a dialect. No key of it counts as given: one without effect is noted."""
    dialect = dialect_of(str(tree[DIALECT]))
    if (read := dialect.whole) is None:
        raise ConfigError(f"{DIALECT}={tree[DIALECT]}: no config is written in it as a whole; leave {DIALECT} out")
    own = without_hydra(tree)
    try:
        given = OmegaConf.to_container(own, resolve=True)
    except InterpolationResolutionError:
        given = OmegaConf.to_container(over(dialect.lent(), own), resolve=True)
    values = flatten(given, leaf_keys(schema))  # type: ignore[arg-type]
    found = {key: value for key, value in values.items() if not is_at(key, deleted)}
    reading = read(found, schema)
    say(reading.said)
    faults += reading.faults
    return Keys(reading.values, (), typed, faults, tree, readings=[reading], is_translated=True)


def over(lent: Mapping[str, JSON], tree: DictConfig) -> DictConfig:
    """Copy a tree with what its interpolations stand for, where they may name further defaults."""
    whole, found = OmegaConf.merge(nested(lent), tree), OmegaConf.create(OmegaConf.to_container(tree))
    for key, value in flat(tree, {}).items():
        if "${" in str(value):
            stands = OmegaConf.select(whole, key)
            plain = OmegaConf.to_container(stands, resolve=True) if OmegaConf.is_config(stands) else stands
            OmegaConf.update(found, key, plain, merge=False)
    assert isinstance(found, DictConfig)
    return found


def set_of(values: Mapping[str, JSON], schema: type[Section], typed: Collection[str]) -> set[str]:
    """Find the keys given in a file that holds every key: by a value other than the default, or on the command line."""
    default = flatten(defaults(schema), leaf_keys(schema))
    return {key for key, value in values.items() if value != default.get(key, MISSING) or is_at(key, typed)}


def set_by_us(keys: Keys, schema: type[Section]) -> set[str]:
    """Find the keys that a YAML file of ours sets, and that the command line and files of the user's do not set."""
    if keys.tree is None:
        return set()
    searched = [Path(str(source.path)) for source in keys.tree.hydra.runtime.config_sources]
    ours, theirs, waiting = set[str](), set[str](), [str(keys.tree.hydra.job.config_name)]
    while waiting:
        name = waiting.pop().removesuffix(".yaml")
        path = next((path for folder in searched if (path := folder / f"{name}.yaml").is_file()), None)
        tree: JSON = {} if path is None else OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[assignment]
        assert isinstance(tree, dict)
        below = [str(one) for one in as_list(tree.pop("defaults", [])) if isinstance(one, str) and one != "_self_"]
        waiting += [one[1:] if one.startswith("/") else str(Path(name).parent / one) for one in below]
        (ours if path is not None and is_ours(path) else theirs).update(flatten(tree, leaf_keys(schema)))
    return {key for key in ours - theirs if not is_at(key, keys.typed)}


def is_ours(file: Path) -> bool:
    """Check whether a YAML file came with the package."""
    return any(file.is_relative_to(folder) for folder in our_folders())


def folders_of(command: CommandLine) -> list[Path]:
    """List the folders of YAML files in the order in which they are searched, with the start file's folder first.

    Raises ConfigError where no folder has the file, for a folder that is not there, and for a file of a run that leads
    to others.
    """
    own = given_folders(command)
    ours = our_folders()
    first = own[:1] if command.config_path is not None else [*ours, *own]
    places = [*first, *(path for path in [*own, *ours] if path not in first)]
    name = command.config_name.removesuffix(".yaml")
    # A file next to others of one's own is theirs: ours of the same name is not taken instead.
    start = next((path for path in [*first, *own] if (path / f"{name}.yaml").is_file()), None)
    if start is None:
        there = {path: ", ".join(sorted(file.stem for file in path.glob("*.yaml"))) or "none" for path in places}
        raise ConfigError(
            f"--config-name {name}: no such file in {' or '.join(map(str, dict.fromkeys([*first, *own])))}"
            f"{advice(name)}; there are "
            + "; ".join(f"{names} in {path}" for path, names in there.items())
            + (". --config-dir adds a folder without a file to start from" if command.config_path is not None else "")
        )
    found = [start, *(path for path in places if path != start)]
    if is_of_a_run(file := start_file(command, found)):
        check_folder(file.parent)
        refuse_cut(file)
        refuse_aliases(file)
        if not command.trust:
            refuse_other_files(file, command.overrides)
    return found


def given_folders(command: CommandLine) -> list[Path]:
    """List the folders that a command line names, --config-path's first. Raises ConfigError for one not there."""
    found = []
    for flag, path in {"--config-path": command.config_path, "--config-dir": command.config_dir}.items():
        if path is not None and not path.expanduser().is_dir():
            raise ConfigError(f"{flag} {path}: there is no such folder (working directory {Path.cwd()})")
        found += [] if path is None else [path.expanduser().resolve()]
    return found


def compose_trees(
    searched: Sequence[Path], name: str, texts: list[str], schema: type[Section]
) -> tuple[DictConfig, DictConfig]:
    """Compose two trees: with the quickstart's recipes that apply, and without any, which is the user's own."""

    def without(groups: Sequence[str]) -> DictConfig:
        return hydra_compose(searched, name, [*texts, *(f"~{group}" for group in groups)])

    # Our own start file chooses both recipes: a job with data and a policy of its own is composed once.
    tree = None if (searched[0], name) == (configs_dir(), "train") else without(())
    chosen = dict.fromkeys(RECIPES, "quickstart") if tree is None else tree.hydra.runtime.choices
    named = {text.lstrip("+~").partition("=")[0] for text in texts}
    recipes = [group for group in RECIPES if chosen.get(group) == "quickstart" and group not in named]
    own = without(recipes) if recipes or tree is None else tree
    leaves, dropped = leaf_keys(schema), []
    for group in recipes:
        field = leaves.get(RECIPES[group])
        if field is None or OmegaConf.select(own, RECIPES[group], default=field.default) != "quickstart":
            dropped.append(group)
    if dropped == recipes:
        return own, own
    return (without(dropped) if tree is None or dropped else tree), own


def hydra_compose(searched: Sequence[Path], name: str, overrides: list[str]) -> DictConfig:
    """Compose one YAML file, the files it builds on, and overrides; the tree has Hydra's own section `hydra`, too."""
    with initialize_config_dir(str(searched[0]), version_base="1.3"):
        try:
            with refusing_unreadable(f"{searched[0] / name}.yaml, or a file that it builds on"):
                return compose(name, overrides=with_search_path(searched, overrides), return_hydra_config=True)
        except KeyError as error:  # Hydra looks these up in the environment as it composes
            raise ConfigError(f"{refused('hydra.job.env_copy')} (found {error})") from error


@cache
def hydras_own() -> DictConfig:
    """Compose Hydra's own section `hydra` as it is without any YAML file."""
    with initialize_config_dir(str(configs_dir()), version_base="1.3"):
        return compose(None, return_hydra_config=True)


def with_search_path(searched: Sequence[Path], overrides: Sequence[str]) -> list[str]:
    """Add the folders after the first to the value of hydra.searchpath in the overrides."""
    ours, others = [f"file://{path}" for path in searched[1:]], []
    for text in overrides:
        override = read_override(text)
        if override.key_or_group == SEARCHPATH and isinstance(value := override.value(), list):
            ours = [*map(str, value), *ours]
        else:
            others.append(text)
    return [f"{SEARCHPATH}=[{','.join(map(quoted, ours))}]", *others]


def known_by(schema: type[Section]) -> Mapping[str, FieldInfo]:
    """Map the keys that may be written in a YAML file, also the ignored ones, to their fields."""
    return {**(leaf_keys(schema.ignored) if schema.ignored is not None else {}), **leaf_keys(schema)}


def flat(tree: DictConfig, leaves: Mapping[str, FieldInfo]) -> dict[str, JSON]:
    """Flatten a tree that Hydra made to values by dotted path."""
    return flatten(OmegaConf.to_container(without_hydra(tree), resolve=False), leaves)  # type: ignore[arg-type]


def without_hydra(tree: DictConfig) -> DictConfig:
    """Copy a tree that Hydra made, without its own section."""
    return OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])


def is_at(key: str, places: Collection[str]) -> bool:
    """Check whether the key, or a section around it, is among `places`."""
    return any(key == place or key.startswith(f"{place}.") for place in places)


@dataclass(frozen=True, slots=True)
class Override:
    """One override of the command line."""

    key: str
    text: str | None = None
    """The override as Hydra takes it whether or not a YAML file holds its key; None: Hydra has no part in it."""
    deletes: str | None = None
    """The key or section that goes back to its default."""
    fault: str | None = None
    unused: str | None = None
    """Why a key of Hydra's own has no effect."""

    @staticmethod
    def parse(text: str, searched: Sequence[Path], schema: type[Section]) -> Override:
        """Read one override. Raises ConfigError and Hydra's errors for another text."""
        text = long_key(text, schema)
        override = read_override(text)
        text = override.input_line or text
        if override.is_sweep_override():
            raise ConfigError(
                f"{text}: one value is expected; a list is written {override.key_or_group}=[a,b], and --multirun runs "
                "a job for each value"
            )
        key, leaves = override.key_or_group, known_by(schema)
        if override.package is not None and not any((place / key).is_dir() for place in searched):
            raise ConfigError(
                f"{text} chooses a YAML file {key}/{override.value()}.yaml for {override.package}, and there is no "
                f"folder {key} of them: leave it out, and set keys under {override.package}"
                + advice(f"{key}@{override.package}")
            )
        if is_of_hydra(override):
            unused = None if (key, override.value()) in ASKS_NOTHING.items() else refused(key)
            return Override(key, text if key == SEARCHPATH else None, unused=unused)
        deletes = override.is_delete()
        is_group = any((place / key).is_dir() for place in searched)
        if is_group and (deletes or "/" in key or isinstance(override.value(), str | list)):
            return Override(key, text)
        if deletes:
            known = key in leaves or is_section(key, leaves)
            return Override(key, deletes=key, fault=None if known else unknown_keys([key], list(leaf_keys(schema))))
        if is_section(key, leaves):
            return Override(key, fault=no_section(key, override.value(), leaves))
        if isinstance(override.value(), float) and key in leaves and is_text(leaves[key].annotation):
            text = f"{key}={quoted(text.partition('=')[2].strip())}"  # experiment_name=1e-3 is a name, not 0.001
        return Override(key, "++" + text.lstrip("+"))


def is_text(annotation: object) -> bool:
    """Check whether a key takes texts, and no numbers."""
    found = kinds(annotation)
    return str in found and found.isdisjoint((int, float))


def kinds(annotation: object) -> set[type]:
    """Collect the types of the values that a key takes, without those within lists and mappings."""
    if get_origin(annotation) is Literal:
        return set(map(type, get_args(annotation)))
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return set[type]().union(*map(kinds, get_args(annotation)))
    return {annotation} if isinstance(annotation, type) else set()


def switches(values: Mapping[str, JSON], schema: type[Section]) -> Iterator[str]:
    """Write the messages for keys of numbers that are true or false, which pydantic would read as 1 and 0."""
    leaves = leaf_keys(schema)
    for key, value in values.items():
        if isinstance(value, bool) and key in leaves:
            found = kinds(leaves[key].annotation)
            if bool not in found and not found.isdisjoint((int, float)):
                about = " ".join((leaves[key].description or "").split())
                yield f"{key}: expected a number, found {shown(value)}. {about}"


def long_key(text: str, schema: type[Section]) -> str:
    """Write an override with its key in full, where the schema takes a short one for it."""
    key = text.lstrip("+~")
    for short, long in schema.short_keys.items():
        if key.startswith(short):
            return text.removesuffix(key) + long + key.removeprefix(short)
    return text


def checked(keys: Keys, schema: type[SchemaT], script: FromScript = NO_SCRIPT) -> SchemaT:
    """Make the config of the schema's defaults and `keys`. Raises ConfigError as `load_config` does."""
    values = resolve(keys, schema)
    values |= corrected(values, keys) | fitting(values, keys) | found_files(values, schema)
    config = validate(values, schema, [*keys.faults, *faults_of_names(keys, schema)])
    say(check(config, keys.given, lambda: {*set_by_us(keys, schema), *script.lent}, script.supplied))
    for reading in keys.readings:
        say(reading.notes(config, keys.typed))
    return config


def corrected(values: Mapping[str, JSON], keys: Keys) -> dict[str, JSON]:
    """Return the correction for stale tokens where they are trained on and the user chose no correction.

    In a dialect its trainer's defaults hold, and a file that holds every key shows the choice.
    """
    if keys.is_translated or not values.get(STALENESS):
        return {}
    if keys.is_whole and not is_at(STALENESS, keys.typed):
        return {}
    m2po = values.get(f"{ACTOR}.policy_loss.loss_mode") == "m2po"  # it masks tokens by the same ratio itself
    chosen = {f"{CORRECTION}.{name}" for name in ("proximal", "rollout_is", "reject")}.intersection(keys.given)
    if m2po or chosen:
        return {}
    return {f"{CORRECTION}.rollout_is": OF_STALE_TOKENS}


def fitting(values: Mapping[str, JSON], keys: Keys) -> dict[str, JSON]:
    """Return a size of mini-batches that fits the batch, at most the default, where the user gave no size."""
    batch, size = values.get("data.train_batch_size"), values.get(MINI_BATCH)
    if keys.is_whole or keys.is_translated or MINI_BATCH in keys.given:
        return {}
    if not (isinstance(batch, int) and isinstance(size, int)) or batch < 1:  # the schema says what is wrong
        return {}
    return {MINI_BATCH: max(one for one in even_sizes(batch) if one <= size)}


def found_files(values: Mapping[str, JSON], schema: type[Section]) -> dict[str, JSON]:
    """Return the places of the files that keys name; a file that no folder has is a fault of `check`."""
    found: dict[str, JSON] = {}
    for path, key in all_keys(schema).items():
        name = values.get(path)
        if isinstance(name, str) and any(isinstance(rule, NamesFile) and rule.is_name(name) for rule, _ in key.rules):
            with suppress(ConfigError):
                found[path] = find_file(path, name)
    return found


def faults_of_names(keys: Keys, schema: type[Section]) -> list[str]:
    """Write the messages for keys that do not exist or are not read."""
    if keys.is_translated:
        return []
    leaves, known, found = leaf_keys(schema), known_by(schema), []
    for key, value in keys.values.items():
        if is_section(key, known):
            if value != {}:
                found.append(no_section(key, value, known))
        elif key not in leaves and is_at(key, keys.typed):
            near = nearest(key, leaves, 1)
            found.append(
                f"{key}={value} has no effect: only training reads it"
                + (f"; did you mean {near[0]}?" if near else f". Leave {key} out")
            )
    found += [fault for reading in keys.readings for fault in reading.faults]
    return [*found, unknown_keys(keys.strangers, list(leaves))] if keys.strangers else found


def resolve(keys: Keys, schema: type[Section]) -> dict[str, JSON]:
    """Return the values of the schema's keys by dotted path, interpolations resolved, without those still missing."""
    leaves, known = leaf_keys(schema), known_by(schema)
    ignored = flatten(defaults(schema.ignored), known) if schema.ignored is not None else {}
    unresolved = {**ignored, **flatten(defaults(schema), leaves), **keys.values}
    tree = deepcopy(nested({key: value for key, value in unresolved.items() if key in known}))
    if any(interpolates(value) for value in unresolved.values()):
        tree = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[assignment]
    values = flatten(tree, known)
    return {key: value for key, value in values.items() if key in leaves and value != MISSING}


def interpolates(value: object) -> bool:
    """Say whether a value, or a value in it, refers to another key. OmegaConf takes long to read a tree."""
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(interpolates(one) for one in (*value, *value.values()))
    return isinstance(value, list | tuple) and any(interpolates(one) for one in value)


def is_section(key: str, leaves: Iterable[str]) -> bool:
    """Check whether there are keys under `key`."""
    return any(leaf.startswith(f"{key}.") for leaf in leaves)


def no_section(section: str, value: object, leaves: Iterable[str]) -> str:
    """Write the message for a section that has a value."""
    first = next(leaf for leaf in leaves if leaf.startswith(f"{section}."))
    advice = f". For the defaults leave {section} out" if value is None else ""
    return f"{section}: expected keys under it, e.g. {first}, found {value!r}{advice}"


def validate(values: Mapping[str, JSON], schema: type[SchemaT], faults: Sequence[str] = ()) -> SchemaT:
    """Check types and ranges. Raises ConfigError with `faults` and a line for each wrong value."""
    lines = [*faults, *switches(values, schema)]
    try:
        config = schema.model_validate(nested(values))
    except ValidationError as error:
        lines += explain(error, schema)
    if lines:
        raise ConfigError("\n".join(lines))
    return config


def explain(error: ValidationError, schema: type[Section]) -> list[str]:
    """Write a line for each key with a wrong value, and one for all that are missing."""
    leaves = leaf_keys(schema)
    expected: dict[str, list[str]] = {}
    found: dict[str, object] = {}
    missing = []
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        if item["type"] == "missing" and ".".join(parts) in leaves:
            missing.append(".".join(parts))
            continue
        key = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in leaves), "")
        expected.setdefault(key or ".".join(parts), []).append(
            item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        )
        found.setdefault(key or ".".join(parts), item["input"])
    lines = []
    for key, texts in expected.items():
        description = leaves[key].description if key in leaves else None
        line = f"{key}: expected {' or '.join(dict.fromkeys(texts))}, found {found[key]!r}"
        lines.append(line + (f". {' '.join(description.split())}" if description else ""))
    if missing:
        lines.append(f"{', '.join(sorted(missing))} must be given, e.g. {sorted(missing)[0]}=...")
    return lines
