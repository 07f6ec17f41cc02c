"""telemetry: what a pool and its workers count, through Ray's metrics, so that any Ray cluster's Prometheus has it.

Each process records into `ray.util.metrics`, Ray's agent on its node serves all of them at that node's metrics port
(Prometheus adds `ray_` in front; names, tags and queries are in docs/ray.md). A process makes each metric once: Ray keeps
them by name."""

from __future__ import annotations

from functools import cache

from ray.util.metrics import Counter, Gauge, Histogram

from r3.errors import EngineError, PromptError, R3Error, SampleError, StoreError
from r3.rollout.ray.results import StaleWeights, WeightsChanged
from r3.wire.checks import PayloadError

# Seconds. A tiny engine answers in 0.1 s, a 32k-token response takes ten minutes.
_ENGINE = [0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800]
# A shard of 4 MB is checked and written in 5 to 20 ms on a local disk, and in seconds to an object store under load.
_WRITE = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 60]


class WorkerMetrics:
    """Of one worker; every value is tagged with its name."""

    def __init__(self, worker: str) -> None:
        tags = {"worker": worker}
        self.samples = Counter("r3_rollout_samples", "Samples committed.", ("worker",))
        self.tokens = Counter("r3_rollout_tokens", "Tokens sampled, of committed samples.", ("worker",))
        self.prompt_tokens = Counter("r3_rollout_prompt_tokens", "Prompt tokens of committed samples.", ("worker",))
        self.bytes = Counter("r3_rollout_bytes", "Bytes of the shards committed.", ("worker",))
        self.engine = Histogram(
            "r3_rollout_engine_seconds", "From a request to its completion.", boundaries=_ENGINE, tag_keys=("worker",)
        )
        self.write = Histogram(
            "r3_rollout_write_seconds",
            "From a completion to its committed shard: waiting for a thread, decoding, checks, writing.",
            boundaries=_WRITE,
            tag_keys=("worker",),
        )
        self.rejected = Counter(
            "r3_rollout_rejected", "Completions and prompts refused, by cause.", ("worker", "cause")
        )
        self.running = Gauge("r3_rollout_running", "Samples that the worker is at.", ("worker",))
        self.version = Gauge("r3_rollout_weight_version", "Version of the weights that sample.", ("worker",))
        for metric in vars(self).values():
            metric.set_default_tags(tags)


class PoolMetrics:
    """Of one driver."""

    def __init__(self, pool: str) -> None:
        keys = ("pool",)
        self.retries = Counter("r3_rollout_retries", "Samples asked again, by what was wrong.", ("pool", "cause"))
        self.restarts = Counter("r3_rollout_worker_restarts", "Workers that died or were restarted.", keys)
        self.queue = Gauge("r3_rollout_queue_depth", "Samples that wait for a worker.", keys)
        self.in_flight = Gauge("r3_rollout_in_flight", "Samples at a worker.", keys)
        self.in_flight_bytes = Gauge(
            "r3_rollout_in_flight_bytes", "Bytes reserved for samples at a worker, and of those not yet consumed.", keys
        )
        self.workers = Gauge("r3_rollout_workers", "Workers that are ready.", keys)
        for metric in vars(self).values():
            metric.set_default_tags({"pool": pool})


@cache
def worker_metrics(worker: str) -> WorkerMetrics:
    return WorkerMetrics(worker)


@cache
def pool_metrics(pool: str) -> PoolMetrics:
    return PoolMetrics(pool)


def cause_of(error: BaseException) -> str:
    """A tag of few values: the name of the check that refused a payload (`r3.wire.checks.CHECKS`), or the kind of the error."""
    if isinstance(error, PayloadError) and error.finding is not None:
        return error.finding.check
    kinds = (
        (WeightsChanged, "weights-changed"),
        (StaleWeights, "stale-weights"),
        (PromptError, "prompt"),
        (SampleError, "sample"),
        (StoreError, "store"),
        (EngineError, "engine"),
    )
    return next(
        (name for kind, name in kinds if isinstance(error, kind)), "payload" if isinstance(error, R3Error) else "crash"
    )
