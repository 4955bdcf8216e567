#!/usr/bin/env bash
# Measures decode steps over requests x context x drafts on this device and draws throughput against speed for a user:
#   scripts/run_sweep.sh FOLDER [options of `deepinfer bench decode`]
# REQUESTS, CONTEXTS and DRAFTS replace the lists below. Points that are in FOLDER already are not measured again; one
# that does not fit into the memory is left out, with its message in FOLDER.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 1 ] || { sed -n '2,5s/^# //p' "$0"; exit 2; }
folder=$1
shift
python=${PYTHON:-.venv/bin/python}
bench() { "$python" -c 'import sys; from deepinfer.cli.main import run_command; sys.exit(run_command(sys.argv[1:]))' bench "$@"; }

mkdir -p "$folder"
for context in ${CONTEXTS:-8192 32768 131072}; do
    for drafts in ${DRAFTS:-0 3 5}; do
        for requests in ${REQUESTS:-16 32 64 128 256}; do
            point=$folder/requests-$requests-context-$context-drafts-$drafts
            [ -s "$point.json" ] && continue
            printf '== %s requests, context %s, %s drafts\n' "$requests" "$context" "$drafts" >&2
            bench decode --requests "$requests" --context "$context" --drafts "$drafts" --watch 0 "$@" \
                --json "$point.json" > "$point.log" 2>&1 || tail -n 1 "$point.log" >&2
        done
    done
done
"$python" scripts/draw_sweep.py "$folder"
