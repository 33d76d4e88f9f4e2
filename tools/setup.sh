#!/bin/sh
# Creates .venv and installs qkflow into it: `tools/setup.sh` to run it, `tools/setup.sh dev` to test it as well,
# `tools/setup.sh bench` to run the benchmarks.
# Does nothing if already installed; installs again after pyproject.toml, constraints.txt or the folder's path changed.
set -eu
cd "$(dirname "$0")/.."
extra="${1:-run}"
stamp=".venv/.installed-$extra"
# The path is part of the key: an editable installation breaks when the folder is moved.
key="$(pwd) $(cat pyproject.toml constraints.txt | cksum)"

existing_stamps="$stamp"
[ "$extra" = run ] && existing_stamps="$stamp .venv/.installed-dev .venv/.installed-bench" # both include run
for existing in $existing_stamps; do
    if [ -x .venv/bin/python ] && [ -f "$existing" ] && [ "$(cat "$existing")" = "$key" ]; then
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
    version="$(${PYTHON:-python3} --version 2>&1 || echo "no ${PYTHON:-python3}")"
    echo "qkflow needs Python 3.11 or newer; found: $version. Install it, or pass its path: make PYTHON=/path/to/python" >&2
    exit 1
fi

if ! .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "creating .venv with $("$python" --version)"
    rm -rf .venv
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "could not create a virtual environment; on Debian and Ubuntu, install the package python3-venv" >&2
        exit 1
    fi
fi

package="."
[ "$extra" = run ] || package=".[$extra]"
echo "installing qkflow ($extra); this takes a few minutes the first time"
if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable "$package" \
    2>.venv/install.log; then
    tail -n 15 .venv/install.log >&2
    echo "installation failed (full log: .venv/install.log). Check the network, the free disk space, and that torch supports this Python version" >&2
    exit 1
fi
printf '%s' "$key" >"$stamp"
