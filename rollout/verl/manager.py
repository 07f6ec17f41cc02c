"""manager: veRL's agent-loop manager, which refuses a set-up that cannot replay before any worker starts.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=r3.rollout.verl.ReplayAgentLoopManager

Optional. The loops check the same by themselves, but veRL 0.9's trainer takes an error in a loop for a failed prompt: it is in
the log, and the run ends when no prompt is left ("no materializable trajectories"). Here the driver raises, with the reason.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils.import_utils import resolve_config_path

from r3.errors import ConfigError
from r3.rollout.verl.settings import check_config, require_trainer, settings_of


class ReplayAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """veRL's `AgentLoopManagerTQ`.

    Raises:
        ConfigError: a configuration that cannot work, agent loops that are not r3's, or trainers that do not replay.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        path = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
        entries: Any = OmegaConf.load(resolve_config_path(path)) if path else []
        ours = [entry for entry in entries if str(entry.get("_target_", "")).startswith("r3.rollout.verl.")]
        if not ours:
            raise ConfigError(
                "none of the agent loops is r3's: routes would be neither checked nor kept",
                where="actor_rollout_ref.rollout.agent.agent_loop_config_path",
                expected="a YAML list with _target_: r3.rollout.verl.SingleTurnAgentLoop (configs/verl/agent_loops.yaml)",
                got=path,
            )
        for entry in ours:
            settings = settings_of(OmegaConf.to_container(entry, resolve=True))
            check_config(config, settings)
            if settings.trainer == "r3":
                require_trainer()
        super().__init__(config, *args, **kwargs)
