#!/usr/bin/env bash
# From a fresh clone to the answer: did replay close the gap between rollout and training?
# Needs Python 3.11 and pip. `bash scripts/quickstart.sh --help` lists what can be set.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
r3_env
exec "$R3_PYTHON" "$R3_ROOT/scripts/quickstart.py" "$@"
