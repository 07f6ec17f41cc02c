"""The budget of a run: what its routes cost on the wire, on disk, in memory and in the trainer, and what saturates first.

Arithmetic only: sizes from `r3.budget.sizes`, processor time from `r3.budget.costs`, and limits that the caller states. Every
line says how it was computed. Units are decimal (1 MB is 10^6 bytes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from r3.budget.costs import Costs
from r3.budget.inputs import Collection, Limits, Workload
from r3.budget.models import Model
from r3.budget.simulation import THREADS, Step
from r3.budget.sizes import (
    Parallel,
    base64_bytes,
    json_bytes,
    npy_bytes,
    reads,
    route_bytes,
    shard_bytes,
    wire_bytes,
)
from r3.errors import ConfigError

KEY_BYTES = 457  # pickled `r3.rollout.ray.results.Outcome` of a usual sample: what goes through Ray for each


@dataclass(frozen=True)
class Line:
    """One number: `group` and `name` for people, `key` for programs, `how` it was computed."""

    group: str
    key: str
    name: str
    value: float
    unit: str
    how: str


@dataclass(frozen=True)
class Load:
    """How much of something that is limited a run uses.

    Attributes:
        key, name: Of the resource.
        used, limit, unit: Mean over the step.
        remedy: What helps when it is full.
    """

    key: str
    name: str
    used: float
    limit: float
    unit: str
    remedy: str

    @property
    def share(self) -> float:
        return self.used / self.limit


@dataclass(frozen=True)
class Budget:
    """The lines and the loads of a run, the fullest first."""

    model: Model
    workload: Workload
    collection: Collection
    parallel: Parallel
    limits: Limits
    costs: Costs
    lines: tuple[Line, ...]
    loads: tuple[Load, ...]

    def __getitem__(self, key: str) -> float:
        return next(line.value for line in self.lines if line.key == key)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": {**asdict(self.model), "brief": self.model.spec.brief()},
            "workload": asdict(self.workload),
            "collection": asdict(self.collection),
            "trainer": {**asdict(self.parallel), "ranks": self.parallel.ranks},
            "limits": asdict(self.limits),
            "costs": asdict(self.costs),
            "lines": {line.key: {"value": line.value, "unit": line.unit, "how": line.how} for line in self.lines},
            "loads": [{**asdict(load), "share": load.share} for load in self.loads],
        }


def budget(
    model: Model,
    workload: Workload,
    collection: Collection,
    parallel: Parallel,
    limits: Limits,
    costs: Costs,
    *,
    ray: bool,
) -> Budget:
    """Size a run.

    Args:
        ray: Whether Ray carries the keys; its lines are left out if not.
    """
    if workload.samples < parallel.data:
        raise ConfigError(
            "fewer samples than data-parallel replicas", expected=f"at least {parallel.data}", got=workload.samples
        )
    chunks = parallel.pipeline * parallel.virtual
    if chunks > model.spec.num_layers:
        raise ConfigError("more model chunks than decoder layers", expected=model.spec.num_layers, got=chunks)
    sized = _Sized(model, workload, collection, parallel, limits, costs)
    lines = [*sized.sizes(), *sized.collecting(), *sized.training(), *(sized.through_ray() if ray else ())]
    loads = sorted(sized.loads(), key=lambda load: load.share, reverse=True)
    return Budget(model, workload, collection, parallel, limits, costs, tuple(lines), tuple(loads))


class _Sized:
    """The sizes of one sample, from which all lines follow."""

    def __init__(
        self, model: Model, work: Workload, collection: Collection, parallel: Parallel, limits: Limits, costs: Costs
    ) -> None:
        self.model, self.work, self.collection = model, work, collection
        self.parallel, self.limits, self.costs = parallel, limits, costs
        self.wire = wire_bytes(model, work.prompt, work.response)
        self.shard = shard_bytes(model, work.prompt, work.response)
        self.ids = route_bytes(model, work.tokens)
        self.npy = npy_bytes(model, work.tokens)
        self.loop = costs.loop_s(model, work.prompt, work.response)
        self.threads = costs.threads_s(model, work.prompt, work.response)
        together = max(1, work.micro_batch_tokens // work.tokens)
        self.reads = reads(model, work.prompt, work.response, parallel, together=together, objects=limits.objects)

    def sizes(self) -> Iterator[Line]:
        work, tokens, spec = self.work, self.work.tokens, self.model.spec
        rows = f"{spec.num_layers} layers x top-{spec.top_k} x {spec.dtype.itemsize} B"
        yield Line(
            "token", "wire_token", "on the wire", base64_bytes(self.npy) / tokens, "B", f"{rows} in base64, .npy header"
        )
        how = f"{spec.num_moe_layers} MoE layers x top-{spec.top_k} x {spec.dtype.itemsize} B"
        yield Line("token", "routes_token", "routes, in memory", spec.bytes_per_token, "B", how)
        how = "routes, token ids, log-probs, spans, header: the packer's own arithmetic"
        yield Line("token", "disk_token", "on disk", self.shard / tokens, "B", how)
        how = f"base64 and {json_bytes(self.model, work.prompt, work.response) / 1e6:.2f} MB of other JSON"
        yield Line("sample", "wire_sample", "response", self.wire / 1e6, "MB", how)
        yield Line("sample", "disk_sample", "shard", self.shard / 1e6, "MB", f"{tokens:,} tokens")
        samples = f"{work.samples:,} samples"
        yield Line("step", "wire_step", "on the wire", self.wire * work.samples / 1e9, "GB", samples)
        yield Line("step", "disk_step", "written", self.shard * work.samples / 1e9, "GB", samples)
        kept = self.shard * work.samples * work.keep_steps / 1e12
        yield Line("step", "disk_kept", "kept on disk", kept, "TB", f"{work.keep_steps} steps")

    def collecting(self) -> Iterator[Line]:
        work, collection = self.work, self.collection
        rate = work.rate
        yield Line("collecting", "rate", "samples", rate, "1/s", f"{work.samples:,} in {work.step_seconds:g} s")
        tokens = work.response * rate / collection.servers
        yield Line(
            "collecting",
            "server_tokens",
            "sampled tokens of each server",
            tokens,
            "1/s",
            f"{collection.servers} servers",
        )
        sample = (self.loop + self.threads) * 1e3
        how = f"event loop {self.loop * 1e3:.1f}, threads {self.threads * 1e3:.1f}; {self.costs.source}"
        yield Line("collecting", "sample_ms", "processor time of a sample", sample, "ms", how)
        cores = rate * (self.loop + self.threads)
        yield Line("collecting", "cores", "cores busy, all hosts", cores, "", "rate x processor time")
        most = 1 / (self.loop + self.threads)
        how = "its interpreter does one thing at a time"
        yield Line("collecting", "process_rate", "most samples of one process", most, "1/s", how)
        needed = ceil(rate / most / 0.7)
        yield Line("collecting", "processes", "processes needed", needed, "", "each at most 70 % busy")
        incoming = rate * self.wire / collection.hosts
        yield Line(
            "collecting", "net_in", "network in, each host", incoming * 8e-9, "Gbit/s", f"{collection.hosts} hosts"
        )
        outgoing = rate * self.shard / collection.hosts
        yield Line(
            "collecting", "net_out", "network out, each host", outgoing * 8e-9, "Gbit/s", "shards to shared storage"
        )
        yield Line("collecting", "write", "storage, written", rate * self.shard / 1e9, "GB/s", "mean over the step")
        yield Line(
            "collecting",
            "memory",
            "payloads in flight, each host, at worst",
            self.memory() / 1e9,
            "GB",
            self.memory_how(),
        )
        if self.limits.objects:
            yield Line("collecting", "puts", "PUT requests", rate, "1/s", "one a shard of at most 64 MiB")

    def memory(self) -> float:
        """All responses of a host arrive at once: each in pieces and then in one, and the threads' copies.

        A test holds it against the peak of a real collection, which is a little less.
        """
        per_process = 2 * self.collection.concurrency * self.wire + THREADS * (self.npy + self.ids)
        return per_process * ceil(self.collection.processes / self.collection.hosts)

    def memory_how(self) -> str:
        return f"2 x {self.collection.concurrency} responses and {THREADS} x (.npy + routes), each process"

    def training(self) -> Iterator[Line]:
        work, parallel, each = self.work, self.parallel, self.reads
        how = f"{parallel.ranks} ranks; {each.bytes / self.shard:.2f} times the shards"
        yield Line("training", "read_step", "read, all ranks", each.bytes * work.samples / 1e9, "GB", how)
        mine = work.samples / parallel.data
        yield Line(
            "training",
            "read_rank",
            "read, the rank that reads most",
            each.rank_bytes * mine / 1e9,
            "GB",
            f"{mine:,.0f} samples",
        )
        rate = each.bytes * work.rate / 1e9
        yield Line("training", "read", "storage, read", rate, "GB/s", "mean over the step")
        busy = each.rank_bytes * mine * self.costs.read_s_per_byte
        yield Line(
            "training",
            "read_busy",
            "processor time of a rank's reading",
            busy,
            "s",
            "a step's; in a thread beside the GPU",
        )
        if self.limits.objects:
            how = f"{each.requests:.4g} a sample: a HEAD, the head, token ids, ranges of routes, each reader"
            yield Line("training", "gets", "GET and HEAD requests", each.requests * work.rate, "1/s", how)
            puts, gets = work.samples * self.limits.put_price, each.requests * work.samples * self.limits.get_price
            yield Line(
                "training", "price", "requests of a step", (puts + gets) / 1000, "$", "at the stated price of 1,000"
            )
        layers = ceil(self.model.spec.num_moe_layers / (parallel.pipeline * parallel.virtual))
        rows = ceil(work.micro_batch_tokens / parallel.token_share)
        row = self.model.spec.top_k * self.model.spec.dtype.itemsize
        batch = layers * rows * row
        how = f"{layers} layers x {rows:,} rows x {row} B"
        yield Line("training", "gpu_batch", "GPU memory of a micro-batch's routes", batch / 1e6, "MB", how)
        flying = parallel.pipeline * parallel.virtual
        widened = rows * self.model.spec.top_k * 8
        how = f"{flying} micro-batches in flight, and one layer's ids as int64"
        yield Line("training", "gpu", "GPU memory at most", (batch * flying + widened) / 1e6, "MB", how)

    def through_ray(self) -> Iterator[Line]:
        work = self.work
        yield Line(
            "Ray",
            "ray_keys",
            "keys, as r3 sends",
            KEY_BYTES * work.samples / 1e6,
            "MB",
            f"{KEY_BYTES} B a sample, a step",
        )
        how = "if routes went through the object store: a copy for each node that reads"
        yield Line("Ray", "ray_routes", "routes, as r3 does not", self.ids * work.samples / 1e9, "GB", how)

    def loads(self) -> Iterator[Load]:
        work, collection, limits = self.work, self.collection, self.limits
        rate, hosts = work.rate, collection.hosts
        yield Load(
            "process",
            "interpreter of a collector process",
            rate * (self.loop + self.threads) / collection.processes,
            1.0,
            "cores",
            "more collector processes",
        )
        yield Load(
            "cores",
            "cores of a collector host",
            rate * (self.loop + self.threads) / hosts,
            limits.cores,
            "cores",
            "more hosts, or collectors on the hosts of the servers",
        )
        yield Load(
            "net_in",
            "network into a collector host",
            rate * self.wire / hosts * 8e-9,
            limits.nic_gbit_s,
            "Gbit/s",
            "collectors on the hosts of the servers: responses then stay there",
        )
        yield Load(
            "net_out",
            "network out of a collector host",
            rate * self.shard / hosts * 8e-9,
            limits.nic_gbit_s,
            "Gbit/s",
            "more hosts",
        )
        yield Load(
            "memory",
            "memory of a collector host",
            self.memory() / 1e9,
            limits.host_memory_gb,
            "GB",
            "a lower --concurrency of each process",
        )
        yield Load(
            "write", "storage, written", rate * self.shard / 1e9, limits.storage_write_gb_s, "GB/s", "faster storage"
        )
        yield Load(
            "read",
            "storage, read",
            self.reads.bytes * rate / 1e9,
            limits.storage_read_gb_s,
            "GB/s",
            "sequence parallelism, so that tensor-parallel ranks read their tokens only; node-local caches",
        )
        room = self.shard * work.samples * work.keep_steps / 1e12
        if limits.objects:
            more = "more prefixes (a folder for each step is one), fewer readers, whole layers"
            yield Load("puts", "PUT requests", rate, limits.puts_s, "1/s", more)
            yield Load("gets", "GET requests", self.reads.requests * rate, limits.gets_s, "1/s", more)
        yield Load("room", "room on the storage", room, limits.storage_tb, "TB", "fewer steps kept: r3 gc --keep-steps")

    def step(self, slots: int, spread: float, seed: int) -> Step:
        """What `simulate` needs: sequences take as long as fills the step's seconds with `slots` in each server."""
        work, collection, limits = self.work, self.collection, self.limits
        in_flight = min(collection.servers * slots, collection.processes * collection.concurrency, work.samples)
        return Step(
            samples=work.samples,
            servers=collection.servers,
            slots=slots,
            generate_s=work.step_seconds * in_flight / work.samples,
            processes=collection.processes,
            hosts=collection.hosts,
            concurrency=collection.concurrency,
            cores=limits.cores,
            loop_s=self.loop,
            threads_s=self.threads,
            wire_bytes=self.wire,
            shard_bytes=self.shard,
            nic_bytes_s=limits.nic_gbit_s * 1e9 / 8,
            storage_bytes_s=limits.storage_write_gb_s * 1e9,
            read_bytes=self.reads.bytes,
            read_bytes_s=limits.storage_read_gb_s * 1e9,
            spread=spread,
            seed=seed,
        )


def step_of(budgeted: Budget, *, slots: int = 64, spread: float = 0.5, seed: int = 0) -> Step:
    """The simulation's view of a budget: servers of `slots` sequences, fast enough for the step, whose lengths vary."""
    b = budgeted
    return _Sized(b.model, b.workload, b.collection, b.parallel, b.limits, b.costs).step(slots, spread, seed)
