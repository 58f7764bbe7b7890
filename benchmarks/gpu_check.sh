#!/usr/bin/env bash
# Checks on a CUDA machine, under 6 minutes on an H200: benchmarks/gpu_check.sh [--toy] [--device cuda:N] [--out FILE]
#
# Takes the first Python whose torch sees CUDA: $PYTHON, .venv/bin/python, python3; where there is none, makes
# build/gpu-venv. What mfs_decompose needs beside torch and that Python lacks goes into build/gpu-site, from the index pip
# is set to or from the wheels in $GPU_CHECK_WHEELS; without it every part but the last still runs.
# `--toy --device cpu` runs the same code anywhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
limit=${GPU_CHECK_SECONDS:-350}
venv=build/gpu-venv site=build/gpu-site

sees="torch.cuda.is_available()"
case " $* " in *" cpu "*) sees=True ;; esac

has_torch() { command -v "$1" > /dev/null && "$1" -c "import sys, torch; sys.exit(not $sees)" 2> /dev/null; }
has_rest() { "$python" -c "import mfs_decompose.pipeline.decompose" 2> /dev/null; }
install() { "$python" -m pip install --quiet --disable-pip-version-check --no-input "$@"; }
install_rest() {
    if [ -n "${GPU_CHECK_WHEELS:-}" ]; then
        install --no-index --no-deps --upgrade --target "$site" "$GPU_CHECK_WHEELS"/*.whl
    else
        mkdir -p "$site"
        grep -v '^\(torch\|accelerate\|peft\|pytest\|hypothesis\|mypy\|ruff\)==' requirements.lock > "$site/rest.txt"
        install --no-deps --upgrade --target "$site" --requirement "$site/rest.txt"
    fi
}

python=
for candidate in "${PYTHON:-}" .venv/bin/python python3; do
    if [ -n "$candidate" ] && has_torch "$candidate"; then python=$candidate && break; fi
done
if [ -z "$python" ]; then
    if [ "$sees" != True ] && ! ls /dev/nvidia[0-9]* /proc/driver/nvidia/version > /dev/null 2>&1; then
        echo "expected a machine with a CUDA device, found none; benchmarks/gpu_check.sh --toy --device cpu runs anywhere" >&2
        exit 2
    fi
    echo "no Python here has the torch it takes: making $venv" >&2
    python3 -m venv "$venv"
    python=$venv/bin/python
    install "$(grep '^torch==' requirements.lock)"
    has_torch "$python" || { echo "expected a torch that sees CUDA, found none after installing one" >&2; exit 2; }
fi
export PYTHONPATH="$PWD/$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if ! has_rest; then
    install_rest && has_rest || echo "packages of requirements.lock are missing: the family is not decomposed" >&2
fi
exec timeout "$limit" "$python" benchmarks/gpu_check.py "$@"
