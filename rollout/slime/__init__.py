"""The rollout side of slime: hooks for its command line, so that no line of slime is changed. See docs/slime.md.

    --custom-config-path configs/slime/r3.yaml                         settings
    --rollout-sample-hook-path r3.rollout.slime.write_shard            or r3.rollout.slime.write_shard_async
    --custom-generate-function-path r3.rollout.slime.generate          instead, for generate functions of several requests

slime, Ray and torch are not imported here: samples and arguments are read as plain attributes, and what slime is (which commits,
which fields) is written down in docs/slime.md and proved by contract in tests/test_slime_rollout.py.
"""

from __future__ import annotations

from r3.rollout.slime.hooks import generate as generate
from r3.rollout.slime.hooks import write_shard as write_shard
from r3.rollout.slime.hooks import write_shard_async as write_shard_async

__all__ = ["generate", "write_shard", "write_shard_async"]
