"""How long the metrics of N tokens take, and how much memory: the accumulators of a diagnosis with three forwards, fed sequence
by sequence as a diagnosis feeds them, without models.

    python scripts/bench_metrics.py 10_000_000
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from r3.diagnose.accumulate import Accumulator, ScoredSequence
from r3.diagnose.result import FORWARDS, Diagnosis

LENGTH = 1000


def main(num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    total = Accumulator(FORWARDS)
    before, started, spent = _peak(), time.perf_counter(), 0.0
    for i in range(num_tokens // LENGTH):
        rollout = -0.1 - rng.exponential(1.0, LENGTH)
        train = {name: rollout + rng.normal(0, 0.01, LENGTH) for name in FORWARDS}
        differing = (rng.random(LENGTH) < 0.1).astype(np.int64)
        sequence = ScoredSequence(
            f"s{i}",
            np.arange(8, LENGTH + 8),
            rollout,
            train,
            np.zeros(LENGTH, np.int32),
            np.arange(LENGTH + 8),
            differing,
        )
        entered = time.process_time()
        total.add(sequence)
        spent += time.process_time() - entered
        if (i + 1) % (num_tokens // LENGTH // 5) == 0:
            print(
                f"{(i + 1) * LENGTH:>12,} tokens: {spent:.1f} s of CPU in the accumulators, peak {_peak() - before:.0f} MB more"
            )
    entered = time.process_time()
    total.fill(Diagnosis({}, {}), routing=dict.fromkeys(FORWARDS, "own"), trainers={name: {} for name in FORWARDS})
    print(
        f"metrics, 2,000 resamples over {len(total.sample_ids):,} sequences: {time.process_time() - entered:.1f} s of CPU; "
        f"peak {_peak() - before:.0f} MB more than at the start; {time.perf_counter() - started:.1f} s in all"
    )


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000)
