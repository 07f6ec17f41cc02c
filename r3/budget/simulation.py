"""A model of one step of collection: who waits for whom, and where it saturates first.

    server slot -> NIC of the collector's host -> event loop of its process -> a thread -> the storage -> next prompt
                                                                                                    `-> all ranks read it

A discrete-event simulation: 32,000 samples take a second. An analytic queue would give the same saturation (the smallest of
the stations' capacities, which `r3 budget` prints without simulating) and miss what a step is about: all sequences start
together, their lengths differ, and the step ends with the last. Each station is first come, first served; a job takes it for as
long as the measured costs say, and the processes of a host share its cores.

The event loop and the threads of one process share Python's interpreter, which does one thing at a time (`GIL`). numpy, the
kernel and the checksums let go of it, and taking it back costs; real runs at saturation are met best by counting all of
the threads' time as the interpreter's (docs/sizing.md compares). Left out: servers that slow down with longer sequences, and
retries.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from r3.errors import ConfigError

THREADS = 4  # of a collector process; r3.rollout.collector's


@dataclass(frozen=True)
class Step:
    """One step, in seconds and bytes of one sample.

    Attributes:
        samples: Of the step.
        servers, slots: Engines, and sequences at a time in each.
        generate_s: Mean seconds of a sequence in its slot; 0 is at once.
        spread: Standard deviation of the lengths over their mean (gamma distributed); 0 is all alike.
        processes, hosts: Collector processes, and machines that they are spread over.
        concurrency: Requests in flight of each process.
        cores: Of each collector host.
        loop_s, threads_s: Processor seconds of a mean sample, on the event loop and in the threads.
        locked: Share of the threads' time in which they hold the interpreter.
        server_s: Of the server's process, if it runs on the collector's cores (on one machine); else 0.
        wire_bytes, shard_bytes: Of a mean sample.
        nic_bytes_s, storage_bytes_s: Of a collector host, and of the storage for all hosts.
        read_bytes, read_bytes_s: What all ranks of a trainer read of a mean sample, as soon as it is committed, and how fast
            the storage gives it to all of them.
    """

    samples: int
    servers: int
    slots: int
    generate_s: float
    processes: int
    hosts: int
    concurrency: int
    cores: int
    loop_s: float
    threads_s: float
    wire_bytes: float
    shard_bytes: float
    nic_bytes_s: float
    storage_bytes_s: float
    read_bytes: float = 0.0
    read_bytes_s: float = 1e15
    server_s: float = 0.0
    locked: float = 1.0
    spread: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        seconds: Until the last shard is committed.
        generated_s: Until the last sequence left its server.
        read_s: Until the last shard is read by all ranks.
        busy: Share of the time that each kind of station was busy, all of its kind together.
        in_memory: Most payloads at once that had arrived at one process and were not committed.
    """

    seconds: float
    generated_s: float
    read_s: float
    samples: int
    busy: dict[str, float]
    in_memory: int

    @property
    def rate(self) -> float:
        return self.samples / self.seconds

    @property
    def first(self) -> str:
        """The busiest station."""
        return max(self.busy, key=lambda name: self.busy[name])

    @property
    def lag_s(self) -> float:
        """From the last sequence to the last shard: what collection adds to the step."""
        return self.seconds - self.generated_s


class _Station:
    """So many servers of one queue; a job that comes at `now` is done at the returned time."""

    def __init__(self, count: int) -> None:
        self.free = [0.0] * count
        self.busy = 0.0

    def take(self, now: float, seconds: float) -> float:
        begin = max(now, heapq.heappop(self.free))
        heapq.heappush(self.free, begin + seconds)
        self.busy += seconds
        return begin + seconds


@dataclass
class _Held:
    """A thing that is held over several stations, by at most `count` jobs: slots, threads, an interpreter."""

    count: int
    waiting: list[Callable[[float], None]] = field(default_factory=list)

    def ask(self, now: float, then: Callable[[float], None]) -> None:
        if self.count:
            self.count -= 1
            then(now)
        else:
            self.waiting.append(then)

    def release(self, now: float) -> None:
        if self.waiting:
            self.waiting.pop(0)(now)
        else:
            self.count += 1


