#!/usr/bin/env bash
# Sets up what is needed and runs all tests; arguments go to pytest: bash test.sh -k rollout
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"

setup_python "$ROOT/requirements.txt" "$ROOT/requirements-dev.txt"
cd "$ROOT"
# Two files of tests at a time; pyproject.toml sets the time limit of a test.
exec "$PYTHON" -m pytest tests -q -n 2 --dist loadfile "$@"
