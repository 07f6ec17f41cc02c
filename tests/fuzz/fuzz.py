"""Coverage-guided fuzzing of what reads bytes from outside. Needs atheris (`pip install atheris`), which the tests do not.

    python tests/fuzz/corpus.py write SEEDS
    mkdir FOUND                                             # SEEDS and FOUND: folders of yours
    python tests/fuzz/fuzz.py wire FOUND SEEDS/wire -max_total_time=600 -rss_limit_mb=1024 -timeout=10 -max_len=2048
    python tests/fuzz/corpus.py keep wire FOUND

The same with `shard`. A crash is written to the current directory; `keep` it too. `test_corpus.py` replays what is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["r3", "targets"]):
    sys.path.insert(0, str(Path(__file__).parent))
    import targets

TARGETS = {"wire": targets.decode_one, "shard": targets.load_one}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        raise SystemExit(__doc__)
    target = TARGETS[sys.argv.pop(1)]
    counts = [0, 0]  # inputs, accepted

    def one_input(data: bytes) -> None:
        counts[0] += 1
        counts[1] += target(data)
        if counts[0] & (counts[0] - 1) == 0:
            print(f"{counts[0]} executions, {counts[1]} accepted", flush=True)

    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
