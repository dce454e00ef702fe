#!/usr/bin/env bash
# The fast tests at the oldest versions that pyproject.toml allows, in a venv of their own (.venv-floors).
# Usage: bash scripts/test_floors.sh [pytest arguments]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="${MEDUSA_FLOORS_VENV:-$root/.venv-floors}"
floors=("torch==2.11.*" "transformers==5.17.0" "accelerate==1.15.0" "numpy==2.0.*")
if [ ! -f "$venv/.ready" ]; then
    "${MEDUSA_PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --progress-bar off "${floors[@]}" -e "${root}[dev,test-extras]"
    touch "$venv/.ready"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile "$@"
