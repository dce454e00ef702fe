"""Joint and self-distilled steps against plain torch on full logits: value and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_train.modeling.backbone import output_projection
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, new_heads
from medusa_train.training.fused import FusedOptions
from medusa_train.training.losses import IGNORE, channel_labels, inverse_token_map, supervised_rows
from medusa_train.training.trainee import Objective, Trainee
from tests.tiny import tiny_model

B, T, HEADS = 2, 12, 3
# lambda_c: 1 for the lm channel, lambda_0 (0.8, 0.64, 0.512) for the heads, lambda_0 = 0.2.
WEIGHTS = [1.0, 0.16, 0.128, 0.1024]
ALL_LINEAR = ["q_proj", "v_proj", "down_proj", "lm_head"]


def batch() -> tuple[Tensor, Tensor]:
    """Token ids and a mask with gaps, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(3, 64, (B, T), generator=generator)
    mask_BT = (torch.rand(B, T, generator=generator) < 0.6).long()
    return ids_BT, mask_BT


def model_of(family: str) -> nn.Module:
    """A tiny model whose lm_head's bias, where it has one, is not zero as it starts."""
    model = tiny_model(family)
    if (bias := output_projection(model).bias) is not None:
        bias.data = torch.randn(bias.shape, generator=torch.Generator().manual_seed(5))
    return model


def heads_over(model: nn.Module, contract: str, layers: int = 1) -> MedusaHeads:
    """Heads with random blocks and projections that are no longer the lm_head's."""
    base = output_projection(model)
    token_map = torch.arange(1, 64, 2) if contract == "reduced" else None
    bias = contract != "shared" and base.bias is not None
    size = None if token_map is None else len(token_map)
    config = HeadsConfig(contract, HEADS, layers, base.hidden_size, base.vocab_size, size, bias)
    heads = new_heads(config, base, token_map, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return heads


def with_lora(model: nn.Module) -> nn.Module:
    """LoRA on some layers and the lm_head, its B not zero: otherwise A would have no gradient."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, lora_dropout=0.0, target_modules=ALL_LINEAR))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def plain_head_logits(model: nn.Module, heads: MedusaHeads, hidden_BTD: Tensor, head: int) -> Tensor:
    """[B, T, V] by the formula, through the modules' own forwards and the model's own lm_head."""
    z = hidden_BTD
    for block in heads.blocks[head]:
        z = z + F.silu(z @ block.linear.weight.T + block.linear.bias)
    lm_head = model.get_output_embeddings()
    logits = lm_head(z) if heads.projections is None else heads.projections[head](z)
    logits = logits / getattr(model.config, "logits_scaling", 1.0)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def plain_targets(ids_BT: Tensor, mask_BT: Tensor, ahead: int) -> list[tuple[int, int, int]]:
    """(line, position, token) for every supervised token that lies `ahead` of a position."""
    return [
        (line, at - ahead, int(ids_BT[line, at])) for line in range(B) for at in range(ahead, T) if mask_BT[line, at]
    ]


def plain_loss(model: nn.Module, heads: MedusaHeads, policy: str) -> Tensor:
    """The policy's loss from full logits [B, T, V]: sums over targets / their number, weighted."""
    ids_BT, mask_BT = batch()
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    output = plain(input_ids=ids_BT, output_hidden_states=True)
    total = torch.zeros(())
    targets = plain_targets(ids_BT, mask_BT, 1)
    lines, positions, tokens = (torch.tensor(part) for part in zip(*targets, strict=True))
    student = output.logits[lines, positions]
    if policy == "self_distill":
        with model.disable_adapter(), torch.no_grad():
            teacher = plain(input_ids=ids_BT).logits[lines, positions]
        total = total + F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="sum") / len(targets)
    else:
        total = total + F.cross_entropy(student, tokens)
    for head in range(HEADS):
        targets = plain_targets(ids_BT, mask_BT, head + 2)
        lines, positions, tokens = (torch.tensor(part) for part in zip(*targets, strict=True))
        logits = plain_head_logits(plain, heads, output.hidden_states[-1], head)[lines, positions]
        total = total + WEIGHTS[head + 1] * F.cross_entropy(logits, tokens)
    return total


