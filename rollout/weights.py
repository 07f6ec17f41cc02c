"""weights: a vLLM worker that runs already takes new weights, also where vLLM's own reload is wrong.

vLLM's CPU build repacks weights when it has loaded them and drops the originals. Its `reload_weights` restores the layers
first, but in 0.30 it leaves experts with wrong weights on a CPU (found by the agreement check: recorded experts agreed with the
trainer in the first layer only), so those are packed here. On other devices vLLM's `reload_weights` is used as it is.

    AsyncEngineArgs(..., worker_extension_cls="r3.rollout.weights.ReloadExtension")
    await engine.collective_rpc("r3_reload_weights", args=(directory,))

Importing this needs torch alone; vLLM is imported where it runs, in the worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class ReloadExtension:
    """What vLLM mixes into its worker class."""

    model_runner: Any

    def r3_reload_weights(self, directory: str) -> None:
        """Load a Hugging Face checkpoint of the same architecture in place."""
        if next(self.model_runner.model.parameters()).device.type != "cpu":
            self.model_runner.reload_weights(weights_path=directory)
            return
        reload_on_cpu(self.model_runner, read_checkpoint(directory))


def read_checkpoint(directory: str) -> dict[str, torch.Tensor]:
    """Every tensor of the `.safetensors` files of a directory.

    Raises:
        FileNotFoundError: there is no such file in it.
    """
    from safetensors.torch import load_file

    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no .safetensors in {directory}")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights.update(load_file(file))
    return weights


def reload_on_cpu(model_runner: Any, weights: dict[str, torch.Tensor]) -> None:
    """All weights of an update at once: vLLM's reload wants them whole."""
    model_runner.reload_weights(weights_iterator=iter(weights.items()))
    for name, layer in model_runner.model.named_modules():
        if hasattr(layer, "w13_weight"):
            _load_experts(layer, name.removesuffix(".routed_experts"), weights)


def _load_experts(layer: Any, prefix: str, weights: dict[str, torch.Tensor]) -> None:
    """gate and up [I, H] of each expert one above the other, down [H, I], both in the kernel's packing."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    isa = layer.quant_method.experts_cls.isa

    def all_experts(part: str) -> torch.Tensor:
        count = layer.w13_weight.shape[0]
        return torch.stack([weights[f"{prefix}.{expert}.{part}_proj.weight"] for expert in range(count)])

    gate_up = torch.cat([all_experts("gate"), all_experts("up")], dim=1)
    for parameter, plain in ((layer.w13_weight, gate_up), (layer.w2_weight, all_experts("down"))):
        parameter.data.copy_(cpu_prepack_moe_weight(plain.to(parameter.dtype), isa))
