#!/usr/bin/env bash
# On each node: pretrain/launch/torchrun.sh FIRST_NODE NUMBER_OF_NODES [section.key=value ...]
set -euo pipefail
MASTER="$1" NODES="$2"
shift 2
source "$(dirname "$0")/site.sh"
LAUNCH=(torchrun --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" --rdzv-backend c10d --rdzv-id deeploop
        --rdzv-endpoint "$MASTER:$MASTER_PORT")
"${LAUNCH[@]}" -m pretrain.preflight "${RUN[@]}"
exec python -m pretrain.supervise --out "$OUT" -- "${LAUNCH[@]}" pretrain/run.py "${RUN[@]}"
