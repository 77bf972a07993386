#!/usr/bin/env bash
# Train on the machines of a job; every machine runs this script with the same words:
#   RANK=0 NODES=2 HEAD=10.0.0.1 GPUS=8 bash start.sh KEY=VALUE ...
# RANK: number of this machine, from 0; NODES: machines; HEAD: address of machine 0; GPUS: of each machine.
# Machine 0 starts Ray's head, waits for the others and trains; the others serve until the head ends.
set -euo pipefail
: "${RANK:?number of this machine, from 0}" "${NODES:?number of machines}"
: "${HEAD:?address of machine 0}" "${GPUS:?GPUs of each machine}"
port=${PORT:-6379}
patience=${PATIENCE:-600} # seconds that machines may take to join

if ((NODES == 1)); then # one process a GPU, or one process: Ray is started where it is needed
    exec python -m agentrl.train "trainer.n_gpus_per_node=$GPUS" "$@"
fi

command -v ray > /dev/null || { echo "no ray on PATH: activate the environment of agentrl" >&2; exit 1; }
export RAY_worker_niceness=0 # at the command's own priority
own=(--num-gpus="$GPUS")

if ((RANK > 0)); then
    until ray start --address="$HEAD:$port" "${own[@]}" --block; do # the head may not listen yet
        ((SECONDS < patience)) || { echo "machine $RANK: no Ray at $HEAD:$port after $patience s" >&2; exit 1; }
        sleep 5
    done
    exit 0
fi

ray start --head --node-ip-address="$HEAD" --port="$port" "${own[@]}"
trap 'ray stop' EXIT
alive='import ray; ray.init("auto", logging_level="ERROR"); print(sum(node["Alive"] for node in ray.nodes()))'
until here=$(python -c "$alive") && ((here >= NODES)); do
    ((SECONDS < patience)) || { echo "$here of $NODES machines joined in $patience s" >&2; exit 1; }
    sleep 5
done
python -m agentrl.train ray_init.address=auto "trainer.nnodes=$NODES" "trainer.n_gpus_per_node=$GPUS" "$@" &
trainer=$!
trap 'kill -TERM "$trainer"' TERM INT # the run saves a checkpoint
status=0
wait "$trainer" || status=$?
if ((status > 128)) && kill -0 "$trainer" 2>/dev/null; then # the signal ended the waiting, not the run
    wait "$trainer" || status=$?
fi
exit "$status"
