"""The most likely token of each row, at the speed of reading the row once."""

from __future__ import annotations

from torch import Tensor

BLOCK = 128


def argmax_rows(logits_MV: Tensor) -> Tensor:
    """`logits.argmax(-1)`, ties to the lowest index too.

    On a CPU the library's argmax over a vocabulary is scalar code (23 ms for 64 rows of 49,152 in bfloat16, where the
    maxima of blocks take 2): the best block is found by its maximum, then the token in it.
    """
    size = logits_MV.shape[-1]
    if logits_MV.device.type != "cpu" or size % BLOCK or size < 16 * BLOCK:
        return logits_MV.argmax(-1)
    blocks = logits_MV.unflatten(-1, (-1, BLOCK))
    best = blocks.amax(-1).argmax(-1)
    block = blocks.gather(-2, best[..., None, None].expand(*best.shape, 1, BLOCK)).squeeze(-2)
    return best * BLOCK + block.argmax(-1)
