"""Checkpoints with a real (tiny) backbone: another one is refused, adapters and changed weights come back."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from medusa_train.checkpoint import CheckpointError, load_checkpoint, load_with_base, merge_adapter, save_checkpoint
from medusa_train.checkpoint import changed as changed_module
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import output_projection
from medusa_train.modeling.base import Base, load_base
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, new_heads
from tests.checkpoint.support import states_equal
from tests.tiny import save_tiny_base


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_TRAIN_CACHE", str(tmp_path / "cache"))


def heads_for(base: Base, contract: str = "shared") -> MedusaHeads:
    projection = output_projection(base.model)
    heads = new_heads(HeadsConfig(contract, 2, 1, projection.hidden_size, projection.vocab_size), projection)
    with torch.no_grad():
        for number, block in enumerate(heads.blocks):
            block[0].linear.weight.normal_(generator=torch.Generator().manual_seed(number))
    return heads


def save(folder: Path, heads: MedusaHeads, base: Base, **more: object) -> Path:
    arguments = {"recipe": {}, "policy": "heads_only", "data_manifest_hash": None, "training": {}} | more
    return save_checkpoint(folder, heads, base, **arguments)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 23)[None]).logits


def relative_gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference in units of the largest logit: what fp32 rounding scales with."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "gpt2"])
def test_round_trip_with_base(tmp_path: Path, family: str) -> None:
    base = load_base(str(save_tiny_base(tmp_path / "base", family)))
    heads = heads_for(base)
    save(tmp_path / "heads", heads, base)
    again, loaded = load_with_base(tmp_path / "heads", verify="hashes")
    assert states_equal(heads, loaded.heads) and again.fingerprint == base.fingerprint
    assert again.chat_template == base.chat_template
    assert (tmp_path / "heads" / "tokenizer.json").is_file()


def test_dtype_follows_the_backbone(tmp_path: Path) -> None:
    base = load_base(str(save_tiny_base(tmp_path / "base")))
    save(tmp_path / "heads", heads_for(base), base)
    _, loaded = load_with_base(tmp_path / "heads", dtype="bfloat16")
    assert {parameter.dtype for parameter in loaded.heads.parameters()} == {torch.bfloat16}


def test_another_base_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    base = load_base(str(save_tiny_base(tmp_path / "one", seed=1)))
    other = load_base(str(save_tiny_base(tmp_path / "two", seed=2)))
    save(tmp_path / "heads", heads_for(base), base)
    with pytest.raises(CheckpointError, match="same config and tokenizer, other weights") as raised:
        load_checkpoint(tmp_path / "heads", other)
    assert {problem.kind for problem in raised.value.problems} == {"backbone"}
    with pytest.raises(CheckpointError, match="other weights"):
        load_with_base(tmp_path / "heads", base=str(tmp_path / "two"))
    copied = load_base(str(save_tiny_base(tmp_path / "copy", seed=1)))
    load_checkpoint(tmp_path / "heads", copied)


def test_another_tokenizer_and_template_are_named(tmp_path: Path) -> None:
    base = load_base(str(save_tiny_base(tmp_path / "one")))
    save(tmp_path / "heads", heads_for(base), base)
    other = save_tiny_base(tmp_path / "two")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|fin|>"))
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(tmp_path / "heads", load_base(str(other)))
    assert {problem.kind for problem in raised.value.problems} == {"tokenizer"}
    retold = load_base(str(tmp_path / "one"), chat_template="{{ messages }}")
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(tmp_path / "heads", retold)
    assert {problem.kind for problem in raised.value.problems} == {"template"}


def test_a_smaller_base_gets_every_difference(tmp_path: Path) -> None:
    base = load_base(str(save_tiny_base(tmp_path / "one")))
    save(tmp_path / "heads", heads_for(base), base)
    small = load_base(str(save_tiny_base(tmp_path / "two", hidden_size=16, vocab_size=300)))
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(tmp_path / "heads", small)
    text = str(raised.value)
    assert "hidden size 16, the heads need 32" in text and "vocabulary size 300" in text and "config" in text


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"]}


def adapted(base: Base, seed: int = 0) -> torch.nn.Module:
    """A PeftModel whose adapter, lm_head included, really changes the logits."""
    model = get_peft_model(copy.deepcopy(base.model), LoraConfig(**LORA))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_adapter_round_trip_and_merging(tmp_path: Path, family: str) -> None:
    base = load_base(str(save_tiny_base(tmp_path / "base", family)))
    model = adapted(base)
    expected, plain = logits(model), logits(base.model)
    assert (expected - plain).abs().max() > 0.1
    heads = heads_for(base)
    save(tmp_path / "heads", heads, base, policy="self_distill", adapter=model)
    assert sorted(p.name for p in (tmp_path / "heads" / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    attached, loaded = load_with_base(tmp_path / "heads", verify="hashes")
    assert states_equal(heads, loaded.heads) and loaded.adapter_folder is not None
    torch.testing.assert_close(logits(attached.model), expected, rtol=0, atol=0)
    merged, _ = load_with_base(tmp_path / "heads", merge=True)
    assert not hasattr(merged.model, "peft_config")
    assert relative_gap(logits(merged.model), expected) < 1e-5


def test_merging_into_a_tied_lm_head_leaves_the_embeddings_alone(tmp_path: Path) -> None:
    base = load_base(str(save_tiny_base(tmp_path / "base", "llama-tied")))
    before = base.model.get_input_embeddings().weight.clone()
    merged = merge_adapter(adapted(base))
    assert torch.equal(merged.get_input_embeddings().weight, before)
    assert not torch.equal(merged.get_output_embeddings().weight, before)
    merged.save_pretrained(tmp_path / "merged")
    again = type(base.model).from_pretrained(tmp_path / "merged")
    assert relative_gap(logits(again), logits(adapted(base))) < 1e-5


def test_an_adapter_for_another_shape_or_with_a_tensor_less_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = load_base(str(save_tiny_base(tmp_path / "base")))
    save(tmp_path / "heads", heads_for(base), base, policy="joint", adapter=adapted(base))
    file = tmp_path / "heads" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    lame = tmp_path / "lame"
    lame.mkdir()
    save_file(tensors, lame / file.name)
    (lame / "adapter_config.json").write_bytes((file.parent / "adapter_config.json").read_bytes())
    with pytest.raises(UserError, match="1 tensors missing"):
        changed_module.attach_adapter(base.model, lame)


def test_adapter_folder_instead_of_model(tmp_path: Path) -> None:
    base = load_base(str(save_tiny_base(tmp_path / "base")))
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    save(tmp_path / "heads", heads_for(base), base, policy="joint", adapter=tmp_path / "adapter")
    attached, _ = load_with_base(tmp_path / "heads")
    torch.testing.assert_close(logits(attached.model), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("shard", ["4GB", "20KB"])
def test_changed_weights_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str) -> None:
    """Full fine-tuning: the checkpoint carries the whole backbone, in shards where it is large."""
    monkeypatch.setattr(changed_module, "MAX_SHARD", shard)
    base = load_base(str(save_tiny_base(tmp_path / "base", seed=1)))
    trained = copy.deepcopy(base.model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.01)
    save(tmp_path / "heads", heads_for(base), replace(base, model=trained), policy="joint", merged=trained)
    shards = sorted(p.name for p in (tmp_path / "heads" / "backbone").glob("*.safetensors"))
    assert (len(shards) > 2) == (shard == "20KB")
    loaded_base, loaded = load_with_base(tmp_path / "heads", verify="hashes")
    torch.testing.assert_close(logits(loaded_base.model), logits(trained), rtol=0, atol=0)
    assert loaded_base.fingerprint == loaded.manifest.backbone.merged_fingerprint != base.fingerprint
    with pytest.raises(CheckpointError, match="the unchanged model"):
        load_checkpoint(tmp_path / "heads", base)
    with pytest.raises(CheckpointError, match="the unchanged model"):
        load_with_base(tmp_path / "heads", base=str(tmp_path / "base"))
    victim = tmp_path / "heads" / "backbone" / shards[-1]
    victim.rename(victim.with_suffix(".gone"))
    with pytest.raises(CheckpointError, match=victim.name):
        load_with_base(tmp_path / "heads")


def test_sharded_folder_is_taken_over_as_it_is_and_pickles_are_not(tmp_path: Path) -> None:
    base = load_base(str(save_tiny_base(tmp_path / "base")))
    base.model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    save(tmp_path / "heads", heads_for(base), base, policy="joint", merged=tmp_path / "model")
    loaded_base, _ = load_with_base(tmp_path / "heads")
    torch.testing.assert_close(logits(loaded_base.model), logits(base.model), rtol=0, atol=0)
    (tmp_path / "model" / "training_args.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="pickled"):
        save(tmp_path / "heads", heads_for(base), base, policy="joint", merged=tmp_path / "model")
    load_with_base(tmp_path / "heads")


def test_sharded_base_has_the_fingerprint_of_the_whole(tmp_path: Path) -> None:
    base = load_base(str(save_tiny_base(tmp_path / "base")))
    save(tmp_path / "heads", heads_for(base), base)
    base.model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    base.tokenizer.save_pretrained(tmp_path / "sharded")
    _, loaded = load_with_base(tmp_path / "heads", base=str(tmp_path / "sharded"))
    assert json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())["weight_map"]
    assert loaded.manifest.backbone.name == base.name
