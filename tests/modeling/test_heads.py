"""Heads: a new head is the lm_head bit for bit, contracts differ, the ledger of DESIGN.md section 4 holds."""

from __future__ import annotations

import pytest
import torch

from medusa_train.errors import UserError
from medusa_train.modeling.backbone import hidden_states, output_projection
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, new_heads
from tests.tiny import FAMILIES, tiny_model


def heads_for(model, contract="own", heads=3, layers=2, token_map=None, dtype=None):
    projection = output_projection(model)
    config = HeadsConfig(
        contract,
        heads,
        layers,
        projection.hidden_size,
        projection.vocab_size,
        None if token_map is None else len(token_map),
        contract != "shared" and projection.bias is not None,
    )
    return new_heads(config, projection, token_map, dtype=dtype), projection


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("contract", ["own", "shared", "reduced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_new_head_is_the_lm_head_bit_for_bit(family, contract, dtype):
    model = tiny_model(family, dtype=dtype)
    token_map = torch.tensor([5, 0, 63, 17]) if contract == "reduced" else None
    heads, projection = heads_for(model, contract, token_map=token_map)
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        hidden = hidden_states(model, ids)
        for head in range(3):
            found = heads.logits(hidden, head, projection)
            assert torch.equal(found, expected if token_map is None else expected[..., token_map])


def test_blocks_are_distinct_and_a_trained_block_does_what_the_formula_says():
    heads = MedusaHeads(HeadsConfig("shared", 2, 3, 4, 8))
    pointers = {block.linear.weight.data_ptr() for blocks in heads.blocks for block in blocks}
    assert len(pointers) == 6
    with torch.no_grad():
        heads.blocks[1][0].linear.weight.copy_(2 * torch.eye(4))
        heads.blocks[1][0].linear.bias.fill_(1.0)
    # By hand: x = 0 gives 0 + SiLU(2*0 + 1) = 1/(1+e^-1) = 0.731058...; the later blocks are identities.
    assert torch.allclose(heads.features(torch.zeros(1, 4), 1), torch.full((1, 4), 0.7310585786), atol=1e-7)
    assert torch.equal(heads.features(torch.ones(1, 4), 0), torch.ones(1, 4))


@pytest.mark.parametrize(
    ("arguments", "parameters", "bytes_bf16"),
    [
        (("own", 4, 1, 4096, 32000), 591_413_248, 1.102 * 2**30),
        (("shared", 4, 1, 4096, 32000), 67_125_248, 128.03 * 2**20),
        (("own", 1, 1, 4096, 32000), 16_781_312 + 32000 * 4096, None),
    ],
)
def test_ledger(arguments, parameters, bytes_bf16):
    config = HeadsConfig(*arguments)
    assert config.parameter_count() == parameters
    with torch.device("meta"):
        assert sum(p.numel() for p in MedusaHeads(config).parameters()) == parameters
    if bytes_bf16 is not None:
        assert parameters * 2 == pytest.approx(bytes_bf16, rel=1e-3)


def test_offsets_and_state_names():
    config = HeadsConfig("reduced", 3, 1, 8, 32, 5)
    assert config.offsets == (2, 3, 4)
    names = set(MedusaHeads(config).state_dict())
    assert names == {f"blocks.{j}.0.linear.{p}" for j in range(3) for p in ("weight", "bias")} | {
        f"projections.{j}.weight" for j in range(3)
    } | {"token_map"}


def test_top_tokens_are_in_the_full_vocabulary_and_skip_padding_rows():
    model = tiny_model("llama")
    heads, projection = heads_for(model, "reduced", layers=0, token_map=torch.tensor([9, 4, 31]))
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    logits, ids = heads.top_tokens(hidden, 10, projection)
    assert ids.shape == (3, 2, 3)
    full = projection(hidden)
    for row in range(2):
        expected = sorted([9, 4, 31], key=lambda token: -full[row, token].item())
        assert ids[0, row].tolist() == expected
        assert torch.allclose(logits[0, row], full[row, expected])
    own, _ = heads_for(model, "own", layers=0)
    padded = type(projection)(projection.module, valid_vocab_size=10)
    assert own.top_tokens(hidden, 5, padded)[1].max() < 10


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("owned", 1, 1, 8, 8), "contract"),
        (("own", 0, 1, 8, 8), "medusa_num_heads"),
        (("own", 1, -1, 8, 8), "medusa_num_layers"),
        (("own", 1, 1, 8, 8, 4), "reduced_vocab_size"),
        (("reduced", 1, 1, 8, 8), "reduced_vocab_size"),
        (("reduced", 1, 1, 8, 8, 9), "reduced_vocab_size"),
        (("shared", 1, 1, 8, 8, None, True), "bias"),
    ],
)
def test_impossible_shapes_are_refused(arguments, word):
    with pytest.raises(UserError, match=word):
        HeadsConfig(*arguments)


@pytest.mark.parametrize("token_map", [[1, 1, 2], [0, 1, 64], [0, 1], [-1, 0, 1]])
def test_bad_token_maps_are_refused(token_map):
    model = tiny_model("llama")
    projection = output_projection(model)
    with pytest.raises(UserError, match="token map"):
        new_heads(HeadsConfig("reduced", 1, 1, 32, 64, 3), projection, torch.tensor(token_map))


def test_heads_of_another_size_are_refused():
    with pytest.raises(UserError, match="V=65"):
        new_heads(HeadsConfig("own", 1, 1, 32, 65), output_projection(tiny_model("llama")))
