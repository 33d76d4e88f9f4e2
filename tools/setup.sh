#!/bin/sh
# Make .venv and install qkflow into it, once: `tools/setup.sh` for running it, `tools/setup.sh dev` for its tests as well.
# What is installed already is left alone; a changed pyproject.toml or constraints.txt, or a moved folder, installs again.
set -eu
cd "$(dirname "$0")/.."
extra="${1:-run}"
stamp=".venv/.installed-$extra"
# the folder is part of it: an editable installation does not survive being moved
want="$(pwd) $(cat pyproject.toml constraints.txt | cksum)"

for done in "$stamp" .venv/.installed-dev; do # who can test can run
    if [ -x .venv/bin/python ] && [ -f "$done" ] && [ "$(cat "$done")" = "$want" ]; then
        exit 0
    fi
done

python=""
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [ -z "$python" ]; then
    found="$(${PYTHON:-python3} --version 2>&1 || echo "no ${PYTHON:-python3}")"
    echo "qkflow needs Python 3.11 or newer; found: $found. Install one, or name it: make PYTHON=/path/to/python" >&2
    exit 1
fi

if ! .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "making .venv with $("$python" --version)"
    rm -rf .venv
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "could not make a virtual environment: on Debian and Ubuntu, install the package python3-venv" >&2
        exit 1
    fi
fi

what="."
[ "$extra" = run ] || what=".[$extra]"
echo "installing qkflow ($extra): this takes a few minutes the first time"
if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable "$what" \
    2>.venv/install.log; then
    tail -n 15 .venv/install.log >&2
    echo "the installation failed (the whole log: .venv/install.log): is there a network, enough disk, and a torch for this Python?" >&2
    exit 1
fi
printf '%s' "$want" >"$stamp"
