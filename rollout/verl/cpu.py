"""cpu: veRL's vLLM server on a machine without an accelerator takes new weights.

    actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=r3.rollout.verl.cpu.WorkerExtension

For the tiny example and its test. vLLM's CPU build repacks weights when it has loaded them and drops the originals, so veRL's
`load_weights` finds no parameters to load into. vLLM's own `reload_weights` restores the layers first; it wants all weights of an
update at once, and in 0.30 it leaves experts with wrong weights on a CPU (found by the agreement check: recorded experts agreed
with the trainer in the first layer only), so those are packed here.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm._custom_ops import cpu_prepack_moe_weight


class WorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """veRL's extension of a vLLM worker, with whole updates in place of bucket by bucket."""

    model_runner: Any

    def update_weights_from_ipc(self, *_args: Any, use_shm: bool = False, **_kwargs: Any) -> None:
        weights: dict[str, torch.Tensor] = {}

        def keep(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:  # noqa: ARG001
            weights.update((name, tensor.clone()) for name, tensor in bucket)  # the bucket's memory is reused

        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm
        )
        receiver.receive_weights(on_bucket_received=keep)
        self.model_runner.reload_weights(weights_iterator=iter(weights.items()))
        for name, layer in self.model_runner.model.named_modules():
            if hasattr(layer, "w13_weight"):
                _load_experts(layer, name.removesuffix(".routed_experts"), weights)


def _load_experts(layer: Any, prefix: str, weights: dict[str, torch.Tensor]) -> None:
    """gate and up [I, H] of each expert one above the other, down [H, I], both in the kernel's packing."""
    isa = layer.quant_method.experts_cls.isa

    def all_experts(part: str) -> torch.Tensor:
        count = layer.w13_weight.shape[0]
        return torch.stack([weights[f"{prefix}.{expert}.{part}_proj.weight"] for expert in range(count)])

    gate_up = torch.cat([all_experts("gate"), all_experts("up")], dim=1)
    for parameter, plain in ((layer.w13_weight, gate_up), (layer.w2_weight, all_experts("down"))):
        parameter.data.copy_(cpu_prepack_moe_weight(plain.to(parameter.dtype), isa))
