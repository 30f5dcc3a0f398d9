# Names of your site; the other files of this folder read them and need no editing. The environment comes first.
: "${HOSTFILE:=hosts}"                      # lines "NAME slots=GPUS"; the launching node's name comes first
: "${MASTER_PORT:=29500}"                   # free on the first node, reachable from the others
: "${NETWORK_INTERFACE:=}"                  # of the nodes' common network, such as ib0; empty: found by itself
: "${DS_CONFIG:=ds_configs/zero2_bf16.json}"
: "${CONFIG:=pretrain/configs/gpt2_medium.yaml}"
: "${OUT:=runs/medium}"                     # on a file system that all nodes share
: "${GPUS_PER_NODE:=8}"

# What follows needs no editing.
RUN=(--ds_config "$DS_CONFIG" --config "$CONFIG" "out=$OUT" "$@")
if [ -n "$NETWORK_INTERFACE" ]; then
    export NCCL_SOCKET_IFNAME="$NETWORK_INTERFACE" GLOO_SOCKET_IFNAME="$NETWORK_INTERFACE"
fi
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1    # a rank whose partner is gone ends instead of waiting
PATH="$PWD/.venv/bin:$PATH"

# pdsh hands on no environment but PYTHON* and NCCL*: DeepSpeed reads the rest from a file. It takes no empty lines.
pass_environment_on() {
    DS_ENV_FILE="$(realpath -m "$OUT")/deepspeed_env"
    export DS_ENV_FILE
    mkdir -p "$OUT"
    env | grep -E '^(GLOO_|NCCL_|TORCH_|OMP_|CUDA_|HF_|LD_LIBRARY_PATH=)' > "$DS_ENV_FILE" || true
}
