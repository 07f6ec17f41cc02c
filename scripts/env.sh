#!/usr/bin/env bash
# Make the virtual environment that quickstart and tests run in, or reuse it. Sourced; leaves R3_PYTHON set.
#   R3_VENV   where (default: .venv of the repository)
#   PYTHON    the Python 3.11 to make it from
R3_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
R3_VENV="${R3_VENV:-$R3_ROOT/.venv}"
R3_PYTHON="$R3_VENV/bin/python"

r3_env() {
  local python stamp want
  python="${PYTHON:-$(command -v python3.11 || command -v python3 || true)}"
  if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    echo "r3: the locked CPU stack needs Python 3.11; found ${python:-none}. Set PYTHON to one." >&2
    return 1
  fi
  stamp="$R3_VENV/.r3-installed"
  want="$(cat "$R3_ROOT/configs/cpu-stack.lock" "$R3_ROOT/pyproject.toml" | cksum) $R3_ROOT"
  if [ -x "$R3_PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
    return 0
  fi
  echo "r3: installing the locked CPU stack into $R3_VENV (4.5 GB; two to four minutes the first time)" >&2
  rm -f "$stamp" # until the last step has run, an interrupted installation is not taken for a whole one
  "$python" -m venv "$R3_VENV" || return
  "$R3_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps -r "$R3_ROOT/configs/cpu-stack.lock" || return
  "$R3_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e "$R3_ROOT" || return
  printf '%s' "$want" >"$stamp"
}
