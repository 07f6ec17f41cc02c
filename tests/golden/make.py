"""The samples of the golden shards, and the command that wrote the files: `python tests/golden/make.py`.

Each sample is written out by hand, so that a reader in another language can be checked against these lines. The files
are the format: run this only when a new version of the format gets files of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from r3 import Provenance, RolloutSample, Routes, RoutingSpec, shard

NAN = float("nan")


def _sample(name: str, spec: RoutingSpec, ids: list, recorded: list, tokens: list, prompt: int, *columns: list):
    logprobs, loss, versions = columns
    return RolloutSample(
        sample_id=f"golden/{name}",
        group_id="golden",
        spec=spec,
        tokens=np.array(tokens, np.int64 if max(tokens, default=0) >= 2**31 else np.int32),
        routes=Routes(
            np.array(ids, spec.dtype).reshape(spec.num_moe_layers, len(tokens), spec.top_k),
            np.array(recorded, np.bool_),
        ),
        prompt_length=prompt,
        rollout_logprobs=np.array(logprobs, np.float32),
        loss_mask=np.array(loss, np.bool_),
        weight_version=np.array(versions, np.int32),
        provenance=Provenance(
            "vllm", "0.30.0", "tiny", "f00d", 0.7, 0.95, 20, "raw_logprobs", "stop", {"note": 'ü "quoted"', "a": "b"}
        ),
    )


SMALL = RoutingSpec(3, (1, 2), 8, 2, "qwen3_moe")  # decoder layer 0 is dense
LARGE = RoutingSpec(3, (1, 2), 300, 2, "qwen3_moe")

SAMPLES = {
    "uint8": _sample(
        "uint8",
        SMALL,
        [[[0, 7], [7, 1], [2, 3], [0, 0]], [[5, 4], [6, 5], [1, 0], [0, 0]]],
        [True, True, True, False],  # the last token is never fed back
        [11, 151935, 13, 65536],
        2,
        [NAN, NAN, -0.5, -1.25],
        [False, False, True, True],
        [-1, -1, 7, 7],
    ),
    "uint16": _sample(
        "uint16",
        LARGE,
        [[[0, 299], [7, 1], [2, 3], [0, 0]], [[5, 4], [256, 255], [9, 8], [0, 0]]],
        [True, True, True, False],
        [11, 12, 255, 14],  # one byte holds each id
        2,
        [NAN, NAN, -0.5, -1.25],
        [False, False, True, True],
        [-1, -1, 7, 7],
    ),
    "no-response": _sample(
        "no-response", SMALL, [[[0, 1]] * 3, [[2, 3]] * 3], [True] * 3, [1, 2, 3], 3, [NAN] * 3, [False] * 3, [-1] * 3
    ),
    "empty": _sample("empty", SMALL, [], [], [], 0, [], [], []),
    "versions": _sample(  # interrupted, resumed with newer weights, and a tool's answer between two turns
        "versions",
        SMALL,
        [[[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]], [[7, 6], [6, 5], [5, 4], [4, 3], [3, 2], [2, 1]]],
        [True] * 6,
        [1, 2, 3, 4, 5, 2**31],
        1,
        [NAN, -0.25, -0.5, NAN, -1.0, float("-inf")],
        [False, True, True, False, True, False],
        [-1, 3, 4, -1, 4, 4],
    ),
    "unrecorded": _sample(
        "unrecorded",
        LARGE,
        [[[0, 0], [0, 0], [1, 2], [0, 0], [3, 4]], [[0, 0], [0, 0], [5, 6], [0, 0], [7, 299]]],
        [False, False, True, False, True],
        [1, 2, 3, 4, 5],
        2,
        [NAN, NAN, NAN, NAN, NAN],
        [False, False, True, True, True],
        [-1, -1, 0, 0, 0],
    ),
}


def path_of(name: str) -> Path:
    return Path(__file__).parent / f"v1-{name}.safetensors"


if __name__ == "__main__":
    for name, sample in SAMPLES.items():
        shard.save_file(sample, path_of(name))
