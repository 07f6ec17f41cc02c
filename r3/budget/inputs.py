"""What a budget is made of, besides the model: the work of a step, who collects, and what the hardware gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from r3.errors import ConfigError


@dataclass(frozen=True)
class Workload:
    """What is sampled and trained on.

    Attributes:
        samples: Of one step.
        prompt, response: Mean tokens of a sample.
        step_seconds: In which a step's samples are made, stored and read.
        keep_steps: Steps that stay in the store.
        micro_batch_tokens: Of one forward of a data-parallel replica, before it is cut.
    """

    samples: int = 32768
    prompt: int = 1024
    response: int = 15360
    step_seconds: float = 600.0
    keep_steps: int = 4
    micro_batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if min(self.samples, self.response, self.keep_steps, self.micro_batch_tokens) < 1 or self.prompt < 0:
            raise ConfigError("nothing to size", expected="at least one of everything", got=self)
        if not self.step_seconds > 0:  # nor NaN
            raise ConfigError("a step takes time", expected="above 0 s", got=self.step_seconds)

    @property
    def tokens(self) -> int:
        return self.prompt + self.response

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.step_seconds


@dataclass(frozen=True)
class Collection:
    """Who collects.

    Attributes:
        servers: Engines.
        processes: Collector processes: `r3 collect` or Ray workers.
        hosts: Machines that these run on.
        concurrency: Requests in flight of each process.
    """

    servers: int = 32
    processes: int = 8
    hosts: int = 8
    concurrency: int = 256

    def __post_init__(self) -> None:
        if min(self.servers, self.processes, self.hosts, self.concurrency) < 1 or self.processes < self.hosts:
            raise ConfigError(
                "no such collection", expected="at least one of everything, and a process on each host", got=self
            )


@dataclass(frozen=True)
class Limits:
    """What the hardware gives. The defaults are round numbers of 2025's clusters, not measurements: state yours.

    Attributes:
        nic_gbit_s: Of a collector host, each way.
        cores: Of a collector host, for collecting.
        host_memory_gb: Of a collector host, for payloads in flight.
        storage_write_gb_s, storage_read_gb_s: Of the shared storage, all clients together.
        storage_tb: Room for routes.
        puts_s, gets_s: Requests a second of an object store. S3 gives at least 3,500 and 5,500 for each partitioned prefix.
        put_price, get_price: Of 1,000 requests; S3 Standard's list price in us-east-1, in dollars.
        objects: The storage is an object store, not a file system.
    """

    nic_gbit_s: float = 100.0
    cores: int = 16
    host_memory_gb: float = 64.0
    storage_write_gb_s: float = 10.0
    storage_read_gb_s: float = 20.0
    storage_tb: float = 10.0
    puts_s: float = 3500.0
    gets_s: float = 5500.0
    put_price: float = 0.005
    get_price: float = 0.0004
    objects: bool = False

    def __post_init__(self) -> None:
        if not all(value > 0 for name, value in asdict(self).items() if name != "objects"):
            raise ConfigError("a limit of 0 is none", expected="above 0", got=self)
