#!/usr/bin/env bash
# The recipe at tiny scale on a CPU: made-up sums, a policy warmed up for them, a real sandbox, PPO.
#   bash examples/retool/tiny.sh [overrides of the training]           CONVERSATIONS: of the warm-up
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=runs/tiny-retool

python -m examples.tiny retool --out "$out" ${CONVERSATIONS:+--conversations "$CONVERSATIONS"}
if (exec 3<>/dev/tcp/127.0.0.1/8080) 2>/dev/null; then
  echo "port 8080 is taken: something else would be asked instead of this example's server" >&2
  exit 1
fi
python -m sandbox.server --port 8080 &
trap 'kill %1; wait' EXIT

python -m agentrl.train --config-name recipe/retool_tiny "$@"
