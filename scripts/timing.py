"""How benchmarks of torch code take a time: CPU time of this process on a CPU, which a busy machine disturbs least; on a GPU the
wall time between two synchronisations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    if device.type == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start
