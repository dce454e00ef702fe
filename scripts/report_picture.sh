#!/usr/bin/env bash
# A picture of a report page for the README: bash scripts/report_picture.sh runs/quickstart/report/report.html docs/report.png
set -euo pipefail
page=$(realpath "${1:?usage: report_picture.sh REPORT.html PICTURE.png}")
picture=$(realpath -m "${2:?usage: report_picture.sh REPORT.html PICTURE.png}")
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
    echo "error: no Chromium is installed (apt-get install chromium)" >&2
    exit 2
}
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
"$browser" --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
    --disable-component-update --disable-sync --user-data-dir="$profile" --hide-scrollbars \
    --blink-settings=preferredColorScheme=1 --window-size=1180,2450 --screenshot="$picture" "file://$page" 2>/dev/null
echo "$picture"
