"""Softmax losses on one chunk of logits, in place: value and gradient in fp32, in blocks that fit a core's cache.

Shape letters: m rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.training.losses import IGNORE

TOP = 10  # exact ranks 1..10 are counted
# fp32 numbers of a softmax block on the CPU: 1 MiB, half of a common second-level cache.
CPU_BLOCK_NUMBERS = 1 << 18


def _blocks(rows: int, vocabulary: int, device: torch.device) -> list[slice]:
    size = max(1, CPU_BLOCK_NUMBERS // vocabulary) * torch.get_num_threads() if device.type == "cpu" else rows
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))]


def softmax_gradient(
    logits_mV: Tensor,
    labels_mk: Tensor,
    weights_mk: Tensor | None,
    scale: float,
    softcap: float | None,
    want_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Turns logits into `norm * (softmax - target)` in place and returns (loss_m, norm_m), both fp32.

    The target puts `weights_mk` (rows that sum to 1; None: 1) on the tokens `labels_mk`: one label, or a few soft ones.

    With a soft-cap its derivative is multiplied in; `scale` is left to the caller's row factor. fp16 cannot hold
    `norm * ...` (norm grows to V), so there the gradient is divided right away and norm is 1.
    """
    rows, vocabulary = logits_mV.shape
    largest_m1, norms = (logits_mV.new_empty(shape, dtype=torch.float32) for shape in ((rows, 1), (rows,)))
    at_label = logits_mV.gather(1, labels_mk).float()
    _apply_cap(at_label, scale, softcap, False)
    at_label = at_label.squeeze(1) if weights_mk is None else (at_label * weights_mk).sum(1)
    blocks = _blocks(rows, vocabulary, logits_mV.device)
    scratch = None
    if blocks and logits_mV.dtype != torch.float32:
        scratch = logits_mV.new_empty(blocks[0].stop, vocabulary, dtype=torch.float32)
    # As few calls per block as can be: there are hundreds of blocks to a step.
    for block in blocks:
        source, norm = logits_mV[block], norms[block]
        work = source if scratch is None else scratch[: source.shape[0]].copy_(source)
        slope = _apply_cap(work, scale, softcap, want_gradient)
        largest = torch.amax(work, -1, keepdim=True, out=largest_m1[block])
        torch.sum(work.sub_(largest).exp_(), -1, out=norm)
        if not want_gradient:
            continue
        wanted = norm.neg()[:, None]
        work.scatter_add_(1, labels_mk[block], wanted if weights_mk is None else weights_mk[block] * wanted)
        if slope is not None:
            work.mul_(slope)
        if logits_mV.dtype == torch.float16:
            work.div_(norm[:, None])
        if scratch is not None:
            source.copy_(work)
    losses = norms.log() + largest_m1.squeeze(1) - at_label
    return losses, norms.fill_(1.0) if logits_mV.dtype == torch.float16 else norms


def _apply_cap(work: Tensor, scale: float, softcap: float | None, want_slope: bool) -> Tensor | None:
    """scale and soft-cap in place; returns d capped / d scaled where asked and where there is a cap."""
    if scale != 1.0:
        work.mul_(scale)
    if softcap is None:
        return None
    work.div_(softcap).tanh_()
    slope = 1.0 - work * work if want_slope else None
    work.mul_(softcap)
    return slope


def kl_gradient(
    teacher_mV: Tensor,
    student_mV: Tensor,
    teacher: tuple[float, float | None],
    student: tuple[float, float | None],
) -> Tensor:
    """kl_m in fp32; `student_mV` becomes softmax(student) - softmax(teacher), soft-cap's derivative included.

    Args:
        teacher, student: (scale, soft-cap) of each side.
    """
    rows, vocabulary = student_mV.shape
    out = student_mV.new_empty(rows, dtype=torch.float32)
    for block in _blocks(rows, vocabulary, student_mV.device):
        taught, learned = teacher_mV[block].float(), student_mV[block].float()
        _apply_cap(taught, *teacher, False)
        slope = _apply_cap(learned, *student, True)
        # log p = x - logsumexp(x); both sides go through the same operations, so equal rows give exactly 0.
        difference = taught - learned
        teacher_norm, student_norm = taught.logsumexp(-1, keepdim=True), learned.logsumexp(-1, keepdim=True)
        probability = taught.sub_(teacher_norm).exp_()
        mean = (probability * difference).sum(-1)
        out[block] = mean - (teacher_norm - student_norm).squeeze(1)
        gradient = learned.sub_(student_norm).exp_().sub_(probability)
        student_mV[block] = gradient if slope is None else gradient.mul_(slope)
    return out


def count_ranks(logits_mV: Tensor, labels_m: Tensor, stride: int, hits: Tensor, ranked: Tensor) -> None:
    """Adds exact-rank hits of every `stride`-th row; scale and soft-cap keep the order, so raw logits do."""
    labels = labels_m[::stride]
    top = logits_mV[::stride].topk(hits.numel(), dim=-1).indices
    hits += (top == labels[:, None]).sum(0)
    ranked += (labels != IGNORE).sum()
