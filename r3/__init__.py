"""r3: Rollout Routing Replay. Record the experts that the rollout engine chose, replay them in the trainer.

    vLLM --base64 .npy--> wire --Routes--> sample --shard--> store --slice--> layout --local rows--> router override
                                                                                          |
                                            KL diagnostic: live | replay | replay again  <+

Importing this package imports neither torch nor any engine; names below load their module on first use.
`r3.rollout` holds the engine's side, `r3.trainers` the trainer's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3.errors import R3Error as R3Error
    from r3.layout import Layout as Layout
    from r3.routes import Routes as Routes
    from r3.sample import Provenance as Provenance
    from r3.sample import RolloutSample as RolloutSample
    from r3.spec import RoutingSpec as RoutingSpec
    from r3.store import ShardStore as ShardStore

__version__ = "0.1.0"

_HOME = {
    "R3Error": "r3.errors",
    "Layout": "r3.layout",
    "Provenance": "r3.sample",
    "RolloutSample": "r3.sample",
    "Routes": "r3.routes",
    "RoutingSpec": "r3.spec",
    "ShardStore": "r3.store",
}
__all__ = ["Layout", "Provenance", "R3Error", "RolloutSample", "Routes", "RoutingSpec", "ShardStore", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'r3' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
