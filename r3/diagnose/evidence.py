"""What guards judge by, beside the diagnosis itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from r3.diagnose.accumulate import Accumulator
from r3.diagnose.offsets import RouteOffsets
from r3.diagnose.temperature import TemperatureFit


@dataclass
class Evidence:
    """Of one diagnosis.

    Attributes:
        total: The accumulators.
        route_offsets: Overlap at offsets; None where routes are not known.
        fit: The fitted temperature; None where the trainer's logits are not at hand.
        padding_mass: Mean probability beyond the vocabulary, by sequence; empty where logits are not wider.
        moe_layers: Decoder layers of the L layers.
        suspects: Samples in which the live routers repeat hardly any recorded set, with their share of differing sets.
    """

    total: Accumulator
    route_offsets: RouteOffsets | None = None
    fit: TemperatureFit | None = None
    padding_mass: Sequence[float] = ()
    moe_layers: Sequence[int] = ()
    suspects: dict[str, float] = field(default_factory=dict)
