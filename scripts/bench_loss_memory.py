"""Peak memory of the fused loss: it grows with the chunk, not with K, T and V.

    python scripts/bench_loss_memory.py

Measured: one head over 1,024 rows, chunks of 32, 128 and 512: V = 32,000: 3, 9, 33 MiB; 128,000: 9, 33, 126 MiB;
256,000: 17, 64, 251 MiB, where all logits would take 0.3, 1.2 and 2.4 GiB. V = 128,000 in chunks of 128: 32 to 35 MiB
for one head or five, over 512, 1,024 or 2,048 rows.
"""

from __future__ import annotations

import statistics

import torch
from bench_training import step_memory

from medusa_train.console import human_bytes, table
from medusa_train.training.fused import FusedOptions, Projection, fused_cross_entropy

SIZE = 64  # of a hidden row: small, so that logits are what counts


def extra(vocabulary: int, rows: int, heads: int, chunk: int) -> int:
    """Bytes that one step of `heads` losses over `rows` rows each needs, with a frozen projection; median of five."""
    weight = torch.randn(vocabulary, SIZE).bfloat16()
    rows_KMD = torch.randn(heads, rows, SIZE).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (heads, rows))

    def step() -> None:
        terms = [
            fused_cross_entropy(Projection(((x, weight),)), label, FusedOptions(chunk))[0]
            for x, label in zip(rows_KMD.unbind(), labels, strict=True)
        ]
        sum(term.sum for term in terms).backward()
        rows_KMD.grad = None

    step()
    return statistics.median(step_memory(step)[0] for _ in range(5))


def by_vocabulary(rows: int = 1024) -> None:
    """By vocabulary and chunk, beside what all logits would take."""
    lines = []
    for vocabulary in (32_000, 128_000, 256_000):
        found = [human_bytes(extra(vocabulary, rows, 1, chunk)) for chunk in (32, 128, 512)]
        lines.append([f"{vocabulary:,}", *found, human_bytes(rows * vocabulary * (2 + 4 + 4))])
    columns = ["V", "chunk 32", "chunk 128", "chunk 512", "all logits (bf16, fp32, gradient), by formula"]
    table(f"Extra memory of one head's loss over {rows:,} rows", columns, lines)


def by_rows_and_heads(vocabulary: int = 128_000, chunk: int = 128) -> None:
    """By rows and heads, the chunk left as it is."""
    lines = []
    for heads in (1, 5):
        found = [human_bytes(extra(vocabulary, rows, heads, chunk)) for rows in (512, 1024, 2048)]
        lines.append([str(heads), *found, human_bytes(heads * 2048 * vocabulary * (2 + 4 + 4))])
    columns = ["K", "512 rows", "1,024 rows", "2,048 rows", "all logits of 2,048 rows, by formula"]
    table(f"Extra memory of K heads' losses, V = {vocabulary:,}, chunks of {chunk}", columns, lines)


if __name__ == "__main__":
    by_vocabulary()
    by_rows_and_heads()
