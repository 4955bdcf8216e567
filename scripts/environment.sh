# Sourced by demo.sh and test.sh: makes .venv in the repository and installs this package into it.
# PYTHON picks the interpreter (3.11, 3.12 or 3.13; default python3). Doing it again costs a second.

say() { printf '== %s\n' "$*" >&2; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

pick_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" && { echo "$PYTHON"; return; }
        say "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13; name another one"
        return 2
    fi
    for candidate in python3 python3.12 python3.13 python3.11 python; do
        fits "$candidate" && { echo "$candidate"; return; }
    done
    say "found no Python 3.11, 3.12 or 3.13; install one, or name it: PYTHON=/path/to/python3.12 $0"
    return 2
}

# prepare EXTRAS: afterwards .venv holds the package with these extras, for example "cpu,test".
prepare() {
    local extras=$1 python stamp wanted
    stamp=".venv/installed-$extras"
    wanted=$(cksum < pyproject.toml)
    if [ ! -x .venv/bin/python ]; then
        python=$(pick_python)
        say "making .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        say ".venv is up to date"
        return
    fi
    if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
        say "installing torch 2.13.0 (some minutes the first time)"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
    fi
    say "installing deepinfer[$extras]"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
    echo "$wanted" > "$stamp"
}
