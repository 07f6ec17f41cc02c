"""Bytes of one sample: on the wire, in memory, in a shard, and what one rank of a trainer reads of it.

Nothing is fitted. A shard's size is that of the header that the packer writes, with this sample's shapes in it, plus its tensors;
a response's is that of the `.npy` in base64 plus the JSON around it; a rank's reads are those that `r3.trainers.megatron.driver`
makes. Tests compare each with the real thing, byte for byte.

T tokens (P of them prompt, G sampled), L MoE layers, H decoder layers, K top-k, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import orjson

from r3.budget.models import Model
from r3.errors import ConfigError
from r3.routes import Routes
from r3.sample import Provenance, RolloutSample
from r3.shard import container, format1

NPY_HEADER = 128  # bytes; numpy pads magic, length and description to a multiple of 64
RANGES_FROM = 128 * 1024  # r3.trainers.megatron.driver's: bytes of a layer from which on only a rank's tokens are read
GAP, BLOCK = (
    128 << 10,
    16 << 20,
)  # r3.shard.objects': bytes between ranges, and of a request, that are asked for together
READ_HEAD = container.HEAD

# One line of provenance as the collector writes it: lengths of names change a shard by as many bytes.
TYPICAL = Provenance(
    engine="vllm",
    engine_version="0.30.0",
    model="Qwen/Qwen3-30B-A3B",
    model_fingerprint="0" * 32,
    logprobs_mode="raw_logprobs",
    finish_reason="length",
    extra={"prompt_digest": "0" * 16, "max_tokens": "16384", "seed": "0"},
)


def route_bytes(model: Model, tokens: int) -> int:
    """Routes in memory and in a shard: L x T x K ids."""
    return model.spec.bytes_per_token * tokens


def npy_bytes(model: Model, tokens: int) -> int:
    """The `.npy` that vLLM makes: T - 1 rows of all H decoder layers, dense ones (zeros) included."""
    spec = model.spec
    return NPY_HEADER + max(0, tokens - 1) * spec.num_layers * spec.top_k * spec.dtype.itemsize


def base64_bytes(size: int) -> int:
    return 4 * -(-size // 3)


def wire_bytes(model: Model, prompt: int, response: int) -> int:
    """A whole `/v1/completions` response with routes."""
    return base64_bytes(npy_bytes(model, prompt + response)) + json_bytes(model, prompt, response)


def json_bytes(model: Model, prompt: int, response: int) -> int:
    """The same without routes: token ids, log-probs and texts, about 90 bytes a sampled token and 7 a prompt token.

    Counted on a response with the fields of vLLM 0.30, whose texts have five characters a token.
    """
    small, large = _json_bytes(model.vocabulary, 0), _json_bytes(model.vocabulary, 512)
    per_prompt = _json_bytes(model.vocabulary, 0, 512) - small
    return small + round((large - small) * response / 512) + round(per_prompt * prompt / 512)


@lru_cache(maxsize=64)
def _json_bytes(vocabulary: int, response: int, prompt: int = 0) -> int:
    from r3.budget.standin import completion

    return len(completion(vocabulary, prompt, response, routes=None))


def shard_bytes(
    model: Model,
    prompt: int,
    response: int,
    *,
    provenance: Provenance = TYPICAL,
    sample_id: str = "prompt-0123456789abcdef.0",
) -> int:
    """The file of one single-turn sample, whose last token has no row, log-probs for each sampled token."""
    tokens = prompt + response
    head, table = _small_shard(model, prompt > 0, response, provenance, sample_id)
    sizes = {
        "spans": (table["spans"]["shape"], 4),
        "rollout_logprobs": ([response], 4),
        "routed_experts": ([model.spec.num_moe_layers, tokens, model.spec.top_k], model.spec.dtype.itemsize),
        "tokens": ([token_width(model), tokens], 1),
    }
    header: dict[str, object] = {"__metadata__": {**head, "prompt_length": str(prompt)}}
    offset = 0
    for name, (shape, itemsize) in sizes.items():
        end = offset + math.prod(shape) * itemsize
        header[name] = {"dtype": table[name]["dtype"], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = len(orjson.dumps(header))
    return 8 + text + -text % 8 + offset


def _small_shard(
    model: Model, with_prompt: bool, response: int, provenance: Provenance, sample_id: str
) -> tuple[Mapping[str, str], Mapping[str, Mapping[str, list[int]]]]:
    """Metadata and tensors' table of a shard of a few tokens with as many spans: its header, but for the numbers of tokens."""
    prompt, response = int(with_prompt), min(response, 2)
    tokens = prompt + response
    ids = np.zeros((model.spec.num_moe_layers, tokens, model.spec.top_k), model.spec.dtype)
    sample = RolloutSample.from_rollout(
        sample_id=sample_id,
        group_id=sample_id.rpartition(".")[0],
        spec=model.spec,
        prompt_tokens=np.zeros(prompt, np.int64),
        response_tokens=np.full(response, model.vocabulary - 1),
        response_logprobs=np.zeros(response),
        routes=Routes(ids, np.arange(tokens) < tokens - 1),
        weight_version=0,
        provenance=provenance,
    )
    head = container.pack(*format1.encode(sample), format1.LAYERED)[0]
    values = orjson.loads(head[8:])
    return values.pop("__metadata__"), values


