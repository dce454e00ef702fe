"""Peak memory of the fused loss, by vocabulary and chunk: it grows with the chunk, not with all logits.

    python scripts/bench_loss_memory.py

Memory of the loss over 1,024 rows, by chunk (32, 128, 512): V = 32,000: 5, 10, 33 MiB; 128,000: 15, 33, 127 MiB;
256,000: 18, 65, 253 MiB, where all logits would take 0.3, 1.2 and 2.4 GiB.
"""

from __future__ import annotations

import torch
from bench_training import step_memory

from medusa_train.console import human_bytes, table
from medusa_train.training.fused import FusedOptions, Projection, fused_cross_entropy


def by_vocabulary(rows: int = 1024, size: int = 64) -> None:
    """Extra memory of the fused loss, measured, and of all logits, by formula; by vocabulary and chunk."""
    lines = []
    for vocabulary in (32_000, 128_000, 256_000):
        w = torch.randn(vocabulary, size).bfloat16()
        x = torch.randn(rows, size).bfloat16().requires_grad_()
        labels = torch.randint(0, vocabulary, (rows,))
        line = [f"{vocabulary:,}"]
        for chunk in (32, 128, 512):
            projection = Projection(((x, w),))

            def fused(projection=projection, labels=labels, chunk=chunk) -> None:
                fused_cross_entropy(projection, labels, FusedOptions(chunk))[0].sum.backward()

            fused()
            line.append(human_bytes(step_memory(fused)[0]))
        line.append(human_bytes(rows * vocabulary * (2 + 4 + 4)))
        lines.append(line)
    columns = ["V", "chunk 32", "chunk 128", "chunk 512", "all logits (bf16, fp32, gradient), by formula"]
    table(f"Extra memory of the loss over {rows:,} rows", columns, lines)


if __name__ == "__main__":
    by_vocabulary()
