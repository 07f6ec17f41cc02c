"""Dealing: which rank, and which of its DataLoader workers, gets which unit, and in which order. Pure functions of names.

Contract: every rank computes the whole deal and takes its own share, so no rank needs to ask another; shares of all ranks
have the
same length, or it is an error: a rank with one batch less leaves the others waiting in a collective. Equal shares split
over as many workers give equal numbers of batches.

The order is by a hash of (seed, epoch, name). It does not depend on numpy's or torch's generators, whose streams may change from
version to version, nor on the order in which a file system lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from r3.errors import ConfigError

UNEVEN = ("raise", "drop", "pad")


@dataclass(frozen=True)
class Deal:
    """One epoch's units of all ranks.

    Attributes:
        shares: For each rank, units by index, in order; all of one length.
        padded: How many units at the ends of shares stand there a second time.
        dropped: Units that no rank gets.
    """

    shares: tuple[tuple[int, ...], ...]
    padded: int = 0
    dropped: tuple[int, ...] = ()


def hashed(seed: int, epoch: int, name: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}/{epoch}/{name}".encode())


def deal(
    names: Sequence[str],
    left: Sequence[int],
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
    world_size: int,
    uneven: str,
) -> Deal:
    """Deal units one after the other to the ranks, as cards.

    Args:
        names: Of all units.
        left: Indices of the units that are to be dealt, ascending.
        seed, epoch: Of the order, with `shuffle`; without, the order of `names`.
        uneven: Where the units do not divide by `world_size`: `raise`, leave out the last ones (`drop`), or deal the first ones a
            second time (`pad`).

    Raises:
        ConfigError: they do not divide and `uneven="raise"`, or fewer units than ranks are to be dropped to none.
    """
    if uneven not in UNEVEN:
        raise ConfigError("unknown value of uneven", expected=" or ".join(UNEVEN), got=uneven)
    order = sorted(left, key=lambda index: (hashed(seed, epoch, names[index]), index)) if shuffle else list(left)
    over = len(order) % world_size
    if over and uneven == "raise":
        raise ConfigError(
            "the samples cannot be dealt evenly over the data-parallel ranks",
            expected=f"a multiple of {world_size} samples or groups",
            got=len(order),
            remedy='uneven="drop" leaves out the last ones of each epoch, uneven="pad" gives some a second time',
        )
    dropped: tuple[int, ...] = ()
    padded = 0
    if over and uneven == "drop":
        if len(order) < world_size:
            raise ConfigError(
                "dropping what does not divide leaves no rank anything",
                expected=f"at least {world_size} samples or groups",
                got=len(order),
                remedy='use uneven="pad", or fewer ranks',
            )
        order, dropped = order[:-over], tuple(order[-over:])
    elif over:
        padded = world_size - over
        order += [order[i % len(order)] for i in range(padded)]
    return Deal(tuple(tuple(order[rank::world_size]) for rank in range(world_size)), padded, dropped)
