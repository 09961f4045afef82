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
run evo best layernorm --db $db
winner=$(evo best layernorm --json --db $db | python -c 'import json, sys; print(json.load(sys.stdin)[0]["candidate"])')
run evo lineage "$winner" --db $db
run evo export demo --format module --out exported/demo/layernorm --db $db
cd exported/demo # the module needs no evo from here on
run python -m layernorm check
run python -m layernorm bench