class _Simulation:
    def __init__(self, step: Step) -> None:
        self.step, self.random = step, random.Random(step.seed)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.number = self.left = 0
        self.done_at = self.generated_at = self.read_at = 0.0
        self.slots = [_Held(step.slots) for _ in range(step.servers)]
        self.nics = [_Station(1) for _ in range(step.hosts)]
        self.cores = [_Station(step.cores) for _ in range(step.hosts)]
        self.interpreters = [_Held(1) for _ in range(step.processes)]
        self.threads = [_Held(THREADS) for _ in range(step.processes)]
        self.busy = [0.0] * step.processes
        self.storage, self.reading = _Station(1), _Station(1)
        self.held = [0] * step.processes
        self.most_held = 0
        self.generating = 0.0

    def at(self, time: float, then: Callable[[float], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, then))

    def run(self) -> Outcome:
        step = self.step
        self.left = step.samples
        for process in range(step.processes):
            for _ in range(step.concurrency):
                self.next_prompt(process, 0.0)
        while self.events:
            time, _, then = heapq.heappop(self.events)
            then(time)
        seconds = self.done_at or 1e-12
        busy = {
            "server slots": self.generating / (seconds * step.servers * step.slots),
            "network of a collector host": _share(self.nics, seconds),
            "cores of a collector host": _share(self.cores, seconds),
            "interpreter of a collector process": sum(self.busy) / (seconds * step.processes),
            "storage, written": self.storage.busy / seconds,
            "storage, read": self.reading.busy / max(seconds, self.read_at),
        }
        return Outcome(seconds, self.generated_at, self.read_at, step.samples, busy, self.most_held)

    def next_prompt(self, process: int, now: float) -> None:
        """A request goes to the servers in turn, as the least busy of equals."""
        if not self.left:
            return
        self.left -= 1
        server = self.left % self.step.servers
        size = self.random.gammavariate(self.step.spread**-2, self.step.spread**2) if self.step.spread else 1.0

        def generate(now: float) -> None:
            took = self.step.generate_s * size
            self.generating += took
            self.at(now + took, generated)

        def generated(now: float) -> None:
            self.slots[server].release(now)
            self.generated_at = max(self.generated_at, now)
            if self.step.server_s:
                now = self.cores[host].take(now, self.step.server_s * size)
            self.at(now, self.arrive(process, host, size))

        host = process % self.step.hosts
        self.slots[server].ask(now, generate)

    def arrive(self, process: int, host: int, size: float) -> Callable[[float], None]:
        step, threads = self.step, self.threads[process]

        def sent(now: float) -> None:
            self.held[process] += 1
            self.most_held = max(self.most_held, self.held[process])
            self.at(self.nics[host].take(now, step.wire_bytes * size / step.nic_bytes_s), received)

        def received(now: float) -> None:
            self.interpret(process, host, now, step.loop_s * size, parsed)

        def parsed(now: float) -> None:
            threads.ask(now, in_thread)

        def in_thread(now: float) -> None:
            self.interpret(process, host, now, step.threads_s * size * step.locked, unlocked)

        def unlocked(now: float) -> None:
            self.at(self.cores[host].take(now, step.threads_s * size * (1 - step.locked)), store)

        def store(now: float) -> None:
            self.at(self.storage.take(now, step.shard_bytes * size / step.storage_bytes_s), committed)

        def committed(now: float) -> None:
            threads.release(now)
            self.held[process] -= 1
            self.done_at = max(self.done_at, now)
            self.read_at = self.reading.take(now, step.read_bytes * size / step.read_bytes_s)
            self.next_prompt(process, now)

        return sent

    def interpret(self, process: int, host: int, now: float, seconds: float, then: Callable[[float], None]) -> None:
        """Work that needs the process's interpreter and a core."""

        def begin(now: float) -> None:
            end = self.cores[host].take(now, seconds)
            self.busy[process] += end - now
            self.at(end, finish)

        def finish(now: float) -> None:
            self.interpreters[process].release(now)
            then(now)

        self.interpreters[process].ask(now, begin)


def _share(stations: list[_Station], seconds: float) -> float:
    return sum(each.busy for each in stations) / (seconds * sum(len(each.free) for each in stations))


def simulate(step: Step) -> Outcome:
    """Run one step.

    Raises:
        ConfigError: nothing to run, or a station without capacity.
    """
    counts = (step.samples, step.servers, step.slots, step.processes, step.hosts, step.concurrency, step.cores)
    if min(counts) < 1 or min(step.nic_bytes_s, step.storage_bytes_s, step.read_bytes_s) <= 0:
        raise ConfigError(
            "nothing to simulate",
            expected="at least one of everything, and networks and storage faster than 0",
            got=step,
        )
    return _Simulation(step).run()
