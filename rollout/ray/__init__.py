"""ray: rollout workers on a Ray cluster. Real Ray actors drive vLLM engines, write shards where they are made, and hand
on keys.

`RolloutPool` is what a driver uses; `RolloutWorker` is one actor, for those who schedule themselves; `Engine` says what
it drives. How to use it, what happens when something dies, and the limits: docs/ray.md."""

from r3.rollout.ray.engines import Engine
from r3.rollout.ray.pool import RolloutPool
from r3.rollout.ray.results import Committed, EngineLost, Outcome, StaleWeights, Started
from r3.rollout.ray.run import Run
from r3.rollout.ray.worker import RolloutWorker

__all__ = [
    "Committed",
    "Engine",
    "EngineLost",
    "Outcome",
    "RolloutPool",
    "RolloutWorker",
    "Run",
    "StaleWeights",
    "Started",
]
