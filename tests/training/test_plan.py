"""The ledger's fixtures by hand, and `plan` against what a run really computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from medusa_train.config.load import load_recipe, parse_recipe
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import hidden_states, output_projection
from medusa_train.modeling.heads import HeadsConfig, new_heads
from medusa_train.training import ledger
from medusa_train.training.fused import FusedOptions
from medusa_train.training.plan import lora_numbers, plan_recipe
from medusa_train.training.plan_memory import saved_bytes
from medusa_train.training.policies import master_weights, prepare_backbone
from medusa_train.training.prepare import set_backbone_aside
from medusa_train.training.shapes import KNOWN, BackboneShape, shape_from_config, shape_of
from medusa_train.training.trainee import Objective, Trainee
from tests.tiny import tiny_model

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
VICUNA = KNOWN["lmsys/vicuna-7b-v1.3"]


def test_residual_block_of_4096() -> None:
    assert ledger.block_parameters(4096) == 16_781_312


def test_own_heads_of_vicuna_7b() -> None:
    config = HeadsConfig("own", 4, 1, 4096, 32000)
    assert config.parameter_count() == 591_413_248
    assert round(2 * config.parameter_count() / 2**30, 3) == 1.102


def test_shared_heads_of_vicuna_7b() -> None:
    config = HeadsConfig("shared", 4, 1, 4096, 32000)
    assert config.parameter_count() == 67_125_248
    assert round(2 * config.parameter_count() / 2**20, 2) == 128.03


def test_head_flops_by_hand() -> None:
    """2 K T_h (R D^2 + V D) = 2 * 4 * 1 * (4096^2 + 32000 * 4096) = 8 * 147,849,216."""
    assert ledger.head_flops(HeadsConfig("own", 4, 1, 4096, 32000), 1) == 8 * 147_849_216


def test_tree_and_committed_kv_bytes() -> None:
    assert ledger.kv_bytes(21, 32, 8, 128, 2) == 2.625 * 2**20
    assert ledger.kv_bytes(3, 32, 8, 128, 2) == 3 * 131_072  # G = num_accepted + 1 = 3


def test_attention_pairs() -> None:
    """A31: N = 9, P = 5; the mask's rows hold 1, 2, 2, 3 x 6 ones: 23."""
    assert ledger.dense_attention_pairs(9, 5) == 126
    assert ledger.allowed_attention_pairs(9, 5, 1 + 2 + 2 + 6 * 3) == 45 + 23


def test_training_flops_are_three_products_own_and_two_shared() -> None:
    """D = 2, V = 3, K = 1, R = 1, one row: block 2 * 4 = 8, once more for its weight; projection 2 * 6 = 12 each."""
    assert ledger.head_training_flops(HeadsConfig("own", 1, 1, 2, 3), 1) == 2 * 8 + 3 * 12
    assert ledger.head_training_flops(HeadsConfig("shared", 1, 1, 2, 3), 1) == 2 * 8 + 2 * 12


def test_lora_of_one_layer_by_hand() -> None:
    """r 2: q 4 -> 4, k and v 4 -> 2, o 4 -> 4, gate and up 4 -> 6, down 6 -> 4, lm_head 4 -> 10."""
    from medusa_train.config.recipe import LoraSection

    shape = BackboneShape(4, 1, 2, 1, 2, 6, 10)
    assert lora_numbers(LoraSection(r=2), shape) == 2 * (8 + 6 + 6 + 8 + 10 + 10 + 10 + 14)


def test_parameters_of_a_shape_are_the_model_s() -> None:
    model = tiny_model("llama")
    shape = shape_from_config(model.config)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) - norms


def test_known_shapes_have_the_published_sizes() -> None:
    sizes = {name.split("/")[1]: round(shape.parameters / 1e9, 2) for name, shape in KNOWN.items()}
    published = {"vicuna-7b-v1.3": 6.74, "vicuna-13b-v1.3": 13.02, "zephyr-7b-beta": 7.24}
    published |= {"Llama-3.1-8B-Instruct": 8.03, "Qwen3-8B": 8.19, "SmolLM2-135M-Instruct": 0.13}
    for name, billions in published.items():
        assert sizes[name] == pytest.approx(billions, abs=0.011), name


@pytest.mark.parametrize("contract", ["own", "shared"])
def test_planned_flops_of_heads_are_those_a_counter_sees(contract: str) -> None:
    model = tiny_model("llama", vocab_size=200)
    base = output_projection(model)
    config = HeadsConfig(contract, 3, 2, base.hidden_size, base.vocab_size)
    trainee = Trainee(new_heads(config, base, dtype=torch.float32), base, Objective("heads_only", 3), None)
    model.requires_grad_(False)
    hidden, labels = torch.randn(64, base.hidden_size), torch.randint(0, 200, (3, 64))
    with FlopCounterMode(display=False) as counter:
        trainee(labels, hidden=hidden)["sums"].sum().backward()
    assert counter.get_total_flops() == pytest.approx(ledger.head_training_flops(config, 64), rel=0.01)


