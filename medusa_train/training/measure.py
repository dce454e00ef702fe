"""What this machine can do: matrix products per second."""

from __future__ import annotations

import time


def matmul_flops_per_second(size: int = 1024, seconds: float = 0.3) -> float:
    """FLOPs per second of a [size, size] x [size, 8 size] bf16 product on the first accelerator, else on the CPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, 8 * size, device=device, dtype=torch.bfloat16)

    def run(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once = max(run(2) / 2, 1e-6)
    times = max(1, int(seconds / once))
    return 2 * size * size * 8 * size * times / run(times)
