"""Memory of a CPU process that allocates and frees the same large buffers step after step."""

from __future__ import annotations

import ctypes
import os
import sys

# Numbers of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Lets freed buffers stay with the process, on huge pages, instead of being mapped and zeroed anew each time.

    By default glibc maps every buffer above a few MiB on its own and gives it back when freed; the kernel then zeroes
    its pages again at the next step. A training step on a CPU spent a fifth to a third of its time on that
    (scripts/bench_training.py). Must run before torch is loaded, which reads its variable once. What the environment
    says already (THP_MEM_ALLOC_ENABLE, MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_) is left as it is; so is all on
    systems without glibc.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl has no mallopt
        return
    for name, option in (
        ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD),
        ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD),
    ):
        if name not in os.environ:
            mallopt(option, _LARGEST)


def give_back_freed() -> None:
    """Gives freed memory back to the system now (glibc's malloc_trim; nothing elsewhere)."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
