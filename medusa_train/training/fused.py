"""Linear projection and softmax loss in one, forward and backward, by chunks of rows: logits of one chunk live at most.

The gradient with respect to the projected rows and the weights is computed in the forward pass, as in Liger kernel's
fused linear cross entropy, because the chunk's logits are there then. A projection may be a sum of products
(`x W^T + u B^T`), so that an lm_head with a low-rank adapter is one projection too, its weight never merged.

Per chunk: three matrix products (logits, gradient of rows, gradient of weights) in the rows' dtype, softmax in fp32.
The softmax works in blocks that fit a core's cache; its normaliser goes into the rows (M x D), not the logits (M x V).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.training.losses import IGNORE, LossTerms
from medusa_train.training.softmax import TOP, count_ranks, kl_gradient, softmax_gradient

# Numbers of the piece of a weight's gradient that a CPU turns at once.
CPU_TURNED_NUMBERS = 1 << 21


@dataclass(frozen=True)
class Projection:
    """logits = softcap(scale * (sum_i x_i W_i^T + bias)).

    Attributes:
        products: (rows_MDi, weight_VDi) pairs; gradients flow to each that requires one.
        bias: [V] or None.
    """

    products: tuple[tuple[Tensor, Tensor], ...]
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class FusedOptions:
    """How the fused loss works, not what it is.

    Attributes:
        chunk_rows: rows whose logits live at once.
        accuracy_stride: every so-manieth row is ranked; 0 ranks none.
        expected_gradient: the gradient that will arrive at the sum (lambda_j / N_j), if known: then no pass over the
            weight's gradient is needed to multiply it in. Another value arriving is handled, only slower.
    """

    chunk_rows: int = 2048
    accuracy_stride: int = 0
    expected_gradient: Tensor | float | None = None


@dataclass(frozen=True)
class Ranked:
    """Exact-rank hits: `hits[r]` targets of rank r+1 among `count` ranked rows (device tensors, no sync)."""

    hits: Tensor
    count: Tensor


@torch.compiler.disable  # it computes its own gradient; a launcher's --dynamo_backend compiles all around it
def fused_cross_entropy(
    projection: Projection,
    labels_M: Tensor,
    options: FusedOptions = FusedOptions(),
    soft: tuple[Tensor, Tensor] | None = None,
) -> tuple[LossTerms, Ranked]:
    """Cross entropy of a projection without its logits; differentiable once.

    Args:
        labels_M: int64, IGNORE where there is no target.
        soft: (tokens [M, k], weights [M, k] fp32, rows summing to 1) to train on in place of the label where there is
            one; ranks are the label's all the same.
    """
    flat = [tensor for pair in projection.products for tensor in pair]
    total, hits, ranked = _FusedCrossEntropy.apply(
        labels_M, projection.bias, projection.scale, projection.softcap, options, soft, *flat
    )
    return LossTerms(total, (labels_M != IGNORE).sum()), Ranked(hits, ranked)


@torch.compiler.disable
def fused_kl(
    teacher: Projection, student: Projection, labels_M: Tensor, options: FusedOptions = FusedOptions()
) -> LossTerms:
    """KL(teacher || student) from two sets of rows, summed where the label is not IGNORE. Gradient: student only."""
    flat = [tensor for pair in (*teacher.products, *student.products) for tensor in pair]
    total = _FusedKL.apply(labels_M, teacher, student, options, student.bias, *flat)
    return LossTerms(total, (labels_M != IGNORE).sum())


class _Gradients:
    """Collects the gradients of one projection, chunk by chunk; weights' in fp32 where there are several chunks."""

    def __init__(self, flat: Sequence[Tensor], needs: Sequence[bool], bias: Tensor | None, needs_bias: bool) -> None:
        self.rows, self.weights = flat[0::2], flat[1::2]
        self.compute = [w.to(x.dtype) for x, w in zip(self.rows, self.weights, strict=True)]
        self.needs_rows, self.needs_weights = needs[0::2], needs[1::2]
        self.any = any(needs) or needs_bias
        self.row_gradients = [
            torch.empty_like(x) if n else None for x, n in zip(self.rows, self.needs_rows, strict=True)
        ]
        self.weight_gradients = [
            torch.empty(w.shape, dtype=torch.float32, device=w.device) if n else None
            for w, n in zip(self.weights, self.needs_weights, strict=True)
        ]
        self.bias = bias
        self.compute_bias = None if bias is None else bias.to(self.rows[0].dtype)
        self.bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        self.started = False

    def logits(self, chunk: slice, out: Tensor) -> Tensor:
        """Raw logits of a chunk of rows, written into `out` [m, V]."""
        for index, (x, w) in enumerate(zip(self.rows, self.compute, strict=True)):
            if index == 0 and self.compute_bias is None:
                torch.mm(x[chunk], w.T, out=out)
            elif index == 0:
                torch.addmm(self.compute_bias, x[chunk], w.T, out=out)
            else:
                out.addmm_(x[chunk], w.T)
        return out

    def add(self, chunk: slice, gradient_mV: Tensor, row_factor_m: Tensor, factor: float) -> None:
        """Adds what `factor * row_factor * gradient` at a chunk's logits gives to every input that wants a gradient."""
        factor_m = (row_factor_m * factor).to(gradient_mV.dtype)
        for index, (x, w) in enumerate(zip(self.rows, self.compute, strict=True)):
            if (into := self.row_gradients[index]) is not None:
                torch.mul(gradient_mV @ w, factor_m[:, None], out=into[chunk])
            if (total := self.weight_gradients[index]) is not None:
                _add_product(total, gradient_mV, x[chunk] * factor_m[:, None], first=not self.started)
        if self.bias_gradient is not None:
            self.bias_gradient += gradient_mV.T @ factor_m
        self.started = True

    def results(self) -> list[Tensor | None]:
        """Gradients in the order of `flat`, weights' in the weights' dtype."""
        if not self.started:  # no row at all: zeros, still connected
            for total in self.weight_gradients:
                if total is not None:
                    total.zero_()
        out: list[Tensor | None] = []
        for x_gradient, w_gradient, w in zip(self.row_gradients, self.weight_gradients, self.weights, strict=True):
            out += [x_gradient, None if w_gradient is None else w_gradient.to(w.dtype)]
        return out


