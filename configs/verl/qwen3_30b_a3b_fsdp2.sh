#!/usr/bin/env bash
# Qwen3-30B-A3B, GRPO, vLLM rollouts, FSDP2 trainer with routing replay on one node of 8 GPUs. The lines marked R3 are all that r3
# adds to a run of yours; the others are an ordinary veRL 0.9 configuration. Written from veRL's configuration and run on no GPU.
#   R3_STORE=/shared/run1/shards bash configs/verl/qwen3_30b_a3b_fsdp2.sh TRAIN.parquet VAL.parquet [more overrides]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
train=$1 val=$2
shift 2
: "${R3_STORE:?a directory that rollout workers and trainers see}"
export R3_STORE VERL_ENGINE_VENDOR=r3 # R3: veRL takes r3's engine; on a cluster these must be in the job's runtime_env as well

args=(
  # R3: vLLM (0.22 or later) returns the routed experts
  actor_rollout_ref.rollout.enable_rollout_routing_replay=True
  # R3: agent loops that check and store them
  "actor_rollout_ref.rollout.agent.agent_loop_config_path=$here/agent_loops.yaml"
  # R3, optional: refuse a broken set-up in the driver, before the first prompt
  +actor_rollout_ref.rollout.agent.agent_loop_manager_class=r3.rollout.verl.ReplayAgentLoopManager
  # R3, optional: rollout log-probs, for the metrics r3/k3, r3/f_2, ...
  actor_rollout_ref.rollout.calculate_log_probs=True
  # R3: the workers' environment, on every node
  +ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR=r3
  "+ray_kwargs.ray_init.runtime_env.env_vars.R3_STORE=$R3_STORE"

  algorithm.adv_estimator=grpo
  "data.train_files=$train"
  "data.val_files=$val"
  data.train_batch_size=256
  data.max_prompt_length=2048
  data.max_response_length=8192
  actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B
  actor_rollout_ref.model.use_remove_padding=True
  actor_rollout_ref.model.enable_gradient_checkpointing=True
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  actor_rollout_ref.actor.fsdp_config.param_offload=True
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=4
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768
  trainer.n_gpus_per_node=8
  trainer.nnodes=1
  "trainer.logger=[console]"
)
exec python3 -m verl.trainer.main_ppo "${args[@]}" "$@"
