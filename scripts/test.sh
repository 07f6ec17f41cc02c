#!/usr/bin/env bash
# Lint, types and tests, in the locked environment. With arguments: pytest alone, with those arguments.
#   bash scripts/test.sh                      everything
#   bash scripts/test.sh -m "not engine"      what needs no engine, in under two minutes
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
r3_env
cd "$R3_ROOT"
if [ "$#" -eq 0 ]; then
  "$R3_PYTHON" -m ruff check .
  "$R3_PYTHON" -m ruff format --check .
  # Types are checked on the wheel's content: rollout/ and trainers/ are r3.rollout and r3.trainers only once installed.
  built="$(mktemp -d)"
  trap 'rm -rf "$built"' EXIT
  rm -rf build
  "$R3_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target "$built" .
  (cd "$built" && "$R3_PYTHON" -m mypy --config-file "$R3_ROOT/pyproject.toml" --cache-dir "$R3_ROOT/.mypy_cache" -p r3)
fi
"$R3_PYTHON" -m pytest "$@"
