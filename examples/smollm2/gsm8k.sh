#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns GSM8K with the calculator: a warm-up on worked solutions, then GRPO.
#   bash examples/smollm2/gsm8k.sh GSM8K [overrides of the training]     GSM8K: folder of train.jsonl and test.jsonl
#   SEED: of the training, in a folder of its own. The same command resumes where it was stopped.
set -euo pipefail
source=$(realpath "${1:?the folder of the files train.jsonl and test.jsonl of GSM8K}")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model=runs/smollm2/model out=runs/smollm2/gsm8k seed=${SEED:-1} solutions=${SOLUTIONS:-2000}

[ -e "$model/config.json" ] || python -m data_prep.model smollm2 --out "$model"
# Problems whose solution computes at most twice: of the first solutions for the warm-up, of the others for the rewards.
[ -e "$out/data/sft.parquet" ] ||
  python -m data_prep.gsm8k --source "$source" --out "$out/data" --sft --steps 2 --problems ":$solutions"
[ -e "$out/short/train.parquet" ] ||
  python -m data_prep.gsm8k --source "$source" --out "$out/short" --steps 2 --problems "$solutions:"
[ -e "$out/warm-up/policy" ] || python -m agentrl.sft data.train_files="$out/data/sft.parquet" \
  data.train_batch_size=16 data.max_token_len_per_gpu=2048 trainer.total_epochs=3 model.path="$model" \
  model.chat_template=examples/smollm2/chat_template.jinja optim.lr=1e-4 trainer.save_freq=47 \
  trainer.max_ckpt_to_keep=1 trainer.default_local_dir="$out/warm-up"
[ -e "$out/before/val_only/metrics.jsonl" ] || python -m agentrl.train --config-name recipe/smollm2_gsm8k \
  trainer.val_only=true trainer.default_local_dir="$out/before" "$@"
python -m agentrl.train --config-name recipe/smollm2_gsm8k data.seed="$seed" trainer.seed="$seed" \
  trainer.default_local_dir="$out/seed-$seed" "$@"
