#!/usr/bin/env bash
# Lint, types and the whole CPU test suite. Further arguments go to pytest: scripts/test.sh tests/doors -k resume
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare cpu,test
say "lint";   .venv/bin/ruff check .
say "format"; .venv/bin/ruff format --check .
say "types";  .venv/bin/mypy
say "tests";  OMP_NUM_THREADS=1 .venv/bin/python -m pytest "$@"
say "all good"
