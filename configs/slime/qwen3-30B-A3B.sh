# R3 for slime's scripts/run-qwen3-30B-A3B.sh. After its `source .../models/qwen3-30B-A3B.sh` add
#
#     source /path/to/r3/configs/slime/qwen3-30B-A3B.sh
#
# and `${R3_ARGS[@]}` to the last lines, where the other argument lists stand. Nothing else of that script changes: the model (48 MoE
# layers, top-8 of 128 experts), sampling, recompute (full, uniform, 1) and parallelism (TP 4 with sequence parallelism, EP 8) are fine.
# r3 must be installed in slime's image: pip install r3-replay.
R3_CONFIG_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"

R3_ARGS=(
   # SGLang starts with --enable-return-routed-experts, each request asks for routes, and the trainer's routers register for replay.
   --use-rollout-routing-replay
   # Where the shards are, and what the trainer does with them.
   --custom-config-path "${R3_CONFIG_DIR}/r3.yaml"
   # Every generated sample: routes checked, shard written, key into the sample. In a thread, so that requests go on meanwhile.
   --rollout-sample-hook-path r3.rollout.slime.write_shard_async
   # Every trainer rank, before the model is built: its replay lists will read the shards.
   --custom-megatron-init-path r3.trainers.slime.init
)

# The gap between rollout and trainer, every rollout, into slime's trackers as r3/k3, r3/F_1.1, ... It needs the trainer's log-probs
# before training, which this run would otherwise skip (one step a rollout): one forward pass more. no_correction leaves the loss alone.
R3_KL_ARGS=(
   --rollout-data-postprocess-path r3.trainers.slime.kl_report
   --get-mismatch-metrics
   --custom-tis-function-path r3.trainers.slime.no_correction
)

# With r3_trainer: direct in r3.yaml, these as well:
R3_DIRECT_ARGS=(
   --custom-megatron-before-log-prob-hook-path r3.trainers.slime.before_log_prob
   --custom-megatron-before-train-step-hook-path r3.trainers.slime.before_train_step
)

R3_ARGS+=("${R3_KL_ARGS[@]}")
