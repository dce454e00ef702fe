"""Training heads that see the token before: what each head is shown, from rows and from a cache, and whole runs."""

from __future__ import annotations

import pytest
import torch

from medusa_train.checkpoint.load import load_with_base
from medusa_train.config.load import parse_recipe
from medusa_train.dataset.rows import TokenRow
from medusa_train.decoding.decode import TreeDecoder
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.tree import DraftTree
from medusa_train.errors import UserError
from medusa_train.training.batches import BinCollator
from medusa_train.training.cache import CachedRows
from medusa_train.training.fit import fit
from medusa_train.training.losses import IGNORE, seen_tokens
from medusa_train.training.state import RunFolder
from tests.training.support import recipe_of, write_world

PARENT = {"medusa_num_heads": 3, "sees": "parent"}
MIDDLE = PARENT | {"reads_layer": 1}
LORA = {"r": 4, "alpha": 4, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("world"))


def test_what_heads_see_by_hand():
    """Head j at t guesses the token at t+j+2 and sees the one before it, t+j+1."""
    seen = seen_tokens(torch.tensor([[10, 11, 12, 13, 14]]), 3)
    assert seen[0].tolist() == [[11, 12, 13, 14, 0]]
    assert seen[1].tolist() == [[12, 13, 14, 0, 0]]
    assert seen[2].tolist() == [[13, 14, 0, 0, 0]]


def test_packed_rows_show_the_token_before_each_target_of_the_same_document():
    """Tokens say where they stand: 100 d + place in document d, so that every relation can be read off them."""
    rows = [
        TokenRow(
            input_ids=torch.arange(100 * d, 100 * d + length).int().numpy(),
            loss_mask=torch.ones(length, dtype=torch.uint8).numpy(),
            source=str(d),
            id=str(d),
        )
        for d, length in ((1, 6), (2, 4), (3, 7))
    ]
    batch = BinCollator((2, 3, 4), None, 1, None, True)([rows])
    ids = batch["input_ids"].flatten()[batch["rows"]]
    checked = 0
    for head in range(3):
        for at, label, seen in zip(
            ids.tolist(), batch["labels"][head].tolist(), batch["seen"][head].tolist(), strict=True
        ):
            if label != IGNORE:
                assert (label, seen) == (at + head + 2, at + head + 1)
                assert seen // 100 == at // 100, "a head saw across a document's boundary"
                checked += 1
    assert checked == (4 + 3 + 2) + (2 + 1 + 0) + (5 + 4 + 3)


@pytest.mark.parametrize("heads", [PARENT, MIDDLE], ids=["parent", "middle"])
def test_a_cache_shows_what_rows_show_and_trains_to_the_same_heads(world, tmp_path, heads):
    """One whole batch a step, so that both ways take the same steps: bf16 in the cache is all that differs."""
    found = {}
    for name, policy in (("live", "heads_only"), ("cached", {"kind": "heads_only", "cache": {"enabled": True}})):
        policy = {"kind": policy} if isinstance(policy, str) else policy
        training = {"max_steps": 3, "per_device_train_batch_size": 4096, "learning_rate": 0.5, "optim": "sgd"}
        recipe = recipe_of(world, tmp_path / name, policy, heads=heads, training=training)
        _, loaded = load_with_base(fit(recipe), world["base"])
        found[name] = loaded.heads
    recipe_folder = RunFolder.of(recipe).path / "cache" / "train"
    cached = CachedRows(recipe_folder)
    inputs = cached[0]
    assert inputs["seen"].shape == (3, 1)
    assert ("middle" in inputs) == (heads is MIDDLE)
    live, cache = found["live"], found["cached"]
    assert live.config == cache.config and live.config.sees == "parent"
    assert torch.isclose(live.hidden_rms, cache.hidden_rms)
    moved = 0.0
    for (name, one), (_, other) in zip(live.named_parameters(), cache.named_parameters(), strict=True):
        if "blocks" in name:
            # SGD, because Adam's first steps take the sign of a gradient, which rounding turns over where it is tiny.
            assert (one.float() - other.float()).norm() < 0.03 * one.float().norm(), name
            moved += float(one.float().abs().sum())
    assert moved > 0


@pytest.mark.parametrize(
    "policy",
    [
        {"kind": "heads_only", "cache": {"enabled": True}},
        {"kind": "joint", "lora": LORA},
        {"kind": "self_distill", "lora": LORA},
    ],
    ids=lambda policy: policy["kind"],
)
@pytest.mark.parametrize("contract", ["own", "shared", "reduced"])
def test_every_policy_and_contract_trains_is_stored_and_decodes_exactly(world, tmp_path, policy, contract):
    heads = MIDDLE | {"contract": contract} | ({"reduced_vocab_size": 40} if contract == "reduced" else {})
    loss = {"soft_targets": 4} if policy["kind"] == "heads_only" else {}
    training = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    recipe = recipe_of(world, tmp_path / "heads", policy, heads=heads, training=training, loss=loss)
    base, loaded = load_with_base(fit(recipe), world["base"])
    assert loaded.heads.config.reads_layer == 1
    prompt = base.tokenizer("Go on from apples").input_ids
    decoder = TreeDecoder(base.model, loaded.heads.to(base.model.dtype), DraftTree.product((3, 2)))
    plain = TreeDecoder(base.model)
    settings = DecodeSettings(max_new_tokens=24)
    assert decoder.decode([prompt], settings)[0].token_ids == plain.decode([prompt], settings)[0].token_ids


def test_a_cache_made_for_plain_heads_is_refused(world, tmp_path):
    cache = {"enabled": True, "folder": str(tmp_path / "cache")}
    policy = {"kind": "heads_only", "cache": cache}
    training = {"max_steps": 1}
    fit(recipe_of(world, tmp_path / "plain", policy, training=training))
    with pytest.raises(UserError, match="sees: 'hidden' there, 'parent' here"):
        fit(recipe_of(world, tmp_path / "seeing", policy, heads=PARENT, training=training))


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ({"reads_layer": 1}, "sees: parent"),
        ({"sees": "parent", "medusa_num_layers": 0}, "first block"),
        ({"sees": "path"}, "sees"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(world, heads, words):
    content = {
        "base": {"name": world["base"]},
        "data": {"train": [world["data"]]},
        "policy": {"kind": "heads_only"},
        "heads": heads,
        "output_dir": "nowhere",
    }
    with pytest.raises(UserError, match=words):
        parse_recipe(content)


def test_a_layer_that_the_backbone_does_not_have_is_named(world, tmp_path):
    with pytest.raises(UserError, match="reads_layer is 99"):
        fit(recipe_of(world, tmp_path / "heads", {"kind": "heads_only"}, heads=PARENT | {"reads_layer": 99}))
