"""LazySample: a sample of a shard whose routes are read when somebody asks for them, and only those that this rank needs.

Tokens, log-probs, mask and weight versions are some 15 bytes a token and are read at once; routes are hundreds (384 for 48
layers of top-8), and stay in the shard until `routes` is first touched: by the replay, by a prefetcher, or never, where the loss
needs no replay. A `LazySample` is a `PartialSample`, so it goes into `Replay.micro_batch`, `MegatronReplay.micro_batch` and
Megatron's `Driver` as it is.

Contract: it holds a key (path or URL), never an open file, and travels by pickle between processes of any start method. The shard
behind the key may be replaced or deleted meanwhile; that is an error by name, never other routes under the same tokens.

T tokens, l layers that this sample holds, K top-k.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from r3 import shard
from r3.errors import ShardError
from r3.partial import PartialSample, positions_of
from r3.routes import Mask, Routes
from r3.sample import Provenance, RolloutSample
from r3.shard import ShardFile, format1
from r3.shard.files import is_url
from r3.store import ShardStore, require_named

_CHECKSUM = "checksum."  # prefix of the metadata that hold a shard's checksums


class LazySample(PartialSample):
    """One sample of a shard; made by `LazySample.of_shard` and by the datasets.

    Attributes:
        key: Path or URL of the shard.
        sample_id, group_id, spec, prompt_length: As in RolloutSample.
        tokens: [T] int32 or int64.
        rollout_logprobs: [T] float32, natural log, NaN where there is none.
        loss_mask: [T] bool.
        weight_version: [T] int32, -1 where nobody said.
        recorded: [T] bool, tokens whose routes were recorded.
        layers: Global decoder-layer indices whose routes this sample gives, ascending.
        held: [T] bool, tokens whose routes it gives; None for all.
        instead_of: Key of the damaged shard in whose place this sample stands; "" as a rule.
    """

    key: str
    group_id: str
    prompt_length: int
    rollout_logprobs: npt.NDArray[np.float32]
    weight_version: npt.NDArray[np.int32]
    recorded: Mask
    metadata: dict[str, str]
    instead_of: str

    def __init__(self, key: str, file: ShardFile, *, layers: Sequence[int] | None = None, tokens: slice = slice(None)):
        chosen = file.spec.moe_layers if layers is None else tuple(layers)
        if layers is not None:
            positions_of(file.spec, chosen, f"sample {file.metadata.get('sample_id', '')!r}")
        # Checksums of layers are of no use once the file is closed, and are half of what would travel to other processes.
        metadata = {name: text for name, text in file.metadata.items() if not name.startswith(_CHECKSUM)}
        try:
            self._set(
                key=key,
                sample_id=metadata["sample_id"],
                group_id=metadata["group_id"],
                prompt_length=int(metadata["prompt_length"]),
                spec=file.spec,
                tokens=file.tokens(),
                rollout_logprobs=file.rollout_logprobs(),
                loss_mask=file.loss_mask,
                weight_version=file.weight_version,
                recorded=file.recorded,
                metadata=metadata,
                instead_of="",
                _contents=_contents(file),
            )
        except (KeyError, ValueError) as error:
            raise ShardError(f"the metadata of this shard is not complete ({error})", where=key) from None
        self._narrow(chosen, tokens)

    def _set(self, **values: Any) -> None:
        self.__dict__.update(values)  # frozen against users, as a PartialSample is

    def _narrow(self, layers: tuple[int, ...], tokens: slice) -> None:
        start, stop, step = tokens.indices(len(self.tokens))
        if step != 1:
            raise ValueError(f"tokens are read as a range, with step 1, not {step}")
        span, held = (start, max(start, stop)), None
        if span != (0, len(self.tokens)):
            held = np.zeros(len(self.tokens), np.bool_)
            held[slice(*span)] = True
        self._set(layers=layers, held=held, _span=span, _routes=None)

    @classmethod
    def of_shard(
        cls,
        key: str,
        *,
        layers: Sequence[int] | None = None,
        tokens: slice = slice(None),
        routes: bool = False,
        sample_id: str | None = None,
    ) -> LazySample:
        """Of the shard at a path or URL.

        Args:
            layers: Global decoder-layer indices whose routes will be wanted; all that route if None.
            tokens: The range of tokens whose routes will be wanted, a slice with step 1.
            routes: Read them now, while the shard is open.
            sample_id: Whose shard it must be.

        Raises:
            ShardError: no such shard, damaged, of another version or of another sample.
            SampleError: layers that do not route in the model that sampled.
        """
        with shard.open_file(key) as file:
            sample = cls(key, file, layers=layers, tokens=tokens)
            if sample_id is not None:
                require_named(key, sample_id, sample.sample_id)
            if routes:
                sample._set(_routes=sample._read(file))
        return sample

    @classmethod
    def read(cls, store: ShardStore, sample_id: str, layers: Sequence[int] | None = None) -> LazySample:
        """As `PartialSample.read`, but for the routes, which are read when they are asked for."""
        return cls.of_shard(key_of(store, sample_id), layers=layers, sample_id=sample_id)

    @classmethod
    def of(cls, sample: RolloutSample, layers: Sequence[int]) -> PartialSample:
        """Of a sample that is in memory there is nothing to read later: a plain PartialSample."""
        return PartialSample.of(sample, layers)

    @property
    def routes(self) -> Routes:
        """ids [l, T, K] of `layers`; read from the shard at the first call, then kept. ids of tokens outside `held` are 0.

        Raises:
            ShardError: the shard is gone, damaged, or no longer the one whose tokens were read.
        """
        routes: Routes | None = self.__dict__["_routes"]
        if routes is None:
            with self.open() as file:
                routes = self._read(file)
            self._set(_routes=routes)
        return routes

    @property
    def routes_read(self) -> bool:
        """Whether the routes are in memory."""
        return self.__dict__["_routes"] is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays once the routes are read."""
        arrays = (self.tokens, self.rollout_logprobs, self.loss_mask, self.weight_version, self.recorded)
        ids = len(self.layers) * len(self.tokens) * self.spec.top_k * self.spec.dtype.itemsize
        return ids + sum(array.nbytes for array in arrays)

    @property
    def weight_versions(self) -> tuple[int, int]:
        """Lowest and highest version of the weights that sampled its tokens in the loss; (-1, -1) if nobody said."""
        return version_range(self.weight_version, self.loss_mask)

    @property
    def provenance(self) -> Provenance:
        return format1.provenance(self.metadata)

    def part(self, *, layers: Sequence[int] | None = None, tokens: slice = slice(None)) -> LazySample:
        """The same sample for other layers and tokens (as in `of_shard`), none of them read yet; the other arrays are shared."""
        chosen = self.spec.moe_layers if layers is None else tuple(layers)
        positions_of(self.spec, chosen, f"sample {self.sample_id!r}")
        part = object.__new__(LazySample)
        part._set(**self.__dict__)
        part._narrow(chosen, tokens)
        return part

    def release(self) -> None:
        """Forget routes that were read; they are read again if asked for."""
        self._set(_routes=None)

    def whole(self) -> RolloutSample:
        """All of it, verified."""
        sample = shard.load_file(self.key)
        self.open().close()  # afterwards: what was read is either this shard or older than what is there now
        return sample

    def open(self) -> ShardFile:
        """Its shard, to read other parts of it; close it, or use it as a context.

        Raises:
            ShardError: it is gone, damaged, or no longer the one whose tokens were read.
        """
        file = shard.open_file(self.key)
        try:
            self._require_same(file)
        except BaseException:
            file.close()
            raise
        return file

    def _require_same(self, file: ShardFile) -> None:
        # Not by the tokens alone: the same prompt, sampled greedily from other weights, may give the same tokens by other routes.
        if (contents := _contents(file)) != self.__dict__["_contents"]:
            raise ShardError(
                "this shard was replaced since its tokens were read: its routes are of other tokens, or of another rollout",
                where=self.key,
                expected=f"contents {self.__dict__['_contents']}",
                got=contents,
                remedy="make a new dataset; do not collect into a store that is being trained on under the same sample ids",
            )

    def _read(self, file: ShardFile) -> Routes:
        positions = positions_of(self.spec, self.layers, f"sample {self.sample_id!r}")
        if self.held is None:
            routes = file.routes(positions)
        else:
            start, stop = self.__dict__["_span"]
            ids = np.zeros((len(positions), len(self.tokens), self.spec.top_k), self.spec.dtype)
            ids[:, start:stop] = file.routes(positions, slice(start, stop)).ids
            routes = Routes(ids, file.recorded)
        PartialSample(
            self.sample_id, self.spec, self.tokens, routes, self.layers, self.loss_mask, self.held
        )  # checks ids
        return routes

    def __repr__(self) -> str:
        state = "read" if self.routes_read else "not read"
        return f"LazySample({self.sample_id!r}, {len(self.tokens)} tokens, {len(self.layers)} layers, routes {state})"


def _contents(file: ShardFile) -> str:
    """Equal where all tensors of two shards are: a digest of their checksums."""
    sums = sorted(f"{name}={text}" for name, text in file.metadata.items() if name.startswith(_CHECKSUM))
    return xxhash.xxh3_128_hexdigest("\n".join(sums).encode())


def version_range(weight_version: npt.NDArray[np.int32], loss_mask: Mask) -> tuple[int, int]:
    """Lowest and highest weight version of the tokens in the loss, or of all where none is; (-1, -1) of no tokens."""
    used = weight_version[loss_mask] if loss_mask.any() else weight_version
    return (int(used.min()), int(used.max())) if len(used) else (-1, -1)


def key_of(store: ShardStore, sample_id: str) -> str:
    """Path or URL of a sample's shard, that a process with another working directory can open as well."""
    key = store.key_of(sample_id)
    return key if is_url(key) else os.path.abspath(key)