@pytest.mark.parametrize("policy", ["heads_only", {"kind": "joint", "adapter": "none"}])
def test_planned_flops_of_a_step_are_those_a_counter_sees(policy) -> None:
    """Backbone and all, within 15 %: the counter sees whole attention, the plan the causal half."""
    model = tiny_model("llama", vocab_size=200, hidden_size=64, intermediate_size=128)
    recipe = parse_recipe(
        {"base": {"name": "x", "dtype": "float32"}, "data": {"train": ["x"], "max_length": 64}, "output_dir": "x",
         "heads": {"medusa_num_heads": 3}, "policy": policy, "training": {"per_device_train_batch_size": 2}}
    )  # fmt: skip
    plan = plan_recipe(recipe, shape_from_config(model.config), supervised_share=0.5)
    base = output_projection(model)
    heads = new_heads(HeadsConfig("own", 3, 1, base.hidden_size, base.vocab_size), base, dtype=torch.float32)
    joint = policy != "heads_only"
    model.requires_grad_(joint)
    objective = Objective("joint" if joint else "heads_only", 3, "fused", FusedOptions(32))
    trainee = Trainee(heads, base, objective, model)
    rows = torch.cat([torch.arange(32, 64), torch.arange(96, 128)])
    labels = torch.randint(0, 200, (len(objective.channels), 64))
    ids = torch.randint(0, 200, (2, 64))
    with FlopCounterMode(display=False) as counter:
        trainee(labels, rows=rows, input_ids=ids)["sums"].sum().backward()
    assert plan.total_flops_per_token * 128 == pytest.approx(counter.get_total_flops(), rel=0.15)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_can_be_planned(path: Path) -> None:
    recipe = load_recipe(path)
    plan = plan_recipe(recipe, shape_of(recipe.base.name))
    assert plan.memory.total == sum(plan.memory.parts.values()) > 0
    assert plan.total_flops_per_token > 0
    assert set(plan.trainable) >= {"residual blocks", "projections"}


def test_sharding_divides_what_it_shards() -> None:
    recipe = load_recipe(RECIPES[0].parent / "medusa2-zero3.yaml", ["training.deepspeed=null"])
    whole = plan_recipe(recipe, VICUNA).memory.parts
    for stage, divided in ((2, {"gradients, fp32", "optimizer state"}), (3, {"backbone weights", "gradients, fp32"})):
        config = {"zero_optimization": {"stage": stage}}
        sharded = recipe.model_copy(update={"training": {**recipe.training, "deepspeed": config}})
        parts = plan_recipe(sharded, VICUNA, processes=8).memory.parts
        for name in divided:
            assert parts[name] == pytest.approx(whole[name] / 8, rel=1e-6), (stage, name)


def test_the_plan_command_prints_the_ledger(capfd: pytest.CaptureFixture) -> None:
    from typer.testing import CliRunner

    from medusa_train.cli.app import build_app

    words = ["plan", "--recipe", str(RECIPES[0].parent / "medusa1.yaml"), "heads.medusa_num_heads=4"]
    result = CliRunner().invoke(build_app(), words)
    assert result.exit_code == 0, result.output
    text = result.output + capfd.readouterr().out
    assert "591,413,248" in text and "16,781,312" in text
    assert "11,193" in text  # 21 tree rows at 512 positions, dense: 21 * 533


def test_a_fsdp_recipe_s_own_key_for_recomputing_counts() -> None:
    kept, recomputed = (
        plan_recipe(load_recipe(RECIPES[0].parent / "medusa2-fsdp2.yaml", [word]), VICUNA)
        for word in ("training.fsdp_config.activation_checkpointing=false", "training.num_train_epochs=2")
    )
    assert recomputed.memory.parts["activations"] < kept.memory.parts["activations"] / 10
    assert recomputed.flops_per_token["backbone, recomputed"] == kept.flops_per_token["backbone, forward"]


def test_a_plan_for_a_gpu_is_the_same_on_any_machine() -> None:
    """A GPU runs all positions at once (fp32 norms twice, bf16 rest) and holds a chunk's logits in fp32 as well."""
    recipe = load_recipe(RECIPES[0].parent / "medusa1.yaml")
    parts = plan_recipe(recipe, VICUNA, device="cuda").memory.parts
    tokens = recipe.training["per_device_train_batch_size"] * recipe.data.max_length
    assert parts["activations"] == tokens * (2 * (4 * 4096 + 3 * 11008) + 8 * 4096)
    chunk = min(recipe.loss.chunk_rows, int(tokens * 0.4)) * 32000
    assert parts["loss buffers"] == chunk * (2 + 4) + 2 * 2 * 32000 * 4096
    assert parts != plan_recipe(recipe, VICUNA, device="cpu").memory.parts


