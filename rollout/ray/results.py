"""results: what travels through Ray besides the prompt: a key and a few numbers, or an error. No array, no payload."""

from __future__ import annotations

from dataclasses import dataclass

from r3.errors import EngineError, R3Error
from r3.rollout.preflight import EngineInfo


@dataclass(frozen=True)
class Committed:
    """One sample that is whole in the store.

    Attributes:
        sample_id, prompt_id: `<prompt id>.<k>` and the prompt's.
        key: Path or URL of the shard: all that a trainer needs.
        bytes: Size of the shard; 0 if it was there already.
        prompt_tokens, tokens: Prompt and sampled tokens; 0 if it was there already.
        weight_version: Version of the weights that sampled it; -1 unknown, or there already.
        engine_s, write_s: Seconds from the request to the completion, and from there to the committed shard.
        worker, node: Who made it; "" if it was there already.
        fresh: Written by this run; False for one that was in the store when it was asked for.
    """

    sample_id: str
    prompt_id: str
    key: str
    bytes: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    weight_version: int = -1
    engine_s: float = 0.0
    write_s: float = 0.0
    worker: str = ""
    node: str = ""
    fresh: bool = False


@dataclass(frozen=True)
class Outcome:
    """Of one call of `RolloutWorker.sample`: a sample, or what is wrong. Errors are values here, because Ray would wrap
    an exception in one of its own with a traceback of the worker; whatever arrives as an exception is the worker's death
    or a defect."""

    sample: Committed | None
    error: R3Error | None = None
    cause: str = ""


@dataclass(frozen=True)
class Started:
    """What a worker says of itself when it is ready.

    Attributes:
        self_versioned: The engine tells the version of its weights itself (`Sampler.weight_version`).
    """

    name: str
    node: str
    pid: int
    engine: EngineInfo
    weight_version: int
    self_versioned: bool


class EngineLost(EngineError):
    """The worker's engine has ended or may not sample again: the worker must be started anew."""


class WeightsChanged(EngineError):
    """Somebody updated the engine while a sample was made."""


class StaleWeights(EngineError):
    """The worker has another version of the weights than the pool asks for."""
