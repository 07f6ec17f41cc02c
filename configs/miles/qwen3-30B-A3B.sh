# R3 for miles' launchers of Qwen3-30B-A3B. r3 must be installed in miles' image: pip install r3-replay.
#
#     source /path/to/r3/configs/miles/qwen3-30B-A3B.sh
#     python scripts/run_qwen3_30b_a3b.py      --extra-args "${R3_MEGATRON_ARGS}"
#     python scripts/run_qwen3_30b_a3b_fsdp.py --extra-args "${R3_FSDP_ARGS}" --extra-env-vars "${R3_FSDP_ENV}"
R3_CONFIG_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"

# SGLang returns routes, settings, and each sample's shard when it is generated.
R3_ROLLOUT_ARGS="--use-rollout-routing-replay"
R3_ROLLOUT_ARGS+=" --custom-config-path ${R3_CONFIG_DIR}/r3.yaml"
R3_ROLLOUT_ARGS+=" --custom-generate-function-path r3.rollout.miles.generate"
# For agents and sessions, whose samples are complete only after the rollout, in place of the line above:
#   --rollout-all-samples-process-path r3.rollout.miles.write_shards

# Megatron: every rank, before the model is built.
R3_MEGATRON_ARGS="${R3_ROLLOUT_ARGS} --custom-megatron-init-path r3.trainers.miles.init"

# FSDP: its actor loads nothing of the user's, so Ray loads r3 into the worker processes. This variable is what
# runtime_env={"worker_process_setup_hook": "r3.trainers.miles.setup_worker"} sets, which is the form to use in a launcher of your own.
R3_FSDP_ARGS="${R3_ROLLOUT_ARGS}"
R3_FSDP_ENV="__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR=r3.trainers.miles.setup_worker"