def test_what_comes_before_training_is_counted() -> None:
    """Llama 3 8B in bf16 while its hidden states are cached, 16,384 tokens at once, and its heads lie there in fp32."""
    recipes, shape = RECIPES[0].parent, KNOWN["meta-llama/Llama-3.1-8B-Instruct"]
    cached = plan_recipe(load_recipe(recipes / "llama3-8b.yaml"), shape, device="cuda")
    (building,) = cached.before.values()
    passing = 16_384 * (2 * (4 * 4096 + 3 * 14_336) + 2 * 4 * 4096)
    assert building == 2 * shape.parameters + 4 * sum(cached.trainable.values()) + passing == cached.height
    assert "backbone weights" not in cached.memory.parts
    assert cached.memory.parts["lm_head"] == 2 * 128_256 * 4096
    whole = plan_recipe(load_recipe(recipes / "medusa2-fsdp2.yaml"), VICUNA, processes=8)
    heads = whole.trainable["residual blocks"] + whole.trainable["projections"]
    assert list(whole.before.values()) == [4 * VICUNA.parameters + 4 * heads]


def test_data_parallel_ranks_hold_gradients_twice() -> None:
    recipe = load_recipe(RECIPES[0].parent / "medusa2-ddp.yaml")
    one, eight = (plan_recipe(recipe, VICUNA, processes=count).memory for count in (1, 8))
    assert eight.total - one.total == 4 * sum(plan_recipe(recipe, VICUNA).trainable.values())


def test_a_held_out_check_may_need_more_than_a_step() -> None:
    """Shared heads of SmolLM2: the lm_head once more in fp32, 256 rows of logits three times."""
    words = ["training.per_device_train_batch_size=1", "data.max_length=64"]
    recipe, shape = (
        load_recipe(RECIPES[0].parent / "tiny-medusa1.yaml", words),
        KNOWN["HuggingFaceTB/SmolLM2-135M-Instruct"],
    )
    plan = plan_recipe(recipe, shape, device="cuda")
    parts = plan.memory.parts
    standing = parts["backbone weights"] + parts["trainable weights, fp32"] + parts["optimizer state"]
    assert plan.check == standing + 4 * 49_152 * 576 + 3 * 4 * 256 * 49_152
    assert plan.height == plan.check > plan.memory.total


def test_a_deepspeed_config_that_is_not_there_is_an_error() -> None:
    recipe = load_recipe(RECIPES[0].parent / "medusa2-zero3.yaml", ["training.deepspeed=nowhere/zero3.json"])
    with pytest.raises(UserError, match="cannot be read"):
        plan_recipe(recipe, VICUNA)


def test_a_backbone_set_aside_leaves_the_output_projection() -> None:
    from types import SimpleNamespace

    for tied in (True, False):
        model = tiny_model("llama", tie_word_embeddings=tied)
        set_backbone_aside(SimpleNamespace(model=model, quantization=None))
        left = {name for name, parameter in model.named_parameters() if parameter.device.type == "cpu"}
        assert left == ({"model.embed_tokens.weight"} if tied else {"lm_head.weight"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dropout", [0.0, 0.1, None])
def test_planned_activations_are_what_autograd_saves(dtype: str, dropout: float | None) -> None:
    """Grouped keys and a gated MLP, LoRA with and without dropout, and all weights (None), under bf16 autocast."""
    model = tiny_model("llama", hidden_size=48, intermediate_size=112, num_attention_heads=6, num_key_value_heads=2)
    model.to(getattr(torch, dtype))
    policy: dict = {"kind": "joint", "adapter": "none"}
    if dropout is not None:
        policy = {"kind": "joint", "adapter": "lora", "lora": {"dropout": dropout, "r": 2}}
    recipe = parse_recipe(
        {"base": {"name": "x", "dtype": dtype}, "data": {"train": ["x"]}, "output_dir": "x", "policy": policy,
         "heads": {"medusa_num_heads": 1}, "training": {"bf16": True}}
    )  # fmt: skip
    shape, tokens = shape_from_config(model.config), 1021
    backbone = prepare_backbone(model, recipe)
    master_weights(backbone)
    saved: dict[int, tuple] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tokens in tensor.shape:  # rows, no weights
            saved.setdefault(tensor.untyped_storage().data_ptr(), (tensor, tensor.untyped_storage().nbytes()))
        return tensor

    backbone.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept), torch.autocast("cpu", torch.bfloat16):
        hidden_states(backbone, torch.randint(0, 60, (1, tokens)))
    found = sum(size for _, size in saved.values()) / tokens / shape.layers
    assert saved_bytes(recipe, shape, on_cpu=True) == pytest.approx(found, rel=0.1)
