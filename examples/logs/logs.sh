#!/usr/bin/env bash
# A folder of logged calls with thumbs becomes a better model: joined, then supervised on what nobody disliked, then by
# KTO, then by rewards. Held-out answers are compared before and after.
#   bash examples/logs/logs.sh LOGS MODEL OUT [overrides of the training with rewards]
# The same command resumes where it was stopped. `python examples/logs/make.py --out LOGS` writes a made-up log.
set -euo pipefail
logs=${1:?the folder of the logs} model=${2:?a model} out=${3:?a folder for all that is made}
shift 3

[ -e "$out/data/report.json" ] || python -m data_prep.traces --source "$logs" --out "$out/data" --held-out 0.1
[ -e "$out/rows/tools.yaml" ] || python -m data_prep.log_rows --source "$out/data/conversations.parquet" \
  --held-out "$out/data/held_out.parquet" --out "$out/rows"

answers() { # of a model, to held-out prompts, and their agreement with what users liked
  [ -e "$out/$2.parquet" ] || python -m agentrl.generate data.path="$out/rows/held_out.parquet" \
    data.output_path="$out/$2.parquet" data.output_trajectories=true rollout.n=4 model.path="$1" \
    rollout.multi_turn.tool_config_path="$out/rows/tools.yaml"
  echo "$2:"
  python -m agentrl.evaluate data.path="$out/$2.parquet" data.output_path="$out/$2.json"
}

answers "$model" before
[ -e "$out/sft/policy/config.json" ] || python -m agentrl.sft data.train_files="$out/data/conversations.parquet" \
  data.feedback=filter data.truncation=skip model.path="$model" trainer.save_freq=50 trainer.default_local_dir="$out/sft"
[ -e "$out/kto/policy/config.json" ] || python -m agentrl.preferences loss=kto \
  data.train_files="$out/data/conversations.parquet" data.val_files="$out/data/held_out.parquet" \
  data.truncation=skip trainer.val_before_train=true model.path="$out/sft/policy" trainer.save_freq=50 trainer.default_local_dir="$out/kto"
[ -e "$out/grpo/policy/config.json" ] || python -m agentrl.train data.train_files="$out/rows/train.parquet" \
  data.val_files="$out/rows/held_out.parquet" actor_rollout_ref.model.path="$out/kto/policy" trainer.save_freq=5 \
  actor_rollout_ref.rollout.multi_turn.tool_config_path="$out/rows/tools.yaml" \
  trainer.default_local_dir="$out/grpo" "$@"
for trained in sft kto grpo; do answers "$out/$trained/policy" "after-$trained"; done
echo "$out/grpo/policy is a model in Hugging Face format: see docs/serve.md"
