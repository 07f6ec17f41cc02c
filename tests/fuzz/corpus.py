"""Inputs to begin with, and inputs to keep.

python tests/fuzz/corpus.py write DIRECTORY     seeds and kept inputs as files, in wire/ and shard/, for fuzz.py
python tests/fuzz/corpus.py keep KIND DIRECTORY what a fuzzer found, and its crashes if they are put there, into corpus/KIND.hex
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import numpy as np
from targets import FORMATS, SPECS, WRAPS

from r3 import RolloutSample, Routes, RoutingSpec, shard, wire
from r3.testing import random_rows

KEPT = Path(__file__).parent / "corpus"


def _wire_seeds() -> dict[str, bytes]:
    rng, seeds, num_tokens = np.random.default_rng(0), {}, 6
    for s, spec in enumerate(SPECS):
        for hidden in (True, False):
            rows = random_rows(rng, spec, num_tokens - 1, hidden=hidden)
            bodies = {
                ("npy", "base64"): base64.b64decode(wire.encode_vllm(rows)),
                ("npy", "text"): wire.encode_vllm(rows).encode(),
                ("int32", "base64"): rows.astype("<i4").tobytes(),
                ("int32", "bytes"): rows.astype("<i4").tobytes(),
                (None, "json"): json.dumps(wire.encode_lmdeploy(rows)).encode(),
                ("envelope", "json"): json.dumps(wire.encode_envelope(rows, encoding="base85")).encode(),
                ("split", "json"): json.dumps(wire.encode_vllm_021(rows, 3)).encode(),
            }
            if rows.dtype == np.uint8:
                for wrap in WRAPS[4:]:
                    bodies[None, wrap] = bytes([0 if hidden else 128]) + rows.tobytes()
            raw = hidden or spec.num_layers == spec.num_moe_layers  # raw bytes are all hidden layers
            for (format, wrap), body in bodies.items():
                if "int32" in (format, wrap.split()[0]) and not raw:
                    continue
                head = bytes([s, FORMATS.index(format), WRAPS.index(wrap), num_tokens, 0, 0])
                seeds[f"{s}-{'all' if hidden else 'moe'}-{format}-{wrap.replace(' ', '-')}"] = head + body
    return seeds


def _shard_seeds() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    return {f"spec-{s}": shard.save(_sample(rng, spec)) for s, spec in enumerate(SPECS)}


def _sample(rng: np.random.Generator, spec: RoutingSpec) -> RolloutSample:
    return RolloutSample.from_rollout(
        sample_id="s",
        group_id="g",
        spec=spec,
        prompt_tokens=[1, 2],
        response_tokens=[3, 4, 5],
        response_logprobs=[-0.5, -1.0, -2.0],
        routes=Routes.from_rows(random_rows(rng, spec, 4), 5, spec),
        weight_version=3,
    )


def seeds(kind: str) -> dict[str, bytes]:
    """Small valid inputs, one of each kind, by name."""
    return _wire_seeds() if kind == "wire" else _shard_seeds()


def kept(kind: str) -> list[bytes]:
    """Inputs of earlier runs."""
    file = KEPT / f"{kind}.hex"
    return [bytes.fromhex(line) for line in file.read_text().split()] if file.exists() else []


def main(arguments: list[str]) -> None:
    match arguments:
        case ["write", root]:
            for kind in ("wire", "shard"):
                directory = Path(root) / kind
                directory.mkdir(parents=True, exist_ok=True)
                for name, data in [*seeds(kind).items(), *((f"kept-{i}", data) for i, data in enumerate(kept(kind)))]:
                    (directory / name).write_bytes(data)
        case ["keep", kind, directory]:
            found = {path.read_bytes() for path in Path(directory).iterdir()} | set(kept(kind))
            KEPT.mkdir(exist_ok=True)
            lines = sorted(data.hex() for data in found if data)
            (KEPT / f"{kind}.hex").write_text("\n".join(sorted(lines, key=len)) + "\n")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
