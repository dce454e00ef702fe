"""Recipes: strict names, overrides, old names, what applies to which policy, and the way back from text."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from medusa_train.config.load import diff_recipes, dump_recipe, load_recipe, parse_recipe
from medusa_train.config.recipe import HeadsOnly, Joint, SelfDistill
from medusa_train.errors import UserError

PLAIN = {
    "base": {"name": "some/model"},
    "data": {"train": ["rows"]},
    "heads": {"medusa_num_heads": 3},
    "policy": {"kind": "heads_only"},
    "training": {"learning_rate": 0.001},
    "output_dir": "out",
}


def write(tmp_path: Path, **changes) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**copy.deepcopy(PLAIN), **changes}))
    return path


def test_default_head_weights_are_powers_of_08() -> None:
    assert parse_recipe(PLAIN).head_weights() == pytest.approx([0.8, 0.64, 0.512])


def test_resolved_head_weights_are_numbers(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, loss={"head_weights": {"base": 1.0, "decay": 0.5}}))
    assert recipe.resolved()["loss"]["head_weights"] == [1.0, 0.5, 0.25]


def test_dumped_recipe_reads_back_to_itself(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ["policy.cache.enabled=true", "training.warmup_steps=0.1"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_recipe(recipe))
    assert load_recipe(again).resolved() == recipe.resolved()


@pytest.mark.parametrize(
    ("override", "wrong", "right"),
    [
        ("heads.medusa_num_head=3", "heads.medusa_num_head", "heads.medusa_num_heads"),
        ("traning.learning_rate=1", "traning", "training"),
        ("training.learning_rat=1", "training.learning_rat", "training.learning_rate"),
        ("policy.kind=heads_onyl", "heads_onyl", "heads_only"),
        ("policy.cache.enable=1", "policy.cache.enable", "policy.cache.enabled"),
        ("loss.head_weights.bas=1", "loss.head_weights.bas", "loss.head_weights.base"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path, override: str, wrong: str, right: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(write(tmp_path), [override])
    assert wrong in error.value.what
    assert right in (error.value.fix or "")


@pytest.mark.parametrize("key", ["lora", "medusa_weight", "ramp", "drift", "head_lr_multiplier", "adapter"])
def test_fields_of_other_policies_do_not_apply_to_heads_only(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match="does not apply to heads_only"):
        load_recipe(write(tmp_path, policy={"kind": "heads_only", key: 1}))


def test_full_fine_tuning_has_no_lora(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lora"):
        load_recipe(write(tmp_path, policy={"kind": "joint", "adapter": "none", "lora": {"r": 8}}))


@pytest.mark.parametrize(
    ("adapter", "quantization", "fine"),
    [
        ("lora", None, True),
        ("qlora", "4bit", True),
        ("qlora", None, False),
        ("lora", "4bit", False),
        ("none", "8bit", False),
    ],
)
def test_adapter_and_quantization_go_together(
    tmp_path: Path, adapter: str, quantization: str | None, fine: bool
) -> None:
    path = write(
        tmp_path, policy={"kind": "joint", "adapter": adapter}, base={"name": "m", "quantization": quantization}
    )
    if fine:
        assert load_recipe(path).policy.adapter == adapter
    else:
        with pytest.raises(UserError):
            load_recipe(path)


def test_policies_are_told_apart_by_kind(tmp_path: Path) -> None:
    kinds = {"heads_only": HeadsOnly, "joint": Joint, "self_distill": SelfDistill}
    for kind, section in kinds.items():
        assert type(load_recipe(write(tmp_path, policy=kind)).policy) is section
    assert load_recipe(write(tmp_path, policy="joint")).policy.medusa_weight == 0.2
    assert load_recipe(write(tmp_path, policy="self_distill")).policy.medusa_weight == 0.01


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("0.5", 0.5), ("true", True), ("null", None), ("[1, 2]", [1, 2]), ("cosine", "cosine")],
)
def test_override_values_mean_what_they_say(tmp_path: Path, text: str, value: object) -> None:
    assert load_recipe(write(tmp_path), [f"training.lr_scheduler_type={text}"]).training["lr_scheduler_type"] == value


def test_a_bare_no_is_the_name_of_a_strategy(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ["training.save_strategy=no", "training.bf16=no"])
    assert recipe.training["save_strategy"] == "no" and recipe.training["bf16"] is False


@pytest.mark.parametrize("override", ["nonsense", "=3", "--nporc=2"])
def test_broken_overrides_are_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError):
        load_recipe(write(tmp_path), [override])


def test_removed_names_of_transformers_are_read_with_a_note(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    training = {"warmup_ratio": 0.1, "evaluation_strategy": "steps", "overwrite_output_dir": True}
    recipe = load_recipe(write(tmp_path, training=training))
    assert recipe.training == {"warmup_steps": 0.1, "eval_strategy": "steps"}
    told = capfd.readouterr().err
    assert "training.warmup_ratio is called warmup_steps now" in told
    assert "training.overwrite_output_dir has no effect any more" in told


def test_flat_names_of_the_axolotl_fork(tmp_path: Path) -> None:
    data = {key: value for key, value in PLAIN.items() if key not in ("base", "heads", "policy")}
    data |= {"base_model": "m", "medusa_num_heads": 5, "policy": {"kind": "joint"}, "medusa_heads_coefficient": 0.3}
    path = tmp_path / "flat.yaml"
    path.write_text(yaml.safe_dump(data))
    recipe = load_recipe(path)
    assert (recipe.base.name, recipe.heads.medusa_num_heads, recipe.policy.medusa_weight) == ("m", 5, 0.3)


def test_names_that_the_program_decides_cannot_be_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be set here"):
        load_recipe(write(tmp_path, training={"load_best_model_at_end": True}))


def test_errors_of_yaml_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("base: {name: m}\ndata: [unclosed\n")
    with pytest.raises(UserError) as error:
        load_recipe(path)
    assert error.value.where.startswith(f"{path}:")


def test_a_missing_recipe_lists_those_there(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UserError) as error:
        load_recipe(tmp_path / "recipes.yaml")
    assert "recipe.yaml" in error.value.fix


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": {"head_weights": [1.0, 2.0]}},  # two numbers for three heads
        {"loss": {"head_weights": [1.0, -2.0, 1.0]}},
        {"heads": {"medusa_num_heads": 3, "contract": "reduced"}},  # no size
        {"heads": {"medusa_num_heads": 3, "reduced_vocab_size": 9}},  # a size without the contract
        {"heads": {"medusa_num_heads": 0}},
        {"data": {"train": []}},
        {"data": {"train": ["x"], "max_length": "long"}},
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(UserError):
        load_recipe(write(tmp_path, **changes))


def test_diff_names_every_leaf() -> None:
    old, new = parse_recipe(PLAIN).resolved(), parse_recipe({**PLAIN, "output_dir": "b"}).resolved()
    new["training"] = {"learning_rate": 0.01}
    assert diff_recipes(old, new) == ["output_dir: 'out' -> 'b'", "training.learning_rate: 0.001 -> 0.01"]


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_every_recipe_of_the_repository_is_valid_and_has_a_header(path: Path) -> None:
    load_recipe(path)
    head = path.read_text().split("\nbase:")[0]
    assert head.startswith("#"), "a recipe begins with a header"
    assert "medusa-train fit --recipe recipes/" in head, "the header gives the command"