def trainee_loss(trainee: Trainee, known: bool) -> Tensor:
    """The same by the trainee, on the same batch; `known`: it is told what the sums will be multiplied by."""
    ids_BT, mask_BT = batch()
    labels_CBT = channel_labels(ids_BT, mask_BT, torch.zeros_like(ids_BT), trainee.objective.shifts)
    rows_M, labels_CM = supervised_rows(labels_CBT)
    scale_C = torch.tensor(WEIGHTS) / (labels_CM != IGNORE).sum(1)
    sums = trainee(labels_CM, rows=rows_M, input_ids=ids_BT, expected=scale_C if known else None)["sums"]
    return (sums * scale_C).sum()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Of every trainable parameter, taken away from it; each has one, and it is not all zero."""
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    missing = [name for name, gradient in found.items() if gradient is None or not gradient.abs().max() > 0]
    assert not missing, f"without a gradient: {missing}"
    module.zero_grad()
    return found


STEPS = [
    ("joint", "llama-tied", "shared", False), ("joint", "llama-tied", "own", False),
    ("joint", "gemma2", "shared", False), ("joint", "phi", "shared", False),
    ("joint", "llama", "shared", True), ("joint", "llama", "own", True), ("joint", "gemma2", "shared", True),
    ("self_distill", "llama", "shared", True), ("self_distill", "llama", "own", True),
    ("self_distill", "gemma2", "shared", True),
]  # fmt: skip


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("policy", "family", "contract", "lora"), STEPS)
def test_a_step_that_trains_the_backbone_equals_plain_torch(
    policy: str, family: str, contract: str, lora: bool, known: bool
) -> None:
    """fp32, 1e-5 of each gradient's largest entry.

    A tied lm_head collects from the embedding, the lm channel and three shared heads; a LoRA on the lm_head likewise.
    """
    model = model_of(family)
    heads = heads_over(model, contract)
    model = with_lora(model) if lora else model
    objective = Objective(policy, HEADS, "fused", FusedOptions(5, 1))
    trainee = Trainee(heads, output_projection(model), objective, model).train()
    names = [name for name, parameter in trainee.named_parameters() if parameter.requires_grad]
    assert any("lora_B" in name and "lm_head" in name for name in names) == lora
    wanted = plain_loss(model, heads, policy)
    wanted.backward()
    right = gradients(trainee)
    found = trainee_loss(trainee, known)
    found.backward()
    left = gradients(trainee)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    for name, gradient in right.items():
        assert (gradient - left[name]).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("contract", ["own", "shared", "reduced"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "phi"])
def test_heads_under_bf16_autocast_stay_within_a_stated_bound(family: str, contract: str) -> None:
    """Against fp32 throughout, soft-capped, scaled and biased too.

    bf16 has 8 bits, and hidden rows, blocks, weights and logits are rounded to it: losses within 2^-9, gradients within
    2^-5 of their largest entry (several roundings follow each other).
    """
    model = model_of(family).requires_grad_(False)
    heads = heads_over(model, contract, 2)
    base = output_projection(model)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, base.hidden_size, generator=generator)
    labels = torch.randint(0, heads.config.projection_rows, (HEADS, 40), generator=generator)
    plain = sum(F.cross_entropy(plain_head_logits(model, heads, hidden, head), labels[head]) for head in range(HEADS))
    plain.backward()
    right = gradients(heads)
    trainee = Trainee(heads, base, Objective("heads_only", HEADS, "fused", FusedOptions(7, 1)), None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = trainee(labels, hidden=hidden)["sums"].sum() / 40
    found.backward()
    assert found.item() == pytest.approx(plain.item(), rel=2**-9)
    for name, gradient in gradients(heads).items():
        assert gradient.dtype == torch.float32
        assert (gradient - right[name]).abs().max() <= 2**-5 * right[name].abs().max(), name


def test_the_reference_keeps_fp32_logits_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and weights are bf16, what is made of them is not: CE and KL equal float64's on the same bf16 numbers."""
    model = with_lora(tiny_model("llama"))
    heads = heads_over(model, "own", layers=0)
    trainee = Trainee(heads, output_projection(model), Objective("self_distill", HEADS, "reference"), model)
    generator = torch.Generator().manual_seed(4)
    teacher, student = (torch.randn(20, 32, generator=generator).bfloat16() for _ in range(2))
    labels = torch.randint(0, 64, (1 + HEADS, 20), generator=generator)
    rows = iter([teacher, student])
    monkeypatch.setattr(trainee, "_rows", lambda *_: (next(rows), None))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = trainee(labels, input_ids=torch.zeros(1, 1))["sums"]
    lora = trainee.projection.module

    def rounded(weight: Tensor) -> Tensor:
        return weight.detach().bfloat16().double()

    narrow = (student @ lora.lora_A["default"].weight.bfloat16().T) * 3.0  # alpha / r, still in bf16
    taught = teacher.double() @ rounded(lora.weight).T
    learned = student.double() @ rounded(lora.weight).T + narrow.double() @ rounded(lora.lora_B["default"].weight).T
    kl = F.kl_div(learned.log_softmax(-1), taught.softmax(-1), reduction="sum")
    assert sums[0].item() == pytest.approx(kl.item(), rel=1e-5)
    for head in range(HEADS):
        logits = student.double() @ rounded(heads.projections[head].weight).T
        wanted = F.cross_entropy(logits, labels[head + 1], reduction="sum")
        assert sums[head + 1].item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("contract", ["own", "shared", "reduced"])
def test_medusa_1_gives_no_gradient_to_the_backbone(contract: str) -> None:
    """Only the lm_head that shared heads go through has to be frozen; everything below runs without a graph."""
    model = tiny_model("llama")
    output_projection(model).module.requires_grad_(False)
    heads = heads_over(model, contract)
    inverse = None if heads.token_map is None else inverse_token_map(heads.token_map, 64)
    trainee = Trainee(heads, output_projection(model), Objective("heads_only", HEADS, "fused", FusedOptions(5)), model)
    ids_BT, mask_BT = batch()
    rows_M, labels_CM = supervised_rows(channel_labels(ids_BT, mask_BT, torch.zeros_like(ids_BT), (2, 3, 4), inverse))
    trainee.train()(labels_CM, rows=rows_M, input_ids=ids_BT)["sums"].sum().backward()
    assert gradients(heads)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trainable) > 10
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []
