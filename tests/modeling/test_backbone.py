"""Backbones: the projection is the model's own, packed documents stay apart, unknown families are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_train.errors import UserError
from medusa_train.modeling.backbone import check_supported, hidden_states, output_projection
from medusa_train.modeling.masks import attention_windows, packed_attention_mask
from tests.tiny import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_projection_of_the_hidden_states(family):
    model = tiny_model(family)
    check_supported(model)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(output_projection(model)(hidden_states(model, ids)), model(ids).logits)


def test_scale_and_softcap_come_from_the_config():
    assert output_projection(tiny_model("gemma2")).softcap == 30.0
    assert output_projection(tiny_model("granite")).scale == 0.5
    assert output_projection(tiny_model("phi")).bias is not None
    plain = output_projection(tiny_model("llama"))
    assert (plain.scale, plain.softcap, plain.bias) == (1.0, None, None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_equal_documents_alone(family, attention):
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("sdpa has no soft-cap inside attention; load_base chooses eager for such models")
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(2)
    lengths = [41, 1, 30]  # past the sliding window of 24, and a document of one token
    documents = [torch.randint(3, 60, (1, n), generator=generator) for n in lengths]
    ids = torch.cat([*documents, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    document_ids = torch.tensor([[d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * 4])
    positions = torch.tensor([[p for n in lengths for p in range(n)] + [0, 1, 2, 3]])
    mask = packed_attention_mask(model, document_ids, positions, torch.float32)
    with torch.no_grad():
        packed = hidden_states(model, ids, attention_mask=mask, position_ids_BT=positions)
        alone = torch.cat([hidden_states(model, document) for document in documents], dim=1)
    assert torch.allclose(packed[:, : sum(lengths)], alone, atol=2e-5)
    assert torch.isfinite(packed).all()


def test_windows_by_layer_type():
    assert attention_windows(tiny_model("mistral")) == {"sliding_attention": 24}
    assert attention_windows(tiny_model("llama")) == {"full_attention": None}
    assert attention_windows(tiny_model("gemma3")) == {"sliding_attention": 24, "full_attention": None}


def from_config(model_type, **arguments):
    config = AutoConfig.for_model(
        model_type, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **arguments
    )
    return AutoModelForCausalLM.from_config(config)


def test_recurrent_models_are_refused_by_name():
    model = from_config("mamba", hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UserError, match=r"MambaForCausalLM.*recurrent state"):
        check_supported(model)


def test_models_without_positions_are_refused_by_name():
    model = from_config("bloom", hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(UserError, match=r"BloomForCausalLM.*position_ids"):
        check_supported(model)


def test_a_model_that_changes_its_logits_is_found():
    model = tiny_model("llama")
    # A hook that doubles the lm_head's input stands for a family that does something unknown on the way to its logits:
    # the projection, applied to the decoder's own output, does not see it.
    norm = model.model.norm
    original = model.forward

    def forward(*args, **kwargs):
        handle = norm.register_forward_hook(lambda module, inputs, output: output * 2)
        try:
            return original(*args, **kwargs)
        finally:
            handle.remove()

    model.forward = forward
    with pytest.raises(UserError, match="logits are not lm_head"):
        check_supported(model)
