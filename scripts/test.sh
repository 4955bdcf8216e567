#!/usr/bin/env bash
# Lint, types and the CPU test suite. Arguments go to pytest: scripts/test.sh tests/doors -k resume
# Without arguments the tests marked slow are left out (long ones, mostly with a whole engine): scripts/test.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

[ $# -gt 0 ] || set -- -m "not slow"
prepare cpu,test
say "lint";   .venv/bin/ruff check .
say "format"; .venv/bin/ruff format --check .
say "types";  .venv/bin/mypy
# Two workers, for two cores; what starts a Ray is on one of them (tests/support/worker_files.py), from the beginning.
say "tests";  OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --no-loadscope-reorder "$@"
say "all good"
