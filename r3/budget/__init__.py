"""budget: how large a run's routes are, what handling them takes, and where it saturates first; behind `r3 budget`.

    models     presets, or a config on disk: layers, experts, top-k, vocabulary
    sizes      bytes of one sample: response, shard, what each rank of a trainer reads
    costs      processor time of handling it, measured
    inputs     what is sampled, who collects, what the hardware gives
    plan       the budget of a run against stated limits
    simulation one step, event by event
    standin    a server process that sends real wire bytes, to measure against

Contract: sizes are those of the code that writes and reads, not estimates; every number of a budget says how it was computed;
what is a limit of somebody's hardware is an input.
"""

from r3.budget.costs import DEFAULTS, Costs, measure
from r3.budget.inputs import Collection, Limits, Workload
from r3.budget.models import PRESETS, Model, model_of
from r3.budget.plan import Budget, budget, step_of
from r3.budget.simulation import Outcome, Step, simulate
from r3.budget.sizes import Parallel, reads, shard_bytes, wire_bytes
from r3.budget.standin import standins

__all__ = [
    "DEFAULTS",
    "PRESETS",
    "Budget",
    "Collection",
    "Costs",
    "Limits",
    "Model",
    "Outcome",
    "Parallel",
    "Step",
    "Workload",
    "budget",
    "measure",
    "model_of",
    "reads",
    "shard_bytes",
    "simulate",
    "standins",
    "step_of",
    "wire_bytes",
]
