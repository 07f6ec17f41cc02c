"""One rank of the runs in test_megatron_convert.py: a Hugging Face Qwen3-MoE in Megatron-core, in every layout of two processes.

In each layout a `MegatronScorer` scores the same samples live and replayed, the weights are loaded once more to count what is
read, and saved as a Hugging Face directory again.
"""

from __future__ import annotations

import importlib
import os
import pickle
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, dict[str, int]] = {
    "tensor": {"tensor": 2},
    "tensor and expert": {"tensor": 2, "expert": 2, "expert_tensor": 1},
    "pipeline": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "expert": {"expert": 2},
    "context": {"context": 2},
}


def run(rank: int, *arguments: Any) -> None:
    """For `spawn`: the parent has no use for what is imported here."""
    importlib.import_module("megatron_hf_ranks").main(rank, *arguments)


def main(rank: int, port: int, path: Path, out: Path) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from r3 import ShardStore
    from r3.trainers.megatron import convert, detach
    from r3.trainers.megatron.score import MegatronScorer

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    samples = list(ShardStore(path / "shards"))
    results = {}
    for name, sizes in LAYOUTS.items():
        scorer = MegatronScorer(path, dtype="float32", parallel=sizes)
        checkpoint = convert.Checkpoint(path)
        held = sum(p.numel() * 4 for chunk in scorer.chunks for p in chunk.parameters())
        convert.load(scorer.chunks, checkpoint)
        results[name] = {
            "live": scorer.score(samples, replay=False),
            "replay": scorer.score(samples, replay=True),
            "read": (checkpoint.bytes_read, held),
            "layers": scorer.replay.layers,
            "describe": scorer.describe(),
            # What Megatron's gradient norm takes for a copy, although it is a part.
            "uncounted": [
                name
                for chunk in scorer.chunks
                for name, parameter, source in convert.parameters(chunk)
                if convert._cut(source)[1] > 1 and not parameter.tensor_model_parallel
            ],
        }
        convert.save(scorer.chunks, out / name, like=path)
        detach(scorer.chunks)
        parallel_state.destroy_model_parallel()
    (out / f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
