#!/usr/bin/env bash
# The main job on a real model, on a machine with nothing but Python >= 3.10: SmolLM2-135M-Instruct writes its own
# training conversations, four Medusa heads are trained on them, a tree is searched, and what was won is measured.
# About 13 minutes on two CPU cores, installation aside. Run it again after an interruption: it continues.
#   bash scripts/quickstart.sh [--full]     --full evaluates on all 64 held-out prompts, 128 tokens each
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
# shellcheck source=scripts/setup_venv.sh
source scripts/setup_venv.sh

prompts=24 tokens=96
for argument in "$@"; do
    case "$argument" in
        --full) prompts=64 tokens=128 ;;
        *) echo "error: unknown option '$argument'; allowed: --full" >&2; exit 2 ;;
    esac
done

setup_venv "$root" -e "$root"
run=runs/quickstart
mkdir -p "$run"
: >"$run/stages.txt"

stage() { # stage NAME COMMAND...: prints the command, runs it, notes its time and peak memory
    local name="$1"
    shift
    printf '\n+ %s\n' "$(printf '%q ' "$@")"
    python scripts/stage.py "$run/stages.txt" "$name" "$@"
}

stage distill medusa-train distill --base smollm2-135m --prompts data/prompts/train.jsonl --synthesize 100 \
    --samples 3 --temperature 0.5 --max-new-tokens 128 --out "$run/distill"
stage fit medusa-train fit --recipe recipes/quickstart.yaml
stage tree medusa-train tree "$run/heads" --nodes 15
stage eval-acceptance medusa-train eval-acceptance "$run/heads" --suite heldout --max-prompts "$prompts" \
    --max-new-tokens "$tokens" --out "$run/report"
stage generate medusa-train generate "$run/heads" --prompt "Explain in a few sentences how a rainbow forms." \
    --max-new-tokens 128

printf '\nTime of each stage (%s):\n' "$run/stages.txt"
cat "$run/stages.txt"
printf '\nThe report: %s/report/report.html\n' "$run"
