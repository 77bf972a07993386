#!/usr/bin/env bash
# The recipe at tiny scale on a CPU: three levels of puzzles, a policy that guesses numbers, GRPO on a curriculum.
#   bash examples/reasoning_gym/tiny.sh [overrides of the training]            CONVERSATIONS: of the warm-up
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=runs/tiny-reasoning-gym

python -m data_prep.environment --config examples/reasoning_gym/levels_tiny.yaml --out "$out/rows" \
  --train-rows 240 --validation-rows 48
python -m examples.reasoning_gym.guesses "$out" --conversations "${CONVERSATIONS:-1280}"
python -m agentrl.train --config-name recipe/reasoning_gym_tiny "$@"
