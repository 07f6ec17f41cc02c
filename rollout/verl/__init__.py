"""veRL's rollout side: agent loops that keep, check and store the routes of what they sampled.

In veRL's configuration, and nothing else (docs/verl.md):

    actor_rollout_ref.rollout.enable_rollout_routing_replay: True
    actor_rollout_ref.rollout.agent.agent_loop_config_path: configs/verl/agent_loops.yaml

The YAML names these classes under the names of the loops that they stand for. Each runs veRL's own loop, unchanged, and then
takes from its requests (`r3.rollout.verl.legs`) what veRL's loop drops or overwrites.

    SingleTurnAgentLoop, ToolAgentLoop    veRL's own two, with routes
    ReplayLoopMixin                       for a loop of one's own
    ReplayAgentLoopManager                optional: checks the set-up in the driver, before the first worker starts
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3.rollout.verl.loops import ReplayLoopMixin as ReplayLoopMixin
    from r3.rollout.verl.loops import SingleTurnAgentLoop as SingleTurnAgentLoop
    from r3.rollout.verl.loops import ToolAgentLoop as ToolAgentLoop
    from r3.rollout.verl.manager import ReplayAgentLoopManager as ReplayAgentLoopManager

_LOOPS = ("ReplayLoopMixin", "SingleTurnAgentLoop", "ToolAgentLoop")


def __getattr__(name: str) -> Any:  # veRL is imported when one of them is asked for
    if name in _LOOPS:
        from r3.rollout.verl import loops

        return getattr(loops, name)
    if name == "ReplayAgentLoopManager":
        from r3.rollout.verl import manager

        return manager.ReplayAgentLoopManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
