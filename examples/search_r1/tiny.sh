#!/usr/bin/env bash
# The recipe at tiny scale on a CPU: made-up questions and corpus, a policy warmed up for them, a real retriever, GRPO.
#   bash examples/search_r1/tiny.sh [overrides of the training]        CONVERSATIONS: of the warm-up
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=runs/tiny-search

python -m examples.tiny search_r1 --out "$out" ${CONVERSATIONS:+--conversations "$CONVERSATIONS"}
[ -e "$out/index" ] || python -m tools.retriever index "$out/corpus.jsonl" "$out/index"
if (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; then
  echo "port 8000 is taken: something else would be asked instead of this example's server" >&2
  exit 1
fi
python -m tools.retriever serve "$out/index" --port 8000 &
trap 'kill %1; wait' EXIT

python -m agentrl.train --config-name recipe/search_r1_tiny "$@"
