"""finding: which shard holds a sample that came to the trainer, and which routers of this rank replay.

A sample is found by what travels with it: the key in its routes field, or its index and its tokens, of which the shard's name is
made. Either way the shard's token digest must be that of the trainer's tokens: routes belong to tokens.

Routers are found by walking the live model, never by their place in the framework's list of replays: a decoder that was built
twice, or a multi-token-prediction layer, registers there as well and shifts every later layer (slime issue 1556, miles issue
2570).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from r3 import shard
from r3.errors import NoShardError, ReplayError, StoreError
from r3.rollout.slime import ticket
from r3.rollout.slime.samples import sample_id_of
from r3.sample import token_digest
from r3.spec import RoutingSpec
from r3.store import ShardStore


class Shards:
    """The shards of a run.

    Args:
        root: `r3_store`.
        spec: The routing of the model that trains.
        hook: What should have written them, for messages.
    """

    def __init__(self, root: str, spec: RoutingSpec, hook: str) -> None:
        self.root, self.spec, self.hook = root, spec, hook
        try:
            self.store = ShardStore(root)
        except StoreError as error:
            error.remedy = (
                f"the rollout side writes it ({hook}); r3_store must name a directory that this machine sees as well"
            )
            raise

    def find(self, carried: Any, index: int | None, tokens: npt.NDArray[np.int64]) -> str:
        """The key of a sample's shard; its head is read, and its tokens and routing are the trainer's.

        Args:
            carried: What stands in the routes field, None if nothing does.
            index: The sample's index.
            tokens: The trainer's tokens.

        Raises:
            StoreError: there is none.
            ReplayError: it is of other tokens.
            SpecError: it is of another model.
        """
        ticketed = ticket.decode(carried)
        try:
            key = self._by_ticket(ticketed) if ticketed is not None else self._by_tokens(index, tokens)
            metadata = shard.read_metadata(key)
        except NoShardError:
            raise self._absent(str(ticketed)) from None
        if metadata["token_digest"] != token_digest(tokens):
            raise ReplayError(
                "the shard is of other tokens than the trainer's",
                where=key,
                expected=f"{len(tokens)} tokens, {token_digest(tokens)}",
                got=metadata["token_digest"],
                remedy="something cut or changed the tokens of the sample after its rollout (a convert function, multimodal "
                "expansion): routes would be replayed at the wrong tokens",
            )
        self.spec.require_same(RoutingSpec.from_json(metadata["spec"]), key)
        return key

    def _by_ticket(self, ticketed: str) -> str:
        step, _, sample_id = ticketed.rpartition("/")
        try:
            return (self.store.below(step) if step else self.store).key_of(sample_id)
        except StoreError as error:
            raise self._absent(ticketed) from error

    def _by_tokens(self, index: int | None, tokens: npt.NDArray[np.int64]) -> str:
        # The last one written, whatever its step: a resumed run counts from a lower one, and an earlier run may have sampled the
        # same tokens with other weights.
        sample_id = sample_id_of(index, tokens)
        stores = [self.store, *(self.store.step(number) for number in self.store.steps())]
        # An object store tells whole seconds: of two of the same second the later step's.
        found = [(at, i) for i, store in enumerate(stores) if (at := store.written_at(sample_id)) is not None]
        if not found:
            raise self._absent(sample_id)
        return stores[max(found)[1]].key_of(sample_id)

    def _absent(self, key: str) -> StoreError:
        return StoreError(
            f"no shard {key!r} of a sample that is to be trained",
            where=self.root,
            expected=f"the shard that {self.hook} wrote when the sample was generated",
            remedy=f"is {self.hook} on the command line? Does this machine see the same directory? Were more steps deleted "
            "(r3_keep_steps) than samples may wait in the buffer? Were the sample's tokens changed after it was written?",
        )


def bound_replays(chunks: Sequence[nn.Module], replays: Iterable[Any], spec: RoutingSpec) -> list[dict[int, Any]]:
    """For each model chunk: the framework's replay object of each decoder layer's router, by global layer index from 0.

    Args:
        chunks: The model chunks of this rank.
        replays: The framework's registry of replay objects.
        spec: The routing of the model.

    Raises:
        ReplayError: a router without a replay object, one in a layer that should not route, or one of a prediction layer.
    """
    known = {id(replay) for replay in replays}
    return [_bound(chunk, known, spec) for chunk in chunks]


def _bound(chunk: nn.Module, known: set[int], spec: RoutingSpec) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for name, module in chunk.named_modules():
        replay = _replay_of(vars(module), known)
        if replay is None:
            if any(cls.__name__ == "TopKRouter" for cls in type(module).__mro__) and "mtp" not in name.split("."):
                raise ReplayError(
                    "a router that the framework's routing replay does not know",
                    where=name,
                    expected="a replay object on every TopKRouter",
                    remedy="this Megatron-core has not the framework's patch, or replay was off when the model was "
                    "built: use the framework's image, or r3_trainer: direct",
                )
            continue
        layer = int(module.layer_number) - 1  # 1-based and global
        if "mtp" in name.split("."):
            raise ReplayError(
                "a multi-token-prediction layer would replay: the rollout recorded no routes for it",
                where=name,
                remedy="train without --enable-mtp-training, or use r3_trainer: direct, which leaves such layers alone",
            )
        if layer not in spec.moe_layers or layer in found:
            raise ReplayError(
                "a router in a layer that should have none",
                where=f"{name} (layer {layer})",
                expected=spec.brief(),
                got="a second router of this layer" if layer in found else "a router",
                remedy="the model is not the one that the arguments describe: check --num-layers and --moe-layer-freq",
            )
        found[layer] = replay
    return found


def _replay_of(attributes: Mapping[str, Any], known: set[int]) -> Any:
    return next((value for value in attributes.values() if id(value) in known), None)
