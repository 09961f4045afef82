#!/usr/bin/env bash
# evo on a GPU machine without a network.
#
# That machine must have: Linux on x86-64; Python 3.11 or newer with pip; the NVIDIA driver; PyTorch in a CUDA build; and
# for that build's CUDA version NVRTC and the CUDA headers, which recent CUDA builds of PyTorch bring (else
# the wheels that pyproject.toml lists under cu12 and cu13). `evo doctor` there says what is missing. Everything else that
# evo depends on is packed: some 30 MB.
#
# On a machine with a network, for the GPU machine's Python (wheels go to .wheels/; more packages may follow):
#     bash scripts/offline_gpu.sh pack 3.12 [pytest pytest-timeout hypothesis ...]
# Copy the checkout, .wheels/ included. On the GPU machine:
#     bash scripts/offline_gpu.sh evo doctor
#     bash scripts/offline_gpu.sh evo search layernorm --target cuda
#     bash scripts/offline_gpu.sh pytest -m gpu --require-gpu
# Nothing is installed into the machine's Python: the wheels are unpacked to .wheels/site, for these commands only. There
# they take precedence over what that Python has of the same packages, which is left as it is.
# Reads: PYTHON (python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
wheels=.wheels

case ${1:-} in
pack)
    version=${2:?which Python does the GPU machine have? e.g. pack 3.12}
    rm -rf "$wheels" # wheels of another version would be installed beside these
    # Nothing but torch itself asks for torch, so without it pip finds no reason to fetch CUDA either.
    mapfile -t needed < <("$python" -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*(d for d in tomllib.load(file)["project"]["dependencies"] if not d.startswith("torch")), sep="\n")')
    exec "$python" -m pip download --quiet --only-binary=:all: --python-version "$version" \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest "$wheels" -c constraints.txt \
        "${needed[@]}" "${@:3}"
    ;;
evo | pytest)
    if ! [ -d "$wheels/site" ]; then
        rm -rf "$wheels/site.part"
        "$python" -m pip install --quiet --no-compile --no-index --no-deps --target "$wheels/site.part" "$wheels"/*.whl
        mv "$wheels/site.part" "$wheels/site"
    fi
    export PYTHONPATH="$PWD/$wheels/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
    exec "$python" -m "$@"
    ;;
*)
    sed -n '/^# Reads/q; 2,$s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
