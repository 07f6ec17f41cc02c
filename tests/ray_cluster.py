"""A Ray cluster of three nodes on this machine, for test modules that share one."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

MB = 2**20


def free_port() -> int:
    """For the dashboard, whose default port another Ray on this machine may have."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def three_nodes() -> Iterator[Any]:
    """Nodes with the resources `node0`, `node1` and `node2`; the driver is on the first. Workers can import tests/."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "include_dashboard": False,
            "num_cpus": 8,
            "object_store_memory": 100 * MB,
            "_system_config": {"metrics_report_interval_ms": 1000},
            "resources": {"node0": 100},
        },
    )
    try:
        for i in (1, 2):
            cluster.add_node(num_cpus=8, object_store_memory=80 * MB, resources={f"node{i}": 100})
        environment = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": environment},
        )
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def options(node: int | None = None, **more: Any) -> dict[str, Any]:
    """Ray's options of a worker: on a node, or anywhere."""
    where = {} if node is None else {"resources": {f"node{node}": 1}}
    return {"num_cpus": 1, "max_restarts": 0, **where, **more}


def workers_alive() -> list[int]:
    """Rollout workers of this cluster: its nodes are children of this process."""
    return [p.pid for p in psutil.Process().children(recursive=True) if "ray::RolloutWorker" in command_of(p)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def engines_alive() -> list[str]:
    """Processes of vLLM that rollout workers started; whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        line = command_of(process)
        try:
            if "VLLM" in line and "R3_GUARDED" in process.environ():
                found.append(line)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return found
