"""The KL diagnostic as a script: what `r3 diagnose` does, for those who keep scripts in their job files.

    python scripts/kl_diagnostic.py shards/step-0012 --model checkpoints/step-0012 --dtype bfloat16 --float32
    python scripts/kl_diagnostic.py --logprobs live=r3-off.pt --logprobs replay=r3-on.pt

Scores the same sampled tokens live, with the recorded experts, and once more; prints the verdict, what is wrong with the
comparison if something is, and the table; writes JSON, Markdown and a page. docs/kl-diagnostic.md explains all of it.
"""

import sys

from r3.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "diagnose")
    main()
