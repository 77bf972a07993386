#!/usr/bin/env bash
# SmolLM2-135M-Instruct on a curriculum of puzzles: a warm-up on 256 solved ones, which teaches how to answer, then GRPO.
#   bash examples/reasoning_gym/smollm2.sh [overrides of the training]     The same command resumes where it was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model=runs/smollm2/model out=runs/reasoning-gym rows=runs/reasoning-gym/rows

[ -e "$model/config.json" ] || python -m data_prep.model smollm2 --out "$model"
[ -e "$rows/train.parquet" ] || python -m data_prep.environment --config examples/reasoning_gym/levels.yaml \
  --out "$rows" --train-rows 3000 --validation-rows 120
[ -e "$out/sft.parquet" ] || python -m examples.reasoning_gym.solved "$rows/train.parquet" "$out/sft.parquet"
[ -e "$out/warm-up/policy" ] || python -m agentrl.sft data.train_files="$out/sft.parquet" data.train_batch_size=16 \
  data.max_token_len_per_gpu=2048 model.path="$model" model.chat_template=examples/smollm2/chat_template.jinja \
  optim.lr=1e-4 trainer.total_training_steps=16 trainer.default_local_dir="$out/warm-up"
python -m agentrl.train --config-name recipe/reasoning_gym_smollm2 "$@"
