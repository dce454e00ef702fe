"""The fused losses against the plain ones: value and gradient of every input, for every kind of projection."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_train.modeling.backbone import OutputProjection, output_projection
from medusa_train.modeling.heads import HeadsConfig, new_heads
from medusa_train.training import fused
from medusa_train.training.fused import FusedOptions, Projection, fused_cross_entropy, fused_kl
from medusa_train.training.losses import (
    IGNORE,
    cross_entropy_terms,
    reference_kl_terms,
    reference_medusa_terms,
    weighted_sum,
)
from medusa_train.training.projections import dense_logits
from medusa_train.training.trainee import Objective, Trainee
from tests.tiny import tiny_model

ROWS, SIZE, VOCABULARY = 37, 16, 50


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """(x, W, bias, u, B) leaves and labels; W, bias and B are fp32 masters whatever the rows are."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind).requires_grad_()

    leaves = [leaf(ROWS, SIZE, kind=dtype), leaf(VOCABULARY, SIZE), leaf(VOCABULARY), leaf(ROWS, 4, kind=dtype)]
    leaves.append(leaf(VOCABULARY, 4))
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    labels[::5] = IGNORE
    return leaves, labels


def projection(leaves: list[Tensor], scale: float, softcap: float | None) -> Projection:
    x, w, bias, u, b = leaves
    return Projection(((x, w), (u, b)), bias, scale, softcap)


def worst(left: list[Tensor], right: list[Tensor]) -> float:
    """Largest difference of any gradient, relative to that gradient's largest entry."""
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-12)).item() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("scale", "softcap", "chunk", "expected"),
    itertools.product((1.0, 0.5), (None, 5.0), (1, 8, 64), (None, 0.3, 7.0)),
)
def test_cross_entropy_equals_the_reference(
    scale: float, softcap: float | None, chunk: int, expected: float | None
) -> None:
    """fp32, 1e-5; whatever the chunk, and whatever gradient was expected (0.3 is the one that comes)."""
    leaves, labels = inputs(torch.float32)
    reference = cross_entropy_terms(dense_logits(projection(leaves, scale, softcap)), labels)
    wanted = torch.autograd.grad(0.3 * reference.sum, leaves)
    fused, _ = fused_cross_entropy(projection(leaves, scale, softcap), labels, FusedOptions(chunk, 0, expected))
    assert fused.sum.item() == pytest.approx(reference.sum.item(), rel=1e-5)
    assert fused.count == reference.count == 29
    assert worst(list(wanted), list(torch.autograd.grad(0.3 * fused.sum, leaves))) < 1e-5


@pytest.mark.parametrize(("scale", "softcap"), itertools.product((1.0, 0.5), (None, 5.0)))
def test_bf16_rows_stay_within_a_stated_bound(scale: float, softcap: float | None) -> None:
    """bf16 has 8 bits: values within 2^-9 of the reference's, gradients within 2^-6 of their largest entry."""
    leaves, labels = inputs(torch.bfloat16)
    reference = cross_entropy_terms(dense_logits(projection(leaves, scale, softcap)), labels)
    fused, _ = fused_cross_entropy(projection(leaves, scale, softcap), labels, FusedOptions(8))
    assert fused.sum.item() == pytest.approx(reference.sum.item(), rel=2**-9)
    wanted, found = (torch.autograd.grad(term.sum, leaves) for term in (reference, fused))
    assert worst([g.float() for g in wanted], [g.float() for g in found]) < 2**-6


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_weight_s_gradient_in_pieces_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """bf16 on a CPU, four pieces with a short last one: the gradient that float64 has, to bf16's 8 bits a product."""
    vocabulary, size, rows = 300, 8, 20
    monkeypatch.setattr(fused, "CPU_TURNED_NUMBERS", 64 * size)
    assert [fused._turned_tokens(n) for n in (size, 10**6)] == [96, 96] and fused._turned_tokens(1) == 64 * 8 + 32
    torch.manual_seed(0)
    x, w = torch.randn(rows, size).bfloat16(), torch.randn(vocabulary, size, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows,))
    fused_cross_entropy(Projection(((x, w),)), labels, FusedOptions(chunk))[0].sum.backward()
    oracle = w.detach().bfloat16().double().requires_grad_()
    torch.nn.functional.cross_entropy(x.double() @ oracle.T, labels, reduction="sum").backward()
    assert (w.grad - oracle.grad).abs().max() < 2**-6 * oracle.grad.abs().max()
    # Every token got its own row: the rows' order along the vocabulary is the oracle's.
    assert torch.nn.functional.cosine_similarity(w.grad, oracle.grad.float(), dim=1).min() > 0.99


