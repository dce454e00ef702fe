"""The memory meter against allocations of known size."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORKER = """
import torch
from medusa_train.training.memory import MemoryMeter
living = torch.ones(40 << 20, dtype=torch.uint8)
freed = torch.ones(200 << 20, dtype=torch.uint8)
del freed  # before the run: not the run's
meter = MemoryMeter(torch.device("cpu"))
meter.begin([living, living.view(1024, -1)])
for size in (30, 100, 10):
    step = torch.ones(size << 20, dtype=torch.uint8)
    del step
print(meter.peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's high-water mark is Linux's")
def test_the_height_of_a_run_is_what_lives_and_its_largest_moment() -> None:
    """40 MiB live before, 100 MiB at the height: 140, whatever was freed before or is smaller."""
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(140 << 20, abs=4 << 20)
