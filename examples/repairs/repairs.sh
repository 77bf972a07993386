#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns to repair small repositories: a warm-up on recorded repairs, then GRPO.
#   bash examples/repairs/repairs.sh [overrides of the training]
#   SEED: of the training, in a folder of its own.  IMAGE: of containers for the sessions, with sh, tar and python3;
#   without it they run as you. The same command resumes where it was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model=runs/smollm2/model out=runs/repairs seed=${SEED:-1}

[ -e "$model/config.json" ] || python -m data_prep.model smollm2 --out "$model"
[ -e "$out/data/train.parquet" ] || python -m data_prep.repairs --out "$out/data" --test-rows 200 --unseen-rows 50
# The warm-up's repositories are of another seed.
[ -e "$out/recorded.parquet" ] || {
  python -m data_prep.repairs --out "$out/warm-up-data" --seed 2 --train-rows 96 --test-rows 1
  python examples/repairs/record.py "$out/warm-up-data/train.parquet" "$out/recorded.parquet" 96
}
[ -e "$out/warm-up/policy" ] || python -m agentrl.sft data.train_files="$out/recorded.parquet" \
  data.train_batch_size=8 data.max_token_len_per_gpu=2048 trainer.total_epochs=2 model.path="$model" \
  model.chat_template=examples/smollm2/chat_template.jinja optim.lr=5e-5 trainer.default_local_dir="$out/warm-up"
proxy=actor_rollout_ref.rollout.agent.openai_proxy words=()
[ -z "${IMAGE:-}" ] || words=("$proxy.start=container" "$proxy.container.image=$IMAGE")
[ -e "$out/before/val_only/metrics.jsonl" ] || python -m agentrl.train --config-name recipe/smollm2_repairs \
  "${words[@]}" trainer.val_only=true trainer.default_local_dir="$out/before" "$@"
python -m agentrl.train --config-name recipe/smollm2_repairs "${words[@]}" data.seed="$seed" trainer.seed="$seed" \
  trainer.default_local_dir="$out/seed-$seed" "$@"