def _add_product(total_VD: Tensor, gradient_mV: Tensor, rows_mD: Tensor, first: bool) -> None:
    """total = gradient^T rows at `first`, afterwards total += it; the product in the rows' dtype, the sum in fp32.

    On a CPU a half-precision product whose left operand is transposed runs at half the speed of one that is not. So
    there rows^T gradient is taken, by pieces of the vocabulary, and each piece is turned while the caches hold it.
    """
    if total_VD.device.type != "cpu" or rows_mD.dtype == torch.float32:
        product_VD = gradient_mV.T @ rows_mD
        total_VD.copy_(product_VD) if first else total_VD.add_(product_VD)
        return
    rows_Dm = rows_mD.T.contiguous()
    for start in range(0, total_VD.shape[0], step := _turned_tokens(total_VD.shape[1])):
        piece_vD = (rows_Dm @ gradient_mV[:, start : start + step]).T
        into = total_VD[start : start + step]
        into.copy_(piece_vD) if first else into.add_(piece_vD)


def _turned_tokens(size: int) -> int:
    """Tokens of a piece of about 4 MiB. Never a multiple of 64: rows a power of two apart share a cache's few sets."""
    return max(1, CPU_TURNED_NUMBERS // size // 64) * 64 + 32


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, labels_M, bias, scale, softcap, options, soft, *flat):
        needs = ctx.needs_input_grad
        state = _Gradients(flat, needs[6:], bias, needs[1])
        device, (vocabulary, _) = labels_M.device, flat[1].shape
        total = torch.zeros((), dtype=torch.float32, device=device)
        hits = torch.zeros(min(TOP, vocabulary), dtype=torch.int64, device=device)
        ranked = torch.zeros((), dtype=torch.int64, device=device)
        factor = _known_factor(options.expected_gradient, device)
        buffer = _buffer(labels_M, flat[0], vocabulary, options)
        for chunk in _chunks(labels_M.numel(), options.chunk_rows):
            labels_m = labels_M[chunk]
            valid_m = labels_m != IGNORE
            logits_mV = state.logits(chunk, buffer[: labels_m.numel()])
            if options.accuracy_stride:
                count_ranks(logits_mV, labels_m, options.accuracy_stride, hits, ranked)
            target = (labels_m.clamp(min=0)[:, None], None) if soft is None else (soft[0][chunk], soft[1][chunk])
            loss_m, norm_m = softmax_gradient(logits_mV, *target, scale, softcap, state.any)
            total += torch.where(valid_m, loss_m, 0.0).sum()
            if state.any:
                state.add(chunk, logits_mV, torch.where(valid_m, scale / norm_m, 0.0), factor)
        _keep(ctx, state, factor)
        ctx.mark_non_differentiable(hits, ranked)
        return total, hits, ranked

    @staticmethod
    def backward(ctx, gradient, _hits, _ranked):
        bias, flat = _scaled(ctx, gradient)
        return (None, bias, None, None, None, None, *flat)


