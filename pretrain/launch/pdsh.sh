#!/usr/bin/env bash
# All nodes from one, by pdsh over ssh: pretrain/launch/pdsh.sh [section.key=value ...] in the repository's folder.
set -euo pipefail
source "$(dirname "$0")/site.sh"
pass_environment_on
MASTER="${MASTER_ADDR:-$(awk 'NF && $1 !~ /^#/ { print $1; exit }' "$HOSTFILE")}"
LAUNCH=(deepspeed --hostfile "$HOSTFILE" --master_addr "$MASTER" --master_port "$MASTER_PORT" ${DEEPSPEED_FLAGS:-})
"${LAUNCH[@]}" --module pretrain.preflight "${RUN[@]}"
exec python -m pretrain.supervise --out "$OUT" -- "${LAUNCH[@]}" pretrain/run.py "${RUN[@]}"
