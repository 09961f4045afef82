#!/usr/bin/env bash
# Compiles every structural branch of the CUDA templates, for their first workload, with another NVRTC than the environment's:
# what one release compiles, another may refuse, and users have the one that their PyTorch pins.
#
#     bash scripts/other_nvrtc.sh 13.0 [KERNEL...]      any release of CUDA 13, for sm_89; no GPU is needed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
release=${1:?which release of NVRTC? e.g. 13.0}
shift
[ $# -gt 0 ] || set -- attention layernorm layernorm_backward rmsnorm rmsnorm_backward softmax
if [ "${release%%.*}" != 13 ]; then
    echo "other_nvrtc.sh: release $release is not of CUDA 13; for CUDA 12 make an environment with it: make env CUDA=cu12" >&2
    exit 2
fi

own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
venv=${VENV:-.venv}
"$venv/bin/python" -m venv --without-pip "$own/venv"
"$venv/bin/python" -m pip --python "$own/venv/bin/python" install --quiet --no-deps \
    "nvidia-cuda-nvrtc==$release.*" "nvidia-cuda-runtime==$release.*"
site=$("$own/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/environment.pth" # comes behind its own

# The compiler that answers, and the kernels' first workloads.
mapfile -t told < <("$own/venv/bin/python" -c 'import sys
from evo.problem.loading import load_kernel
from evo.targets import find_target
print(find_target("cuda").compiler(), *(load_kernel(name).example("cuda").key for name in sys.argv[1:]), sep="\n")' "$@")
case ${told[0]-} in "nvrtc $release."*) ;; *)
    echo "other_nvrtc.sh: ${told[0]-nothing} answers instead of $release" >&2
    exit 1
    ;;
esac
echo "${told[0]}"
for kernel; do
    told=("${told[@]:1}")
    "$own/venv/bin/python" -m evo check "$kernel" --target cuda --arch sm_89 --compile-only --samples 0 --workload "${told[0]}" --db "$own/lineage.db" >"$own/log" || {
        cat "$own/log" >&2
        exit 1
    }
    grep 'branches compiled' "$own/log"
done
