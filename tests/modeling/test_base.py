"""Finding and loading a base: names, folders, hashes; wrong names end in one clear error."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_train.config.bases import BASES
from medusa_train.errors import UserError
from medusa_train.modeling.base import load_base, load_tokenizer
from medusa_train.modeling.fingerprint import fingerprint_folder
from medusa_train.modeling.sources import find_source
from tests.tiny import CHATML, save_tiny_base


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def folder(tmp_path):
    return save_tiny_base(tmp_path / "base")


def test_a_local_folder_loads(folder):
    base = load_base(str(folder), dtype="float32", device="cpu")
    assert base.name == str(folder)
    assert base.revision is None
    assert base.chat_template == CHATML
    assert base.model.dtype == torch.float32
    assert not base.model.training
    assert len(base.fingerprint) == 64


def test_the_fingerprint_sees_every_part_and_nothing_else(folder, tmp_path):
    original = fingerprint_folder(folder)
    assert fingerprint_folder(folder) == original  # from the cache

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert fingerprint_folder(copy) == original

    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"transformers_version": "0", "_name_or_path": "elsewhere"}))
    assert fingerprint_folder(copy) == original
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert fingerprint_folder(copy) != original
    (copy / "config.json").write_text(json.dumps(config))

    weights = load_file(copy / "model.safetensors")
    names = sorted(weights)
    half = len(names) // 2
    for shard, part in enumerate((names[:half], names[half:])):
        save_file({name: weights[name] for name in part}, copy / f"model-{shard}.safetensors", {"format": "pt"})
    (copy / "model.safetensors").unlink()
    assert fingerprint_folder(copy) == original, "re-sharding is no other model"

    first = weights[names[0]].flatten()
    first[0] += 1e-3
    save_file({name: weights[name] for name in names[:half]}, copy / "model-0.safetensors", {"format": "pt"})
    assert fingerprint_folder(copy) != original


def test_an_explicit_template_wins(folder, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert load_tokenizer(str(folder), chat_template=str(template)).chat_template == "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match="chat template cannot be read"):
        load_tokenizer(str(folder), chat_template=str(tmp_path / "absent.jinja"))


def test_no_template_is_an_error_with_the_way_out(tmp_path):
    folder = save_tiny_base(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template") as problem:
        load_tokenizer(str(folder))
    assert "--chat-template FILE" in str(problem.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2-135m", ["no base named", "did you mean 'smollm2-135m'"]),
        ("", ["empty"]),
        ("./nowhere", ["no folder"]),
        ("nobody/nothing", ["not in the local cache", "connect to the network"]),
    ],
)
def test_names_that_lead_nowhere(name, words):
    with pytest.raises(UserError) as problem:
        find_source(name)
    for word in words:
        assert word in str(problem.value)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        find_source(str(tmp_path))


def test_unknown_dtype_and_quantization(folder):
    with pytest.raises(UserError, match="allowed: auto, bfloat16"):
        load_base(str(folder), dtype="bf16")
    with pytest.raises(UserError, match="allowed: 8bit, 4bit"):
        load_base(str(folder), quantization="3bit", device="cpu")


def test_consolidated_weights_are_no_other_model(folder):
    original = fingerprint_folder(folder)
    save_file({"tok_embeddings.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    assert fingerprint_folder(folder) == original


def test_heads_are_never_bound_to_part_of_a_model(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    with pytest.raises(UserError, match="model-00002-of-00003"):
        fingerprint_folder(folder)


@pytest.mark.parametrize("evidence", ["index", "names"])
def test_an_interrupted_download_is_resumed(folder, tmp_path, monkeypatch, evidence):
    import huggingface_hub

    calls = []
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)
    if evidence == "index":
        index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")

    def download(repo_id, local_files_only=False, **_):
        calls.append(local_files_only)
        return str(folder if local_files_only else whole)

    class Api:
        def model_info(self, *_, **__):
            return type("Info", (), {"siblings": ()})()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert find_source("some/base").folder == whole
    assert calls == [True, False]


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_tensor_is_never_made_up(folder):
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(folder, lambda weights: weights.pop(name))
    with pytest.raises(UserError, match=name):
        load_base(str(folder), device="cpu")


def test_tied_embeddings_are_not_missing(tmp_path):
    folder = save_tiny_base(tmp_path / "base", "llama-tied")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    load_base(str(folder), device="cpu")


@pytest.mark.parametrize("damage", ["pointer", "truncated", "empty"])
def test_damaged_weights_name_the_file(folder, damage):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    path.write_bytes({"pointer": pointer, "truncated": raw[: len(raw) // 2], "empty": b""}[damage])
    with pytest.raises(UserError, match=r"model\.safetensors") as problem:
        load_base(str(folder), device="cpu")
    assert "git lfs pull" in str(problem.value)


def test_a_tensor_of_another_shape_is_refused(folder):
    name = "model.norm.weight"
    rewrite(folder, lambda weights: weights.update({name: torch.ones(31)}))
    with pytest.raises(UserError, match="do not fit"):
        load_base(str(folder), device="cpu")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(folder, name, value):
    rewrite(folder, lambda weights: weights[name].view(-1)[7:8].fill_(value))
    with pytest.raises(UserError, match=name):
        load_base(str(folder), device="cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "gpu"])
def test_a_device_that_is_not_there(folder, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=f"device '{device}'"):
        load_base(str(folder), device=device)


def test_a_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError):
        load_base(str(folder), device="cpu")


def test_every_alias_names_a_repository():
    for name, alias in BASES.items():
        assert name == name.lower()
        assert alias.repo_id.count("/") == 1


def test_vicuna_renders_fastchats_bytes():
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = ImmutableSandboxedEnvironment().from_string(BASES["vicuna-7b"].chat_template)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    rendered = template.render(messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
    # FastChat, conv "vicuna_v1.1": system + " ", then "USER: m ", "ASSISTANT: m</s>", and "ASSISTANT:" at the end.
    assert rendered == (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:"
    )
