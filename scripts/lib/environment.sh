# shellcheck shell=bash
# Sourced by the scripts of this checkout: a virtual environment with the project in it, made once.
#
#   PYTHON   the Python to use (default: the first of python3, python3.13, python3.12, python3.11 that serves)
#   VENV     the virtual environment (default: .venv in the checkout)

CHECKOUT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
VENV="${VENV:-$CHECKOUT/.venv}"

say() { printf '== %s\n' "$*"; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Whether a command runs a Python of at least 3.11 that can make virtual environments.
serves() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' </dev/null >/dev/null 2>&1
}

find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    serves "$PYTHON" || fail "PYTHON=$PYTHON is no Python of at least 3.11 with the venv module"
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if serves "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "no Python of at least 3.11 with the venv module was found on the PATH. Install one" \
    "(on Debian and Ubuntu: apt-get install python3 python3-venv), or name one: PYTHON=/path/to/python $0"
}

# ensure_environment EXTRAS: the project with its extras ("" or "[test]") in $VENV, at the pinned versions.
ensure_environment() {
  local extras="$1" python wanted stamp
  if [[ -n "${PYTHON:-}" || ! -x "$VENV/bin/python" ]]; then
    python="$(find_python)"
    wanted="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    if ! "$VENV/bin/python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$wanted')" 2>/dev/null; then
      say "making the virtual environment $VENV with Python $wanted"
      "$python" -m venv --clear "$VENV"
    fi
  fi
  stamp="$VENV/installed-$(printf '%s' "$extras" | tr -cd 'a-z,')"
  wanted="$CHECKOUT $(cat "$CHECKOUT/pyproject.toml" "$CHECKOUT/constraints.txt" | cksum)"
  if [[ "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]]; then
    say "longtrain$extras is installed in $VENV"
    return
  fi
  say "installing longtrain$extras into $VENV (a minute or two, once)"
  "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet \
    --constraint "$CHECKOUT/constraints.txt" --editable "$CHECKOUT$extras"
  printf '%s\n' "$wanted" >"$stamp"
}
