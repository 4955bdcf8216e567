#!/usr/bin/env bash
# The main job in small: a batch file of mixed requests on a local Ray of 2 prefill and 4 decode ranks, with the
# embedded tiny model (random weights: the answers are noise, everything else is real).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare cpu
mkdir -p demo_output
say "answering scripts/demo_rows.jsonl (one row is broken on purpose)"
.venv/bin/deepinfer run --cluster cluster_configs/cpu-tiny.yaml \
    -i scripts/demo_rows.jsonl -o demo_output/answers.jsonl --no-resume --allow-row-errors
.venv/bin/python scripts/show_answers.py demo_output/answers.jsonl
say "input:   scripts/demo_rows.jsonl"
say "answers: demo_output/answers.jsonl (beside it answers.jsonl.state, which a resume needs)"
