#!/usr/bin/env bash
# Sets up .venv, then passes the tests. `--slow` runs the long ones too, `--only-slow` those alone; other arguments go
# to pytest.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
# shellcheck source=scripts/setup_venv.sh
source scripts/setup_venv.sh
setup_venv "$root" -e "${root}[dev,test-extras]"

arguments=()
marker="not slow"
for argument in "$@"; do
    case "$argument" in
        --slow) marker="slow or not slow" ;;
        --only-slow) marker="slow" ;;
        *) arguments+=("$argument") ;;
    esac
done
# One torch thread a worker: two workers on two cores would otherwise fight over four threads.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
workers="${MEDUSA_TEST_WORKERS:-$(python -c 'import os; print(max(1, min(4, len(os.sched_getaffinity(0)))))')}"
exec python -m pytest -n "$workers" --dist loadfile -m "$marker" ${arguments[@]+"${arguments[@]}"}
