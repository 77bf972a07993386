#!/usr/bin/env bash
# Self-play at tiny scale on a CPU: games of Nim, a policy warmed up on random moves, both roles played by it.
#   bash examples/self_play/tiny.sh [overrides of the training]        CONVERSATIONS: of the warm-up
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python -m examples.self_play.tiny --out runs/tiny-self-play --conversations "${CONVERSATIONS:-2560}"
python -m agentrl.train --config-name recipe/self_play_tiny "$@"
