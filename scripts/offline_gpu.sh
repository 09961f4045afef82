#!/usr/bin/env bash
# evo on a GPU machine without a network that already has torch and cuda-core, and may be short of the rest.
#
# On a machine with a network, for the GPU machine's Python (wheels go to .wheels/; more packages may follow):
#     bash scripts/offline_gpu.sh pack 3.12 [pytest hypothesis ...]
# Copy the checkout, .wheels/ included. On the GPU machine:
#     bash scripts/offline_gpu.sh evo doctor
#     bash scripts/offline_gpu.sh evo search layernorm --target cuda
#     bash scripts/offline_gpu.sh pytest -m gpu --require-gpu
# Nothing is installed into the machine's Python: the wheels are unpacked to .wheels/site, for these commands only.
# Reads: PYTHON (python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
wheels=.wheels

case ${1:-} in
pack)
    version=${2:?which Python does the GPU machine have? e.g. pack 3.12}
    rm -rf "$wheels" # wheels of another version would be installed beside these
    exec "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest "$wheels" -c constraints.txt \
        optuna sqlalchemy alembic mako pebble colorlog pyelftools "${@:3}"
    ;;
evo | pytest)
    if ! [ -d "$wheels/site" ]; then
        rm -rf "$wheels/site.part"
        "$python" -m pip install --quiet --no-index --no-deps --target "$wheels/site.part" "$wheels"/*.whl
        mv "$wheels/site.part" "$wheels/site"
    fi
    export PYTHONPATH="$PWD/$wheels/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
    exec "$python" -m "$@"
    ;;
*)
    sed -n 's/^# \{0,1\}//; 2,11p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
