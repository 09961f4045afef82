#!/usr/bin/env bash
# What `make demo` runs once the environment is there: plain commands, each printed before its output.
# Reads: VENV (.venv), BUDGET (60s). Writes: runs/demo.db, exported/demo/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$(cd "${VENV:-.venv}/bin" && pwd):$PATH"
db=runs/demo.db

run() { printf '\n$ %s\n' "$*"; "$@"; }

rm -rf runs/demo.db* exported/demo # the demo starts from nothing each time
run evo doctor
run evo search layernorm --budget "${BUDGET:-60s}" --seed 1 --name demo --db $db
run evo export demo --format module --out exported/demo/layernorm --db $db
cd exported/demo # the module needs no evo from here on
run python -m layernorm check
run python -m layernorm bench
cat <<END

exported/demo/layernorm is right on this machine, and needs no evo. With PYTHONPATH=exported/demo:
  from layernorm import layer_norm  # in place of torch.nn.functional.layer_norm
all that was found:    evo show demo --db $db
which changes did it:  evo explain demo --db $db
END
