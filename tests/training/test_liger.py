"""What is handed to liger-kernel, against the reference.

Liger's kernels are Triton: they compile on a GPU only, and Triton's interpreter does not run them (0.8.5 with Triton
3.9: "'float' object has no attribute 'to'"). So on a CPU a stand-in with the signature and the documented meaning of
`LigerFusedLinearCrossEntropyLoss` takes its place, and the real one's signature is compared where it can be imported.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from medusa_train.training.fused import Projection
from medusa_train.training.liger import liger_cross_entropy
from medusa_train.training.losses import IGNORE, cross_entropy_terms
from medusa_train.training.trainee import dense_logits

MODULE = "liger_kernel.transformers.fused_linear_cross_entropy"
ON_GPU = torch.cuda.is_available()


class StandIn(nn.Module):
    """sum of CE(softcap(x W^T + b)) over targets that are not ignored."""

    def __init__(self, *, ignore_index: int, reduction: str, softcap: float | None) -> None:
        super().__init__()
        self.ignore_index, self.reduction, self.softcap = ignore_index, reduction, softcap

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        assert lin_weight.dtype == _input.dtype, "the kernel multiplies what it is given"
        logits = nn.functional.linear(_input, lin_weight, bias)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return nn.functional.cross_entropy(
            logits.float(), target, ignore_index=self.ignore_index, reduction=self.reduction
        )


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device to test on: a GPU with the real kernel, or the CPU with the stand-in."""
    if ON_GPU:
        pytest.importorskip(MODULE)
        return "cuda"
    module = ModuleType(MODULE)
    module.LigerFusedLinearCrossEntropyLoss = StandIn
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return "cpu"


@pytest.mark.parametrize(("scale", "softcap", "biased"), itertools.product((1.0, 0.5), (None, 5.0), (False, True)))
def test_liger_gets_scale_softcap_and_bias_right(liger: str, scale: float, softcap: float | None, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).to(liger).requires_grad_() for shape in ((9, 16), (50, 16), 50)]
    labels = torch.randint(0, 50, (9,), generator=generator).to(liger)
    labels[::4] = IGNORE
    rows, weight, bias = leaves if biased else (*leaves[:2], None)
    used = leaves if biased else leaves[:2]
    projection = Projection(((rows, weight),), bias, scale, softcap)
    wanted = cross_entropy_terms(dense_logits(projection), labels)
    found = liger_cross_entropy(projection, labels)
    assert found.count == wanted.count == 6
    assert found.sum.item() == pytest.approx(wanted.sum.item(), rel=1e-5)
    left = torch.autograd.grad(0.3 * found.sum, used)
    right = torch.autograd.grad(0.3 * wanted.sum, used)
    for one, other in zip(left, right, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_half_precision_rows_meet_a_weight_of_their_dtype(liger: str) -> None:
    """fp32 master weights and bf16 rows (autocast): the weight is cast, its gradient arrives in fp32."""
    rows = torch.randn(4, 16, device=liger).bfloat16().requires_grad_()
    weight = torch.randn(50, 16, device=liger, requires_grad=True)
    found = liger_cross_entropy(Projection(((rows, weight),), None, 1.0, None), torch.arange(4, device=liger))
    found.sum.backward()
    assert found.sum.dtype == torch.float32 and weight.grad.dtype == torch.float32
    assert rows.grad.dtype == torch.bfloat16


def test_the_installed_liger_has_the_signature_that_is_used() -> None:
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss as Real
    except ImportError as error:
        pytest.skip(f"liger-kernel cannot be imported here: {error}")
    assert {"ignore_index", "reduction", "softcap"} <= set(inspect.signature(Real.__init__).parameters)
    assert list(inspect.signature(Real.forward).parameters)[:5] == ["self", "lin_weight", "_input", "target", "bias"]
