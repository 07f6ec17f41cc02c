"""Capture of routed experts in an engine that has none: docs/capture.md builds one with it, in about forty lines.

    router --ids--> CaptureSource.capture_fn --> RoutingCapturer (device, one step) --> StepRoutes (a snapshot)
                                                                                            |
                     a request's routes <-- gather by slots -- RoutePool (by KV slot) <-- commit

vLLM and SGLang have such a subsystem inside; nothing here imports them. It needs torch, and transformers only where a
transformers model is bound. Every piece refuses what it cannot do right: a lost row is never a row of zeros.
"""

from r3.rollout.capture.binding import Binding, bind, require_all_ranks
from r3.rollout.capture.capturer import RoutingCapturer
from r3.rollout.capture.groups import full_attention_group
from r3.rollout.capture.layouts import BatchLayout
from r3.rollout.capture.memory import PoolMemory, memory
from r3.rollout.capture.pool import RoutePool
from r3.rollout.capture.snapshot import HostRoutes, PendingRoutes, StepRoutes
from r3.rollout.capture.sources import CaptureSource, TransformersSource, transformers_sources

__all__ = [
    "BatchLayout",
    "Binding",
    "CaptureSource",
    "HostRoutes",
    "PendingRoutes",
    "PoolMemory",
    "RoutePool",
    "RoutingCapturer",
    "StepRoutes",
    "TransformersSource",
    "bind",
    "full_attention_group",
    "memory",
    "require_all_ranks",
    "transformers_sources",
]