def test_fp16_gradients_do_not_overflow_on_a_large_vocabulary() -> None:
    """softmax - one_hot times its norm reaches V = 70,000 on flat logits; fp16 ends at 65,504."""
    x = torch.zeros(4, 8, dtype=torch.float16, requires_grad=True)
    w = torch.randn(70_000, 8, generator=torch.Generator().manual_seed(0))
    fused, _ = fused_cross_entropy(Projection(((x, w),)), torch.tensor([1, 2, 3, 4]))
    (gradient,) = torch.autograd.grad(fused.sum, [x])
    assert gradient.isfinite().all()
    # At flat logits the gradient is mean(W) - W[label].
    assert torch.allclose(gradient.float(), w.mean(0) - w[[1, 2, 3, 4]], atol=2e-2)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kl_equals_the_reference(softcap: float | None, dtype: torch.dtype) -> None:
    leaves, labels = inputs(dtype)
    taught, _ = inputs(dtype, seed=1)
    teacher = Projection(((taught[0].detach(), leaves[1].detach()),), None, 1.0, softcap)
    student = projection(leaves, 1.0, softcap)
    reference = reference_kl_terms(dense_logits(teacher), dense_logits(student), labels)
    fused = fused_kl(teacher, student, labels, FusedOptions(8))
    bound, gradient_bound = (1e-5, 1e-5) if dtype == torch.float32 else (2**-8, 2**-6)
    assert fused.sum.item() == pytest.approx(reference.sum.item(), rel=bound)
    wanted, found = (torch.autograd.grad(term.sum, leaves) for term in (reference, fused))
    assert worst([g.float() for g in wanted], [g.float() for g in found]) < gradient_bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kl_of_equal_rows_is_exactly_zero_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    """An adapter with B = 0 adds exact zeros: the student is the teacher, bit for bit."""
    leaves, labels = inputs(dtype)
    x, w, bias, u, b = leaves
    zero = torch.zeros_like(b, requires_grad=True)
    teacher = Projection(((x.detach(), w.detach()),), bias.detach())
    fused = fused_kl(teacher, Projection(((x, w.detach()), (u, zero)), bias.detach()), labels, FusedOptions(8))
    assert fused.sum.item() == 0.0
    gradients = torch.autograd.grad(fused.sum, [x, zero])
    assert all(g.float().abs().max() < 1e-6 for g in gradients)


def test_exact_ranks_by_hand() -> None:
    """Row r's logits are 9..0; label 3 of row 0 has rank 4, label 0 of row 1 rank 1, the third is ignored."""
    w = torch.arange(9, -1, -1.0)[:, None]
    x = torch.ones(4, 1)
    _, ranked = fused_cross_entropy(Projection(((x, w),)), torch.tensor([3, 0, IGNORE, 9]), FusedOptions(2, 1))
    assert ranked.hits.tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert ranked.count.item() == 3


def test_no_row_gives_zero_connected_to_every_input() -> None:
    """An empty selection on one rank must still take part in the gradients, or DDP hangs."""
    w = torch.randn(5, 3, requires_grad=True)
    x = torch.empty(0, 3, requires_grad=True)
    fused, _ = fused_cross_entropy(Projection(((x, w),)), torch.empty(0, dtype=torch.int64))
    fused.sum.backward()
    assert fused.sum.item() == 0.0
    assert w.grad is not None and w.grad.abs().sum() == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(2, 60), st.integers(1, 50), st.integers(0, 2**31))
def test_any_shape_equals_the_reference(rows: int, vocabulary: int, chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 7, generator=generator, requires_grad=True)
    w = torch.randn(vocabulary, 7, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.3] = IGNORE
    one = Projection(((x, w),))
    reference = cross_entropy_terms(dense_logits(one), labels).sum
    fused = fused_cross_entropy(one, labels, FusedOptions(chunk))[0].sum
    assert fused.item() == pytest.approx(reference.item(), rel=1e-5, abs=1e-5)
    wanted, found = (torch.autograd.grad(total, [x, w]) for total in (reference, fused))
    for left, right in zip(wanted, found, strict=True):
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-5)


# Shared heads without a block have nothing to train: recipes refuse them.
CASES = [
    (family, contract, layers)
    for family, contract, layers in itertools.product(
        ("llama", "llama-tied", "gemma2", "granite", "phi"), ("own", "shared", "reduced"), range(4)
    )
    if (contract, layers) != ("shared", 0)
]


@pytest.mark.parametrize(("family", "contract", "layers"), CASES)
def test_the_trainee_s_losses_and_gradients_are_the_reference_s(family: str, contract: str, layers: int) -> None:
    """Own, shared and reduced heads of 0 to 3 blocks; tied, soft-capped (gemma2), scaled (granite), with bias (phi)."""
    model = tiny_model(family).requires_grad_(False)
    base = output_projection(model)
    token_map = torch.arange(1, 64, 2) if contract == "reduced" else None
    if family == "phi":  # it starts at zero, where leaving it out would not show
        torch.nn.init.normal_(base.bias)
    bias = contract != "shared" and base.bias is not None
    size = None if token_map is None else len(token_map)
    config = HeadsConfig(contract, 3, layers, base.hidden_size, base.vocab_size, size, bias)
    heads = new_heads(config, base, token_map, dtype=torch.float32)
    for parameter in heads.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    hidden = torch.randn(23, base.hidden_size)
    labels = torch.randint(0, config.projection_rows, (3, 23))
    labels[:, ::4] = IGNORE
    counts, weights = (labels != IGNORE).sum(1), [0.8, 0.64, 0.512]
    reference = weighted_sum(reference_medusa_terms(heads, base, hidden, labels), weights, counts)
    trainee = Trainee(heads, base, Objective("heads_only", 3, "fused", FusedOptions(5, 1)), None)
    fused = (trainee(labels, hidden=hidden)["sums"] * torch.tensor(weights) / counts).sum()
    parameters = list(heads.parameters())
    assert fused.item() == pytest.approx(reference.item(), rel=1e-5)
    wanted, found = (torch.autograd.grad(total, parameters) for total in (reference, fused))
    assert worst(list(wanted), list(found)) < 1e-5


def test_an_adapter_on_the_lm_head_is_seen_by_shared_heads() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.0))
    base = output_projection(model)
    torch.nn.init.normal_(base.module.lora_B["default"].weight)
    assert isinstance(base, OutputProjection)
    from medusa_train.training.projections import projection_of

    rows = torch.randn(6, base.hidden_size)
    assert torch.allclose(dense_logits(projection_of(base, rows)), base(rows), atol=1e-5)
    with model.disable_adapter():
        assert torch.allclose(dense_logits(projection_of(base, rows)), base(rows), atol=1e-5)
