"""flow: how many bytes of routes may exist that nobody has consumed yet.

A pool that samples faster than the trainer reads, or than the disk writes, would fill memory and then the disk. So every
sample reserves
bytes before it is asked for: the most that it can have, from the length of its prompt, `max_tokens` and the model's
routing. When it is committed the reservation becomes the size of its shard, and when the consumer asks for the next
sample it is freed."""

from __future__ import annotations

import logging

import orjson

from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Sampling

_PER_TOKEN = 8 + 4 + 1 + 1 + 4  # token id, log-prob, loss mask, recorded, weight version; docs/shard-format.md
_PER_SHARD = 16 * 1024  # header and metadata
_TEMPLATE = 1024  # tokens that a chat template may add

log = logging.getLogger("r3.rollout.ray")


class Flow:
    """Reserved and unconsumed bytes against a budget. A sample larger than the whole budget passes alone, so nothing
    stands still."""

    def __init__(self, budget: int) -> None:
        self.budget, self.held, self.count = budget, 0, 0

    def warn_if_narrow(self, size: int, wanted: int) -> None:
        """Of a budget that leaves workers idle, which nothing else would show: `wanted` samples of `size` could be in flight."""
        admitted = max(1, self.budget // size)
        if admitted < wanted:
            log.warning(
                "budget_mb=%g admits %d requests at a time of %d that the workers have slots for, as one may have %.1f MB; "
                "%d would keep them busy",
                *(self.budget / 1e6, admitted, wanted, size / 1e6, -(-size * wanted // 10**6)),
            )

    def admits(self, size: int) -> bool:
        return self.count == 0 or self.held + size <= self.budget

    def take(self, size: int) -> None:
        self.held += size
        self.count += 1

    def resize(self, before: int, after: int) -> None:
        self.held += after - before

    def give(self, size: int) -> None:
        self.held -= size
        self.count -= 1


def bound_of(prompt: Prompt, sampling: Sampling, info: EngineInfo) -> int:
    """The most bytes that a shard of this prompt can have."""
    if prompt.kind == "prompt_token_ids":
        length = len(prompt.payload)
    elif prompt.kind == "prompt":
        length = (
            len(prompt.payload.encode()) + 1
        )  # no tokenizer makes more tokens than there are bytes, and one to begin with
    else:
        length = len(orjson.dumps(prompt.payload)) + _TEMPLATE
    tokens = length + sampling.max_tokens
    if info.max_model_len is not None:
        tokens = min(tokens, info.max_model_len)
    spec = info.spec
    return tokens * (spec.num_moe_layers * spec.top_k * spec.dtype.itemsize + _PER_TOKEN) + _PER_SHARD