class _FusedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, labels_M, teacher, student, options, bias, *flat):
        needs, split = ctx.needs_input_grad, 2 * len(teacher.products)
        taught = _Gradients(flat[:split], [False] * split, teacher.bias, False)
        state = _Gradients(flat[split:], needs[5 + split :], bias, needs[4])
        vocabulary = flat[1].shape[0]
        total = torch.zeros((), dtype=torch.float32, device=labels_M.device)
        factor = _known_factor(options.expected_gradient, labels_M.device)
        first = _buffer(labels_M, flat[0], vocabulary, options)
        second = torch.empty_like(first)
        for chunk in _chunks(labels_M.numel(), options.chunk_rows):
            valid_m = labels_M[chunk] != IGNORE
            teacher_mV = taught.logits(chunk, first[: valid_m.numel()])
            student_mV = state.logits(chunk, second[: valid_m.numel()])
            kl_m = kl_gradient(
                teacher_mV, student_mV, (teacher.scale, teacher.softcap), (student.scale, student.softcap)
            )
            total += torch.where(valid_m, kl_m, 0.0).sum()
            if state.any:
                state.add(chunk, student_mV, torch.where(valid_m, float(student.scale), 0.0), factor)
        _keep(ctx, state, factor)
        ctx.split = split
        return total

    @staticmethod
    def backward(ctx, gradient):
        bias, flat = _scaled(ctx, gradient)
        return (None, None, None, None, bias, *([None] * ctx.split), *flat)


def _known_factor(expected: Tensor | float | None, device: torch.device) -> float:
    # On an accelerator reading a tensor would wait for it; there the factor is multiplied in afterwards.
    if expected is None or (isinstance(expected, Tensor) and device.type != "cpu"):
        return 1.0
    value = float(expected)
    return value if value != 0.0 else 1.0


def _chunks(rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]


def _buffer(labels_M: Tensor, rows: Tensor, vocabulary: int, options: FusedOptions) -> Tensor:
    height = min(labels_M.numel(), options.chunk_rows)
    return torch.empty(height, vocabulary, dtype=rows.dtype, device=rows.device)


def _keep(ctx, state: _Gradients, factor: float) -> None:
    ctx.factor, ctx.bias_gradient = factor, None
    ctx.gradients = state.results() if state.any else [None] * (2 * len(state.rows))
    if state.bias_gradient is not None:
        ctx.bias_gradient = state.bias_gradient.to(state.bias.dtype)


def _scaled(ctx, gradient: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
    """The kept gradients times what arrived over what was expected; they are given away, not kept any longer."""
    kept, ctx.gradients = ctx.gradients, None
    bias, ctx.bias_gradient = ctx.bias_gradient, None
    if gradient.device.type == "cpu" and gradient.item() == ctx.factor:
        return bias, kept
    ratio = gradient / ctx.factor
    for tensor in (*kept, bias):
        if tensor is not None:
            tensor.mul_(ratio.to(tensor.dtype) if tensor.dtype != torch.float32 else ratio)
    return bias, kept
