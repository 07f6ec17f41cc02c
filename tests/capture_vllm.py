"""A real vLLM engine in this process, for test_capture_binding.py: our binding beside vLLM's own capture.

vLLM runs with its own capture on. Its callbacks are taken out of its routers, ours are bound, and each call goes to both. So what
vLLM returns with the response and what our snapshots hold must be the same rows: of the prompt, and of each decoded token.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fused_moe.experts.trtllm_bf16_moe import TrtLlmBf16ExpertsMonolithic
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from r3 import RoutingSpec
from r3.errors import CaptureError
from r3.rollout.capture import RoutingCapturer, bind
from r3.rollout.capture.binding import _target


class Both(RoutingCapturer):
    """Hands each layer's ids to vLLM's callback as well."""

    def __init__(self, theirs: dict, spec: RoutingSpec) -> None:
        super().__init__(spec, max_tokens=256, device="cpu")
        self.theirs = theirs

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        super().capture(layer_id, topk_ids)
        self.theirs[layer_id](topk_ids)


def refusal(call) -> str:
    try:
        call()
    except CaptureError as error:
        return str(error)
    return ""


def kernels(runner: MoERunner) -> tuple[bool, str]:
    """The guard of monolithic kernels on vLLM's real kernel classes, which only a GPU can run: one that hands its ids out, and
    the base class, which does not."""
    kernel = TrtLlmBf16ExpertsMonolithic(runner.moe_config, None)
    impl = SimpleNamespace(fused_experts=kernel)
    method = torch.nn.Module()
    method.is_monolithic, method.moe_kernel = True, SimpleNamespace(impl=impl)
    held, runner.routed_experts.quant_method = runner.routed_experts.quant_method, method
    try:
        bound = runner.is_monolithic and _target(runner, "experts") is kernel
        kernel.set_capture_fn(print)
        bound = bound and kernel._maybe_make_routing_replay_buffer(4, kernel._routing_replay_buffer.device) is not None
        kernel.set_capture_fn(None)
        bare = type("BareKernel", (FusedMoEExpertsMonolithic,), {})
        bare.__abstractmethods__ = frozenset()
        impl.fused_experts = object.__new__(bare)
        return bound, refusal(lambda: _target(runner, "experts"))
    finally:
        runner.routed_experts.quant_method = held


def main(path: str) -> None:
    llm = LLM(
        path,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        enable_return_routed_experts=True,
        max_num_batched_tokens=256,
    )
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    spec = RoutingSpec.from_config(llm.llm_engine.model_config)
    runners = {module.layer_id: module for module in model.modules() if isinstance(module, MoERunner)}
    refused_twice = refusal(lambda: bind(model, RoutingCapturer(spec, max_tokens=8, device="cpu")))
    theirs = {layer: runner.router.capture_fn for layer, runner in runners.items()}
    for runner in runners.values():
        runner.router.set_capture_fn(None)
    capturer, steps = Both(theirs, spec), []
    model.register_forward_pre_hook(
        lambda _m, args, kwargs: capturer.begin_step(len(kwargs["input_ids"] if "input_ids" in kwargs else args[0])),
        with_kwargs=True,
    )
    model.register_forward_hook(lambda *_: steps.append(capturer.snapshot().to_host().result().rows))
    with bind(model, capturer) as binding:
        prompts = [{"prompt_token_ids": list(range(10, 60))}, {"prompt_token_ids": list(range(40, 60))}]
        equal = rows = 0
        for prompt in prompts:
            steps.clear()
            (answer,) = llm.generate([prompt], SamplingParams(max_tokens=6, temperature=0), use_tqdm=False)
            # The last step of a request may run ahead of its end: vLLM has no row for it.
            own, their = np.concatenate(steps), answer.outputs[0].routed_experts
            rows += len(their)
            equal += int((own[: len(their)] == their[:, list(spec.moe_layers)]).all((1, 2)).sum())
        layers = binding.layers
    assert all(runner.router.capture_fn is None for runner in runners.values())
    bound, refused = kernels(runners[0])
    result = {
        "layers": layers,
        "rows": rows,
        "equal": equal,
        "refused_twice": refused_twice,
        "kernel_bound": bound,
        "kernel_refused": refused,
    }
    print(json.dumps(result), flush=True)
    os._exit(0)  # vLLM's own end of a process takes seconds and prints what its bindings leak


if __name__ == "__main__":
    main(sys.argv[1])
