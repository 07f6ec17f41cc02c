"""recording: one completion becomes one committed shard.

    Completion --wire--> Routes --> RolloutSample --> ShardStore

Whoever asks an engine (the collector, a Ray worker, an engine in this process) hands what came back to a Recorder, so that a
sample is checked, described and written in the same way wherever it was made. Contract: a sample is in the store whole, or an
error says why it is not; one that was there already is left as it is; samples of another model, of other settings or of another
prompt are never added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import orjson

from r3 import wire
from r3.errors import PresentError, PromptError, StoreError
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Completion, Sampling
from r3.routes import Routes
from r3.sample import UNKNOWN_VERSION, Provenance, RolloutSample
from r3.store import ShardStore
from r3.wire.engines import Context

P = TypeVar("P")

_COMPARED = 32  # shards that are there already and are compared with what is asked for


class Recorder:
    """Writes the completions of one engine, sampled in one way, into one store. Its methods may run in several threads.

    Args:
        store: Where the shards go.
        engine: What sampled, as `r3.rollout.preflight.preflight` found it.
        sampling: How it was asked to sample.
        weight_version: Version of the weights that it samples with, e.g. the trainer's step; the engine's own if not given.
            A completion that has one keeps it.
        fsync: As in `r3.shard.save_file`.
    """

    def __init__(
        self,
        store: ShardStore,
        engine: EngineInfo,
        sampling: Sampling,
        *,
        weight_version: int = UNKNOWN_VERSION,
        fsync: bool = True,
    ) -> None:
        self.store, self.engine, self.sampling = store, engine, sampling
        self.weight_version = engine.weight_version if weight_version == UNKNOWN_VERSION else weight_version
        self.fsync = fsync

    def keep(self, prompt: Prompt, sample_id: str, completion: Completion, *, weight_version: int | None = None) -> int:
        """Decode, check and write one sample.

        Args:
            weight_version: Of this sample, where it is not the Recorder's.

        Returns:
            Size of the shard in bytes; 0 if the sample was there already, written by another collector on the same store.

        Raises:
            WireError: the routes cannot be trusted.
            StoreError: the store cannot be written.
        """
        sample = self.sample(prompt, sample_id, completion, weight_version=weight_version)
        try:
            return self.store.add(sample, fsync=self.fsync)
        except PresentError:
            return 0

    def sample(
        self, prompt: Prompt, sample_id: str, completion: Completion, *, weight_version: int | None = None
    ) -> RolloutSample:
        """The sample that `keep` writes; arguments and errors as there."""
        if weight_version is None:
            own = completion.weight_version
            weight_version = self.weight_version if own == UNKNOWN_VERSION else own
        return RolloutSample.from_rollout(
            sample_id=sample_id,
            group_id=prompt.prompt_id,
            spec=self.engine.spec,
            prompt_tokens=completion.prompt_token_ids,
            response_tokens=completion.token_ids,
            response_logprobs=completion.logprobs,
            routes=self._routes(f"sample {sample_id!r} of {prompt.where}", completion),
            weight_version=weight_version,
            provenance=self._provenance(prompt, completion.finish_reason),
        )

    def _routes(self, where: str, completion: Completion) -> Routes:
        payload = completion.routed_experts
        request: wire.Request = {
            "num_tokens": len(completion.prompt_token_ids) + len(completion.token_ids),
            "where": where,
            "context": Context(
                engine=self.engine.engine,
                version=self.engine.engine_version,
                channel="http" if payload is None or isinstance(payload, (str, memoryview)) else "offline",
                finish_reason=completion.finish_reason,
                stream=False,
                prompt_tokens=len(completion.prompt_token_ids),
            ),
        }
        if payload is None or isinstance(payload, (str, memoryview)):
            return wire.decode_vllm(payload, self.engine.spec, **request)
        return wire.routes_from_rows(payload, self.engine.spec, **request)

    def _provenance(self, prompt: Prompt, finish_reason: str) -> Provenance:
        engine, sampling = self.engine, self.sampling
        extra = {"prompt_digest": prompt.digest, "max_tokens": str(sampling.max_tokens)}
        if sampling.seed is not None:
            extra["seed"] = str(sampling.seed)
        if sampling.extra:
            extra["request"] = orjson.dumps(dict(sampling.extra), option=orjson.OPT_SORT_KEYS).decode()
        return Provenance(
            engine=engine.engine,
            engine_version=engine.engine_version,
            model=engine.model,
            model_fingerprint=engine.model_fingerprint,
            temperature=float(sampling.temperature),
            top_p=float(sampling.top_p),
            top_k=sampling.top_k,
            logprobs_mode=engine.logprobs_mode,
            finish_reason=finish_reason,
            extra=extra,
        )

    def require_alike(self, prompt: Prompt, sample_id: str) -> None:
        """Refuse to add to samples of another model, of other settings or of another prompt under the same id.

        Raises:
            StoreError: the sample that is there differs in one of these; the message says in which.
            SpecError: it was routed by another model.
        """
        sample = self.store.open(sample_id)
        where = self.store.key_of(sample_id)
        self.engine.spec.require_same(sample.spec, where)
        theirs, ours = sample.provenance, self._provenance(prompt, "")
        model = "model_fingerprint" if theirs.model_fingerprint and ours.model_fingerprint else "model"
        names = (model, "temperature", "top_p", "top_k", "logprobs_mode")
        pairs = [(name, getattr(theirs, name), getattr(ours, name)) for name in names]
        pairs += [
            (name, theirs.extra.get(name), ours.extra.get(name)) for name in ("prompt_digest", "max_tokens", "request")
        ]
        pairs.append(("weight_version", set(sample.weight_version[sample.loss_mask].tolist()), {self.weight_version}))
        for name, got, expected in pairs:
            if got != expected:
                raise StoreError(
                    f"the samples that are here already were made with another {name}",
                    where=where,
                    expected=f"{expected} (as asked for now)",
                    got="nothing" if got is None else got,
                    remedy="collect into another directory, or ask for the same to resume",
                )


def to_compare(present: Sequence[P]) -> Sequence[P]:
    """Of what is in the store already, evenly spread, what `require_alike` looks at: every shard that is opened is read whole."""
    return present[:: max(1, len(present) // _COMPARED)]


def require_usable_id(store: ShardStore, prompt: Prompt, n: int) -> None:
    """Raise PromptError if the store cannot name n samples of this prompt."""
    try:
        store.key_of(f"{prompt.prompt_id}.{n - 1}")
    except StoreError as error:
        raise PromptError(
            "the id is too long for a file name",
            where=prompt.where,
            expected=error.expected,
            got=error.got,
            remedy="give the prompt a shorter id, or none",
        ) from None
