#!/usr/bin/env bash
# The recipe at tiny scale on a CPU: errands over a grid, a policy warmed up for them, an environment, GiGPO.
#   bash examples/gigpo/tiny.sh [overrides of the training]            CONVERSATIONS: of the warm-up
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python -m examples.tiny gigpo --out runs/tiny-gigpo ${CONVERSATIONS:+--conversations "$CONVERSATIONS"}
python -m agentrl.train --config-name recipe/gigpo_tiny "$@"
