"""What is handed to liger-kernel, against the reference.

Liger's kernels are Triton: they compile on a GPU only, and Triton's interpreter does not run them (0.8.5 with Triton
3.9: "'float' object has no attribute 'to'"). So on a CPU a stand-in with the signature and the documented meaning of
`LigerFusedLinearCrossEntropyLoss` takes its place, and the real one's signature is compared where it can be imported.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from medusa_train.config.load import parse_recipe
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import OutputProjection
from medusa_train.modeling.heads import HeadsConfig, new_heads
from medusa_train.training.fused import FusedOptions, Projection
from medusa_train.training.liger import liger_cross_entropy
from medusa_train.training.losses import IGNORE, cross_entropy_terms
from medusa_train.training.prepare import objective_of
from medusa_train.training.projections import dense_logits
from medusa_train.training.trainee import Objective, Trainee

MODULE = "liger_kernel.transformers.fused_linear_cross_entropy"
ON_GPU = torch.cuda.is_available()


calls: list[tuple[int, ...]] = []  # shapes of the rows that stand-ins were given


class StandIn(nn.Module):
    """sum of CE(softcap(x W^T + b)) over targets that are not ignored."""

    def __init__(self, *, ignore_index: int, reduction: str, softcap: float | None) -> None:
        super().__init__()
        self.ignore_index, self.reduction, self.softcap = ignore_index, reduction, softcap

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(tuple(_input.shape))
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
    install(monkeypatch)
    return "cpu"


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in where liger-kernel would be imported from."""
    calls.clear()
    for name in ("liger_kernel", "liger_kernel.transformers", MODULE):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules[MODULE].LigerFusedLinearCrossEntropyLoss = StandIn


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if liger-kernel were not installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)


def objective(implementation: str, device: str, **loss: object) -> Objective:
    data = {"base": {"name": "x"}, "data": {"train": ["x"]}, "output_dir": "x", "policy": "heads_only"}
    return objective_of(
        parse_recipe({**data, "loss": {"implementation": implementation, **loss}}), torch.device(device)
    )


@pytest.mark.parametrize(
    ("installed", "gpu", "device", "chosen"),
    [(True, True, "cuda", "liger"), (True, True, "cpu", "fused"), (True, False, "cpu", "fused"),
     (False, True, "cuda", "fused"), (False, False, "cpu", "fused")],
)  # fmt: skip
def test_auto_takes_liger_where_it_is_installed_and_the_run_is_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, installed: bool, gpu: bool, device: str, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    (install if installed else uninstall)(monkeypatch)
    found = objective("auto", device, chunk_rows=7, accuracy_stride=5)
    assert found.implementation == chosen
    assert (found.options.chunk_rows, found.options.accuracy_stride) == (7, 5)


def test_liger_by_name_is_refused_with_the_reason_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    install(monkeypatch)
    with pytest.raises(UserError, match="needs a GPU"):
        objective("liger", "cpu")
    uninstall(monkeypatch)
    with pytest.raises(UserError, match="not installed"):
        objective("liger", "cpu")


ROWS, SIZE, VOCABULARY, STRIDE = 37, 8, 50, 4


def trainee_of(implementation: str, lm_head: nn.Module) -> tuple[Trainee, Tensor, Tensor]:
    """A trainee of three shared heads over `lm_head`, hidden rows and labels."""
    torch.manual_seed(0)
    base = OutputProjection(lm_head, scale=0.5, softcap=5.0)
    heads = new_heads(HeadsConfig("shared", 3, 1, SIZE, VOCABULARY), base, dtype=torch.float32)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3)
    labels = torch.randint(0, VOCABULARY, (3, ROWS))
    labels[:, ::6] = IGNORE
    # More rows are ranked (10) than go through a projection at once (3).
    objective = Objective("heads_only", 3, implementation, FusedOptions(3, STRIDE))
    return Trainee(heads, base, objective, None), torch.randn(ROWS, SIZE), labels


@pytest.mark.parametrize("biased", [False, True])
def test_the_trainee_hands_every_head_to_liger_and_ranks_one_row_in_the_stride(
    monkeypatch: pytest.MonkeyPatch, biased: bool
) -> None:
    install(monkeypatch)
    torch.manual_seed(3)
    trainee, hidden, labels = trainee_of("liger", nn.Linear(SIZE, VOCABULARY, bias=biased))
    found = trainee(labels, hidden=hidden)
    assert calls == [(ROWS, SIZE)] * 3
    for head in range(3):
        z = hidden.double()
        block = trainee.heads.blocks[head][0].linear.double()
        z = z + nn.functional.silu(block(z))
        logits = 5.0 * torch.tanh(trainee.projection.module.double()(z) * 0.5 / 5.0)
        hits = [0] * 10
        for row in range(0, ROWS, STRIDE):
            if (label := int(labels[head, row])) != IGNORE:
                rank = int((logits[row] > logits[row, label]).sum())
                if rank < 10:
                    hits[rank] += 1
        assert found["hits"][head].tolist() == hits and sum(hits) > 0
        assert found["ranked"][head].item() == sum(int(labels[head, row]) != IGNORE for row in range(0, ROWS, STRIDE))


def test_what_liger_cannot_do_goes_to_the_fused_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft targets, and an lm_head that carries an adapter: equal to `fused`, the kernel never called."""
    from peft import LoraConfig, get_peft_model

    install(monkeypatch)
    torch.manual_seed(3)
    adapted = get_peft_model(nn.Sequential(nn.Linear(SIZE, VOCABULARY)), LoraConfig(r=2, target_modules=["0"]))
    for lm_head, soft in (
        (nn.Linear(SIZE, VOCABULARY), {"soft_tokens": torch.randint(0, VOCABULARY, (3, ROWS, 2)),
                                       "soft_weights": torch.full((3, ROWS, 2), 0.5)}),
        (adapted.base_model.model[0], {}),
    ):  # fmt: skip
        (one, hidden, labels), (other, *_) = trainee_of("liger", lm_head), trainee_of("fused", lm_head)
        left, right = (trainee(labels, hidden=hidden, **soft) for trainee in (one, other))
        assert torch.equal(left["sums"], right["sums"]) and torch.equal(left["hits"], right["hits"])
    assert calls == []


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
    found, _ = liger_cross_entropy(projection, labels)
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
    found, _ = liger_cross_entropy(Projection(((rows, weight),), None, 1.0, None), torch.arange(4, device=liger))
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
