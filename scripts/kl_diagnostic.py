"""The KL diagnostic as a script: what `r3 diagnose` does, for those who keep scripts in their job files.

python scripts/kl_diagnostic.py shards/step-0012 --model checkpoints/step-0012 --dtype bfloat16
"""

import sys

from r3.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "diagnose")
    main()