@dataclass(frozen=True)
class Parallel:
    """How a trainer is cut. Its ranks are tensor x pipeline x context x data; experts are spread over data and context ranks.

    Attributes:
        sequence_parallel: A tensor-parallel rank's routers see its part of the tokens only.
        virtual: Model chunks of a pipeline rank (interleaved schedule).
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    virtual: int = 1
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.context, self.data, self.expert, self.virtual) < 1:
            raise ConfigError("no such trainer", expected="at least one of everything", got=self)

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def token_share(self) -> int:
        """Of a sequence's tokens, a router sees one in so many."""
        return self.context * (self.tensor if self.sequence_parallel else 1)


@dataclass(frozen=True)
class Reads:
    """What all ranks together read of one sample.

    Attributes:
        bytes: From files, or out of an object store.
        rank_bytes: Of these, of the rank that reads most.
        requests: GET and HEAD in an object store; on files, the same number of reads and opens. Of several long samples in a
            micro-batch an estimate.
    """

    bytes: int
    rank_bytes: int
    requests: float


def reads(
    model: Model, prompt: int, response: int, parallel: Parallel, *, together: int = 1, objects: bool = False
) -> Reads:
    """What the ranks of one data-parallel replica read of one sample, as `Driver` does.

    Each model chunk of each rank opens the shard and reads the head (4 KB), the token ids, its layers of the routes (whole
    layers below 128 KiB, else the ranges of its tokens), and where the loss is computed the log-probs. Expert parallelism changes
    nothing. Layers are spread evenly over the chunks.

    Args:
        together: Samples of a packed micro-batch. Sequence parallelism cuts the whole line, so that most of many short samples
            are on one tensor-parallel rank; the others then read no routes of it. Lengths differ: a cut falls inside a sample.
        objects: From an object store, where ranges that lie within 128 KiB of each other are one request, gaps included.
    """
    tokens, spec = prompt + response, model.spec
    layer = tokens * spec.top_k * spec.dtype.itemsize
    # Pieces that tensor parallelism cuts a context rank's part of a sample into (in the mean), or its copies of that part.
    pieces, copies = 1.0, parallel.tensor
    if parallel.sequence_parallel:
        pieces, copies = (together + parallel.tensor - 1) / together, 1
    in_ranges = parallel.context * pieces > 1 and layer >= RANGES_FROM
    chunks = parallel.pipeline * parallel.virtual
    bounds = [round(i * spec.num_layers / chunks) for i in range(chunks + 1)]
    size_of: dict[tuple[int, int], float] = {}  # by pipeline and context rank, of all tensor ranks
    requests = 0.0
    for chunk in range(chunks):
        layers = sum(bounds[chunk] <= each < bounds[chunk + 1] for each in spec.moe_layers)
        for context in range(parallel.context):
            # A context-parallel rank has two runs of a sequence (the last one's meet), a sequence-parallel rank a part of one.
            meet = context == parallel.context - 1
            runs = pieces if meet else max(2.0, pieces)
            size, asked = READ_HEAD + token_width(model) * tokens, 3  # a HEAD (or open), the head, the token ids
            if chunk == chunks - 1:
                size, asked = size + 4 * response, asked + 1
            part = layer / (parallel.context * runs)
            if not in_ranges:
                routes, ranges = pieces * layers * layer, pieces * min(layers, 1)
            elif objects and layers and layer - part <= GAP:
                span = (layers - 1) * layer + part
                routes, ranges = runs * span, runs * math.ceil(span / BLOCK)
            else:
                routes, ranges = runs * layers * part, runs * layers
            place = chunk % parallel.pipeline, context
            size_of[place] = size_of.get(place, 0.0) + parallel.tensor * size + copies * routes
            requests += parallel.tensor * asked + copies * ranges
    return Reads(round(sum(size_of.values())), round(max(size_of.values()) / parallel.tensor), requests)


def token_width(model: Model) -> int:
    """Bytes of a token id in a shard: as few as the vocabulary needs."""
    return max(1, -(-(model.vocabulary - 1).bit_length() // 8))
