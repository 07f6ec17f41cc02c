"""One of two gloo ranks, for test_capture_ranks.py. Torch is imported in `main`: the parent has no use for it here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any


def run(rank: int, *arguments: Any) -> None:
    """For `spawn`."""
    importlib.import_module("capture_ranks").main(rank, *arguments)


def main(rank: int, port: int, out: str) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    from r3 import RoutingSpec
    from r3.errors import CaptureError
    from r3.rollout.capture import BatchLayout, RoutingCapturer, bind, require_all_ranks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    class Layer(torch.nn.Module):
        def __init__(self, layer_id: int, num_experts: int) -> None:
            super().__init__()
            self.layer_id, self.capture_fn = layer_id, None
            self.gate = torch.nn.Linear(16, num_experts, bias=False)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            ids = self.gate(hidden).topk(2).indices
            if self.capture_fn is not None:
                self.capture_fn(ids)
            return hidden + 0.1 * self.gate.weight[ids].sum(1)

    def model_of(num_experts: int) -> tuple[RoutingSpec, torch.nn.Module]:
        torch.manual_seed(0)
        return RoutingSpec(2, (0, 1), num_experts, 2), torch.nn.Sequential(Layer(0, num_experts), Layer(1, num_experts))

    def refused(call: Any) -> str:
        try:
            call()
        except CaptureError as error:
            return str(error)
        return ""

    found: dict[str, Any] = {}
    with torch.no_grad():
        for num_experts in (8, 384):
            spec, model = model_of(num_experts)
            capturer = RoutingCapturer(spec, max_tokens=16, device="cpu")
            with bind(model, capturer) as binding:
                require_all_ranks(binding)
                found["half"] = refused(lambda b=binding: require_all_ranks(b if rank == 0 else None))
                found["none"] = refused(lambda: require_all_ranks(None))

                def step(hidden: torch.Tensor, num_rows: int, layout: BatchLayout, c=capturer, m=model) -> np.ndarray:
                    c.begin_step(num_rows, layout)
                    m(hidden)
                    return c.snapshot(torch.arange(num_rows)).to_host().result().rows

                generator = torch.Generator().manual_seed(4)
                for sizes in (None, [5, 2], [3, 6]):
                    whole = torch.randn(7, 16, generator=generator)
                    expected = step(whole, 7, BatchLayout.local(7))
                    spans = sizes or [4, 4]
                    padded = torch.cat([whole, torch.zeros(sum(spans) - 7, 16)])
                    shard = padded[sum(spans[:rank]) : sum(spans[: rank + 1])]
                    got = step(shard, 7, BatchLayout.sharded(7, rank, 2, sizes=sizes))
                    found[f"sharded {num_experts} {sizes}"] = bool(np.array_equal(got, expected))

                for spans in (None, [6, 6]):
                    counts = [3, 5]
                    own = torch.randn(counts[rank], 16, generator=torch.Generator().manual_seed(rank))
                    expected = step(own, counts[rank], BatchLayout.local(counts[rank]))
                    parts = [torch.empty(6, 16) for _ in counts]
                    dist.all_gather(parts, torch.cat([own, torch.zeros(6 - len(own), 16)]))
                    batch = torch.cat([part[:span] for part, span in zip(parts, spans or counts, strict=True)])
                    got = step(batch, counts[rank], BatchLayout.gathered(counts, rank, spans))
                    found[f"gathered {num_experts} {spans}"] = bool(np.array_equal(got, expected))

        spec, model = model_of(8)
        capturer = RoutingCapturer(spec, max_tokens=16, device="cpu")

        def faulty(change: Any) -> str:
            capturer.begin_step(8, BatchLayout.sharded(8, rank, 2))
            for layer in (0, 1):
                ids = torch.zeros((4, 2), dtype=torch.int64)
                if rank == 0 or change is not None or layer == 0:
                    capturer.capture(layer, ids + (change if rank == 1 and layer == 1 and change else 0))
            return refused(lambda: capturer.snapshot().to_host().result())

        found["incomplete"] = faulty(None)
        found["physical"] = faulty(260)
        found["sound"] = faulty(7)
    Path(out, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
