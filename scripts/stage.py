"""Runs one command of the quickstart and appends its name, seconds and peak memory to a file.

python scripts/stage.py FILE NAME COMMAND [ARGUMENT ...]      exits with the command's own code
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time


def main() -> int:
    """Runs, waits (through an interruption too: the command ends by itself and says what it kept), writes one line."""
    file, name, *command = sys.argv[1:]
    started = time.monotonic()
    process = subprocess.Popen(command)
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            continue  # the terminal sent it to the command as well
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    with open(file, "a", encoding="utf-8") as stages:
        stages.write(f"{name:<16} {time.monotonic() - started:6.0f} s   peak memory {peak_mib:6,.0f} MiB\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
