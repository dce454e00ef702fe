"""Heads: a new head is the lm_head bit for bit, contracts differ, the ledger of DESIGN.md section 4 holds."""

from __future__ import annotations

import pytest
import torch

from medusa_train.errors import UserError
from medusa_train.modeling.backbone import (
    hidden_states,
    hidden_states_and_middle,
    input_embeddings,
    output_projection,
)
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, Seen, new_heads
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
            if token_map is None:
                assert torch.equal(found, expected)
                continue
            # The rows are the lm_head's, bit for bit. A product with fewer rows may be summed in another order: some
            # CPUs' kernels choose it by the shape, so logits are held to the same product, and to rounding.
            assert torch.equal(heads.projections[head].weight, projection.weight[token_map])
            bias = None if projection.bias is None else projection.bias[token_map]
            product = torch.nn.functional.linear(hidden, projection.weight[token_map], bias)
            assert torch.equal(found, projection.finish(product))
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            assert torch.allclose(found, expected[..., token_map], rtol=tolerance, atol=tolerance)


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


def seeing(reads_layer=None, heads=2, layers=1):
    """Heads of width 2 that see the parent, all weights zero."""
    return MedusaHeads(HeadsConfig("shared", heads, layers, 2, 8, sees="parent", reads_layer=reads_layer))


def test_what_heads_see_is_scaled_to_the_stored_root_mean_square():
    heads = seeing()
    heads.hidden_rms.fill_(2.0)
    # By hand: (3, 4) has root mean square sqrt(25 / 2) = 3.535534, so it becomes (3, 4) * 2 / 3.535534.
    assert torch.allclose(heads.scaled(torch.tensor([[3.0, 4.0]])), torch.tensor([[1.6970563, 2.2627417]]))
    assert torch.equal(heads.scaled(torch.zeros(1, 2)), torch.zeros(1, 2))


def test_the_first_block_reads_hidden_middle_and_parent_in_this_order():
    heads = seeing(reads_layer=1)
    heads.hidden_rms.fill_(1.0)
    weight = heads.blocks[1][0].linear.weight
    assert weight.shape == (2, 6)
    hidden = torch.tensor([[10.0, 20.0]])
    middle, parent = torch.tensor([[1.0, -1.0]]), torch.tensor([[-1.0, -1.0]])  # root mean square 1 already
    with torch.no_grad():
        weight[0, 2] = 3.0  # the middle layer's first number: 3 * 1
        weight[1, 5] = 2.0  # the parent's second number: 2 * -1
    found = heads.features(hidden, 1, Seen(parent, middle))
    # SiLU(3) = 3 / (1 + e^-3) = 2.857722, SiLU(-2) = -2 / (1 + e^2) = -0.238406.
    assert torch.allclose(found, torch.tensor([[12.857722, 19.761594]]), atol=1e-5)
    assert torch.equal(heads.features(hidden, 0, Seen(parent, middle)), hidden)


@pytest.mark.parametrize("reads_layer", [None, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_context_and_features_below_give_what_features_gives(reads_layer, layers):
    torch.manual_seed(0)
    heads = seeing(reads_layer, layers=layers)
    heads.hidden_rms.fill_(0.7)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    hidden, middle, parent = torch.randn(3, 5, 2).unbind()
    middle = None if reads_layer is None else middle
    for head in range(2):
        expected = heads.features(hidden, head, Seen(parent, middle))
        found = heads.features_below(hidden, heads.context(hidden, middle, head), parent, head)
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("reads_layer", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_new_head_that_sees_the_parent_is_the_lm_head_bit_for_bit(reads_layer, dtype):
    model = tiny_model("llama", dtype=dtype)
    projection = output_projection(model)
    config = HeadsConfig(
        "own", 2, 2, projection.hidden_size, projection.vocab_size, sees="parent", reads_layer=reads_layer
    )
    heads = new_heads(config, projection)
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden, middle = hidden_states_and_middle(model, ids, reads_layer=reads_layer)
        seen = Seen(input_embeddings(model)(ids), middle)
        assert torch.equal(heads.logits(hidden, 1, projection, seen), model(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_middle_layer_is_what_output_hidden_states_says(family):
    if family not in FAMILIES:
        pytest.skip(f"no tiny {family}")
    model = tiny_model(family)
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        all_layers = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        hidden, middle = hidden_states_and_middle(model, ids, reads_layer=1)
    assert torch.equal(middle, all_layers[1])
    assert torch.equal(hidden, all_layers[-1])
    with pytest.raises(UserError, match="reads_layer is 99"):
        hidden_states_and_middle(model, ids, reads_layer=99)


def test_parameters_of_heads_that_see_more():
    for reads_layer, expected in ((None, 2 * (2 * 8 * 8 + 8 + 8 * 8 + 8)), (3, 2 * (3 * 8 * 8 + 8 + 8 * 8 + 8))):
        config = HeadsConfig("shared", 2, 2, 8, 32, sees="parent", reads_layer=reads_layer)
        assert config.parameter_count() == expected == sum(p.numel() for p in MedusaHeads(config).parameters())


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
