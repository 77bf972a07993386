"""Writes the defaults of the trainers of verl's releases, recipes and forks into tests/verl/defaults.csv.

A trainer is NAME=CLONE:FOLDER:FILE. The YAML file of the folder is composed over verl/trainer/config of the clone, as
`python3 -m verl.trainer.main_ppo` there does without an argument. With NAME+=CLONE:FOLDER:FILE only the keys are
written that the file changes or adds to verl's own trainer of the clone. Rows of other names stay.

    python -m benchmarks.verl.defaults verl-agent/fsdp=/tmp/verl-agent:verl/trainer/config:ppo_trainer

With `--lent CLONE` it writes agentrl/verl/keys/lent.txt: the defaults of verl's own trainers that ours leave out.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from pathlib import Path

from agentrl.config.keys import MISSING
from agentrl.system.json_value import JSON
from agentrl.verl.keys.families import LENT, base_defaults
from benchmarks.verl.composed import TRAINERS, composed, written
from benchmarks.verl.values import DEFAULTS

SOURCES = {
    "0.2/fsdp": "verl v0.2.0.post2",
    "search-r1/fsdp": "PeterGriffinJin/Search-R1 a14dc3a (29 October 2025)",
    "verl-agent/fsdp": "langfengQ/verl-agent 2716b30 (11 February 2026)",
    "dapo/fsdp, dapo/megatron": "verl-recipe 48ea0a7 over verl 1dda039 (22 August 2026)",
    "dapo-transfer-queue/megatron": "verl-recipe 48ea0a7 over verl b178a3c (29 January 2026)",
    "fully-async, one-step-off": "verl 1dda039 (22 August 2026)",
    "transfer-queue": "verl b178a3c (29 January 2026)",
}
"""The clones that the rows are of."""
BASES = {"fsdp": "ppo_trainer", "megatron": "ppo_megatron_trainer"}
"""The trainers of verl that others build on, by the engine in their names."""
LEFT_OUT = re.compile(r"_target_$|profiler|nsight|\.npu\.")
"""Keys that no launch script's own YAML builds on."""


def lent(clone: Path) -> dict[str, JSON]:
    """Return the defaults of verl's trainers with FSDP and Megatron, interpolations as written, that ours leave out."""
    found: dict[str, JSON] = {}
    for name in BASES.values():
        found = written(clone, clone / TRAINERS, name) | found
    ours = base_defaults()
    return {key: value for key, value in found.items() if key not in ours and not LEFT_OUT.search(key)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="*", metavar="NAME=CLONE:FOLDER:FILE")
    parser.add_argument("--lent", type=Path, metavar="CLONE")
    given = parser.parse_args()
    if given.lent is not None:
        LENT.write_text("".join(f"{key} {json.dumps(value)}\n" for key, value in sorted(lent(given.lent).items())))
    places = dict(text.split("=", 1) for text in given.trainers)
    with DEFAULTS.open(encoding="utf-8", newline="") as file:
        found = {(row["key"], row["default"]): row["trainers"].split() for row in csv.DictReader(file)}
    for names in found.values():
        names[:] = [name for name in names if name not in places and f"{name}+" not in places]
    for given_name, place in places.items():
        name = given_name.removesuffix("+")
        clone, folder, file_name = place.split(":")
        values = composed(Path(clone), Path(clone, folder), file_name)
        if name != given_name:
            base = composed(Path(clone), Path(clone) / TRAINERS, BASES[name.partition("/")[2]])
            values = {key: value for key, value in values.items() if base.get(key, MISSING) != value}
        for key, value in values.items():
            found.setdefault((key, json.dumps(value)), []).append(name)
    with DEFAULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["key", "default", "trainers"])
        writer.writerows([key, default, " ".join(names)] for (key, default), names in sorted(found.items()) if names)


if __name__ == "__main__":
    main()
