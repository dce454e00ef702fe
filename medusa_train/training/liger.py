"""liger-kernel's fused linear cross entropy (Triton), where it is installed and the rows are on a GPU."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from medusa_train.errors import UserError
from medusa_train.training.fused import Projection
from medusa_train.training.losses import IGNORE, LossTerms


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


def liger_cross_entropy(projection: Projection, labels_M: Tensor) -> LossTerms:
    """Cross entropy of a projection of one product, by Liger's kernel; a scale goes into the rows."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    ((rows_MD, weight_VD),) = projection.products
    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE, reduction="sum", softcap=projection.softcap)
    if projection.scale != 1.0:
        rows_MD = rows_MD * projection.scale
    bias = None if projection.bias is None else (projection.bias * projection.scale).to(rows_MD.dtype)
    total = loss(weight_VD.to(rows_MD.dtype), rows_MD, labels_M, bias)
    return LossTerms(total.float(), (labels_M != IGNORE).sum())
