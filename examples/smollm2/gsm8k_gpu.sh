#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns GSM8K with the calculator on one GPU: a longer warm-up, then GRPO with larger batches.
#   bash examples/smollm2/gsm8k_gpu.sh GSM8K [overrides of the training]     GSM8K: folder of train.jsonl and test.jsonl
#   SEED: of the training, in a folder of its own. The same command resumes where it was stopped.
set -euo pipefail
source=$(realpath "${1:?the folder of the files train.jsonl and test.jsonl of GSM8K}")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model=runs/smollm2/model out=runs/smollm2/gsm8k_gpu seed=${SEED:-1} solutions=${SOLUTIONS:-2000}

[ -e "$model/config.json" ] || python -m data_prep.model smollm2 --out "$model"
# The first solutions are for the warm-up, the other problems of at most two computations for the rewards.
[ -e "$out/data/sft.parquet" ] ||
  python -m data_prep.gsm8k --source "$source" --out "$out/data" --sft --problems ":$solutions"
[ -e "$out/short/train.parquet" ] ||
  python -m data_prep.gsm8k --source "$source" --out "$out/short" --steps 2 --problems "$solutions:"
[ -e "$out/warm-up/policy" ] || python -m agentrl.sft data.train_files="$out/data/sft.parquet" \
  data.train_batch_size=16 data.max_token_len_per_gpu=8192 trainer.total_epochs=3 \
  model.path="$model" model.dtype=bfloat16 model.chat_template=examples/smollm2/chat_template.jinja optim.lr=1e-4 \
  optim.lr_scheduler_type=cosine optim.lr_warmup_steps_ratio=0.05 trainer.default_local_dir="$out/warm-up"
python -m agentrl.train --config-name recipe/smollm2_gsm8k_gpu data.seed="$seed" trainer.seed="$seed" \
  trainer.default_local_dir="$out/seed-$seed" "$@"
