"""A fingerprint of a model's weights on disk, to tell whether the trainer holds the weights that sampled.

Reading 60 GB to compare two checkpoints would cost minutes, so this hashes the config, every weight file's name, size and
header, and 64 blocks of 4 KiB spread over it. An optimizer step changes almost every value of almost every tensor, so
two versions of a model differ in it; it is a fingerprint against mistakes, not a proof against an adversary.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BLOCKS, _BLOCK = 64, 4096


def model_fingerprint(path: str | os.PathLike[str]) -> str:
    """Hex digest for a model directory (`config.json`, `*.safetensors` or `*.bin`); "" if it holds no weights."""
    directory = Path(path)
    weights = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    config = directory / "config.json"
    if not weights or not config.is_file():
        return ""
    digest = hashlib.sha256(config.read_bytes())
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with open(file, "rb") as handle:
            for block in range(_BLOCKS):
                handle.seek(block * max(size - _BLOCK, 0) // (_BLOCKS - 1))
                digest.update(handle.read(_BLOCK))
    return digest.hexdigest()[:32]
