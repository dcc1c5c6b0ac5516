#!/usr/bin/env bash
# Installs the project with what its tests need into .venv and runs them. Arguments go to pytest:
#   ./scripts/test.sh -m slow        the slow tests, which are left out by default
#   ./scripts/test.sh tests/laws -x
#   EXTRAS=plan,test ./scripts/test.sh -m ahead_of_time     with what compiles for GPUs and TPUs
set -euo pipefail
# shellcheck source=scripts/lib/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"

cd "$CHECKOUT"
ensure_environment "[${EXTRAS:-test}]"
say "pytest $*"
exec "$VENV/bin/python" -m pytest "$@"
