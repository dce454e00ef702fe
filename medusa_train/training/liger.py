"""liger-kernel's fused linear cross entropy (Triton), where it is installed and the rows are on a GPU.

The kernel keeps its logits to itself, so the rows that are ranked for the training accuracies (one in
`accuracy_stride`) are projected here once more: 1/16 of one of the loss's three products by default.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from medusa_train.errors import UserError
from medusa_train.training.fused import FusedOptions, Projection, Ranked
from medusa_train.training.losses import IGNORE, LossTerms
from medusa_train.training.softmax import TOP, count_ranks


def liger_available() -> bool:
    """liger-kernel is installed and there is a CUDA device for it."""
    return importlib.util.find_spec("liger_kernel") is not None and torch.cuda.is_available()


def check_liger() -> None:
    """A UserError with the reason, where `loss.implementation: liger` cannot work here."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError(
            "loss.implementation is liger, and liger-kernel is not installed", fix="pip install 'medusa-train[liger]'"
        )
    if not torch.cuda.is_available():
        raise UserError("liger-kernel needs a GPU", fix="loss.implementation=fused works everywhere")


def liger_cross_entropy(
    projection: Projection, labels_M: Tensor, options: FusedOptions = FusedOptions()
) -> tuple[LossTerms, Ranked]:
    """Cross entropy of a projection of one product, by Liger's kernel, as `fused_cross_entropy` gives it.

    Args:
        labels_M: int64, IGNORE where there is no target.
        options: `accuracy_stride` and `chunk_rows` are used, for the ranks.
    """
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    ((rows_MD, weight_VD),) = projection.products
    weight_VD = weight_VD.to(rows_MD.dtype)
    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE, reduction="sum", softcap=projection.softcap)
    # A scale goes into the rows and the bias.
    scaled_MD = rows_MD if projection.scale == 1.0 else rows_MD * projection.scale
    bias = None if projection.bias is None else (projection.bias * projection.scale).to(rows_MD.dtype)
    total = loss(weight_VD, scaled_MD, labels_M, bias)
    ranked = _ranks(scaled_MD, weight_VD, bias, labels_M, options)
    return LossTerms(total.float(), (labels_M != IGNORE).sum()), ranked


@torch.no_grad()
def _ranks(rows_MD: Tensor, weight_VD: Tensor, bias: Tensor | None, labels_M: Tensor, options: FusedOptions) -> Ranked:
    """Ranks of every `accuracy_stride`-th row, at most `chunk_rows` of them projected at once; no host sync."""
    hits = torch.zeros(min(TOP, len(weight_VD)), dtype=torch.int64, device=labels_M.device)
    count = torch.zeros((), dtype=torch.int64, device=labels_M.device)
    if options.accuracy_stride:
        rows_MD, labels_M = rows_MD[:: options.accuracy_stride], labels_M[:: options.accuracy_stride]
        for rows_mD, labels_m in zip(
            rows_MD.split(options.chunk_rows), labels_M.split(options.chunk_rows), strict=True
        ):
            count_ranks(nn.functional.linear(rows_mD, weight_VD, bias), labels_m, 1, hits, count)
    return Ranked(hits, count)
