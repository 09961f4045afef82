#!/usr/bin/env bash
# Makes $VENV and installs evo into it, editable, with the tested versions. Does nothing when nothing changed.
# Reads: PYTHON (an interpreter to use; default: the first suitable one found), VENV (.venv), CUDA (cu13 or cu12).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
cuda=${CUDA:-cu13}
stamp=$venv/.installed

fail() { printf '%s\n' "$@" >&2; exit 1; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }
version() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo missing; }
base() { "$1" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)'; }

find_python() { # prints a name; runs each, since one on PATH may be a shim with nothing behind it
    local name found=""
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        supported "$name" || continue
        if "$name" -c 'import ensurepip, venv' 2>/dev/null; then echo "$name"; return; fi
        found=${found:-$name}
    done
    if [ -n "$found" ]; then echo "$found"; return; fi
    fail "evo needs Python 3.11 to 3.14; python3 here is $(version python3)." \
         "Install one (Debian, Ubuntu: apt-get install python3.12 python3.12-venv) or name it: make PYTHON=/path/to/python3.12"
}

case $cuda in cu12 | cu13) ;; *) fail "CUDA is cu12 or cu13, got '$cuda'" ;; esac
if [ -n "${PYTHON:-}" ]; then
    supported "$PYTHON" || fail "PYTHON=$PYTHON must be a Python 3.11 to 3.14, but is $(version "$PYTHON")"
    python=$PYTHON
elif supported "$venv/bin/python"; then
    python=$venv/bin/python # keep what is there
else
    python=$(find_python)
fi

# Line 1: what the environment is made of. The folder belongs to it: a moved one still points at its old place.
# Line 2: what is installed in it.
made_of="$(base "$python") $PWD"
wanted="$made_of"$'\n'"$cuda $(cat pyproject.toml constraints.txt | cksum)"
installed=$(cat "$stamp" 2>/dev/null || true)
if [ "$installed" = "$wanted" ]; then exit 0; fi

if [ "$python" != "$venv/bin/python" ] && [ "$(base "$venv/bin/python" 2>/dev/null)" != "$(base "$python")" ] ||
    [ -n "$installed" ] && [ "${installed%%$'\n'*}" != "$made_of" ]; then
    if [ "$python" = "$venv/bin/python" ]; then python=$(find_python); fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail \
        "$python (Python $(version "$python")) cannot make virtual environments: it lacks ensurepip." \
        "Debian, Ubuntu: apt-get install python$(version "$python" | cut -d. -f1-2)-venv; or name another: make PYTHON=/path/to/python3.12"
    echo "making $venv with Python $(version "$python")"
    "$python" -m venv --clear "$venv"
    wanted="$(base "$python") $PWD"$'\n'"${wanted#*$'\n'}"
fi
# Python compiles a module when it is first imported: pip need not compile all of them now.
echo "installing evo into $venv (PyTorch is the large part; a CUDA build takes minutes)"
rm -f "$stamp"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -e ".[$cuda,dev]" -c constraints.txt
echo "$wanted" >"$stamp"
echo "installed; for the command evo in this shell:  . $venv/bin/activate"
