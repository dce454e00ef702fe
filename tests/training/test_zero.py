"""What a DeepSpeed checkpoint holds of a module, and what may miss in one; no DeepSpeed needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medusa_train.errors import UserError
from medusa_train.training.state import trainable_tensors
from medusa_train.training.zero import leave_frozen_out


def module_of(frozen: bool = True) -> nn.Module:
    """A backbone with a tied lm_head and a buffer, and a head with two names for one weight."""
    model = nn.Module()
    model.backbone, model.head = nn.Module(), nn.Module()
    model.backbone.embed, model.backbone.lm_head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    model.backbone.lm_head.weight = model.backbone.embed.weight
    model.backbone.register_buffer("scale", torch.ones(1))
    model.backbone.requires_grad_(not frozen)
    model.head.one, model.head.two = nn.Linear(3, 3), nn.Linear(3, 3)
    model.head.two.weight = model.head.one.weight
    leave_frozen_out(model)
    return model


HEAD = {"head.one.weight", "head.one.bias", "head.two.weight", "head.two.bias"}


def test_the_state_of_a_module_is_its_trainable_parameters_under_all_their_names() -> None:
    assert set(module_of().state_dict()) == HEAD
    assert set(module_of(frozen=False).state_dict()) == HEAD | {"backbone.embed.weight", "backbone.lm_head.weight"}
    assert set(trainable_tensors(module_of())) == HEAD - {"head.two.weight"}


def test_it_loads_strictly_without_the_frozen_backbone_which_stays() -> None:
    saved, model = module_of().state_dict(), module_of()
    backbone = model.backbone.embed.weight.clone()
    model.load_state_dict(saved, strict=True)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.backbone.lm_head.weight, backbone)
    # What older versions wrote holds the backbone as well.
    model.load_state_dict({**saved, "backbone.embed.weight": backbone, "backbone.scale": torch.ones(1)}, strict=True)


@pytest.mark.parametrize("name", sorted(HEAD))
def test_a_trainable_name_that_misses_is_an_error(name: str) -> None:
    saved = module_of().state_dict()
    del saved[name]
    with pytest.raises(UserError, match=rf"does not fit: \['{name}'\] on one side only"):
        module_of().load_state_dict(saved, strict=True)


def test_a_name_that_the_module_does_not_have_is_an_error() -> None:
    with pytest.raises(UserError, match=r"does not fit: \['head.three.bias'\]"):
        module_of().load_state_dict({**module_of().state_dict(), "head.three.bias": torch.ones(3)}, strict=True)
