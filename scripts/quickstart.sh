#!/usr/bin/env bash
# From a fresh clone to a trained model: installs the project into .venv and trains configs/quickstart.yaml.
# Arguments are overrides: ./scripts/quickstart.sh run.steps=400
set -euo pipefail
# shellcheck source=scripts/lib/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"

cd "$CHECKOUT"
ensure_environment ""
say "longtrain train configs/quickstart.yaml $*"
exec "$VENV/bin/longtrain" train configs/quickstart.yaml "$@"
