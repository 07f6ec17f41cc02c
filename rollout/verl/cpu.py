"""cpu: veRL's vLLM server on a machine without an accelerator takes new weights.

    actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=r3.rollout.verl.cpu.WorkerExtension

For the tiny example and its test. vLLM's CPU build repacks weights when it has loaded them and drops the originals, so veRL's
`load_weights` finds no parameters to load into; see `r3.rollout.weights` for what is done.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from r3.rollout.weights import reload_on_cpu


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
        reload_on_cpu(self.model_runner, weights)
