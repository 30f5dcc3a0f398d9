#!/usr/bin/env bash
# On each node, where there is no ssh between them: pretrain/launch/no_ssh.sh NODE_RANK [section.key=value ...]
# NODE_RANK counts from 0 in the order of the hostfile. Each node supervises its own launcher: when a node fails the
# others fail with it, and all meet again.
set -euo pipefail
NODE_RANK="$1"
shift
source "$(dirname "$0")/site.sh"
MASTER="${MASTER_ADDR:-$(awk 'NF && $1 !~ /^#/ { print $1; exit }' "$HOSTFILE")}"
LAUNCH=(deepspeed --hostfile "$HOSTFILE" --no_ssh --node_rank "$NODE_RANK" --master_addr "$MASTER"
        --master_port "$MASTER_PORT")
"${LAUNCH[@]}" --module pretrain.preflight "${RUN[@]}"
exec python -m pretrain.supervise --out "$OUT" -- "${LAUNCH[@]}" pretrain/run.py "${RUN[@]}"
