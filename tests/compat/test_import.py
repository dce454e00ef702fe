"""Other programs' files come in whole, or one error says why not."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from medusa_train.checkpoint import CheckpointError, load_checkpoint, load_with_base
from medusa_train.checkpoint.exporting import export_checkpoint
from medusa_train.checkpoint.importing import Imported, import_heads
from medusa_train.checkpoint.layouts import parse_name
from medusa_train.errors import UserError
from medusa_train.modeling.base import Base
from tests.checkpoint.support import states_equal
from tests.compat import consumers
from tests.compat.conftest import our_logits, trained_heads


def fasterdecoding_state(
    base: Base, heads: int, layers: int, *, shared: bool = False, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A FasterDecoding state dict with random numbers, names as its modules give them."""
    generator = torch.Generator().manual_seed(seed)
    size, vocab = base.model.config.hidden_size, base.model.config.vocab_size
    state = {}
    for i in range(heads):
        for j in range(layers):
            state[f"{i}.{j}.linear.weight"] = torch.randn(size, size, generator=generator)
            state[f"{i}.{j}.linear.bias"] = torch.randn(size, generator=generator)
        if not shared:
            state[f"{i}.{layers}.weight"] = torch.randn(vocab, size, generator=generator)
    return state


def write_fasterdecoding(
    folder: Path, base: Base, state: dict, *, heads: int, layers: int, suffix: str = "pt", **config: object
) -> Path:
    folder.mkdir(exist_ok=True)
    if suffix == "pt":
        torch.save(state, folder / "medusa_lm_head.pt")
    else:
        save_file(state, folder / "medusa_lm_head.safetensors")
    written = {
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": str(base.folder),
    } | config
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def kinds(raised: pytest.ExceptionInfo) -> set[str]:
    return {problem.kind for problem in raised.value.problems}


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_fasterdecoding_own(tmp_path: Path, base: Base, hidden, layers: int, suffix: str) -> None:
    state = fasterdecoding_state(base, 3, layers)
    write_fasterdecoding(tmp_path / "fd", base, state, heads=3, layers=layers, suffix=suffix)
    done = import_heads(tmp_path / "fd", tmp_path / "out")
    assert (done.contract, done.heads, done.layers, done.policy) == ("own", 3, layers, "heads_only")
    loaded = load_checkpoint(tmp_path / "out", base, verify="hashes")
    expected = consumers._tgi_own(state, 3, layers)(hidden)
    for found, wanted in zip(our_logits(loaded.heads, base, hidden), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("everywhere", [True, False])
def test_biases_of_projections_are_kept(tmp_path: Path, base: Base, hidden, everywhere: bool) -> None:
    """An lm_head with a bias gives heads with one; a head that has none in the file has zeros."""
    state = fasterdecoding_state(base, 2, 1)
    biases = [torch.randn(base.model.config.vocab_size), torch.zeros(base.model.config.vocab_size)]
    if everywhere:
        biases[1] = torch.randn(base.model.config.vocab_size)
    for i in range(2 if everywhere else 1):
        state[f"{i}.1.bias"] = biases[i]
    write_fasterdecoding(tmp_path / "fd", base, state, heads=2, layers=1)
    assert import_heads(tmp_path / "fd", tmp_path / "out").contract == "own"
    loaded = load_checkpoint(tmp_path / "out", base, verify="hashes")
    bare = {name: tensor for name, tensor in state.items() if not name.endswith(".1.bias")}
    expected = consumers._tgi_own(bare, 2, 1)(hidden)
    for head, found in enumerate(our_logits(loaded.heads, base, hidden)):
        torch.testing.assert_close(found, expected[head] + biases[head], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
def test_fasterdecoding_shared_and_into_own(tmp_path: Path, base: Base, hidden, layers: int) -> None:
    state = fasterdecoding_state(base, 2, layers, shared=True)
    write_fasterdecoding(tmp_path / "fd", base, state, heads=2, layers=layers, suffix="safetensors", version="2")
    assert import_heads(tmp_path / "fd", tmp_path / "shared").contract == "shared"
    done = import_heads(tmp_path / "fd", tmp_path / "own", contract="own")
    assert done.contract == "own" and any("copy of the base's lm_head" in note for note in done.notes)
    one = our_logits(load_checkpoint(tmp_path / "shared", base).heads, base, hidden)
    two = our_logits(load_checkpoint(tmp_path / "own", base).heads, base, hidden)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_own_into_shared_only_without_loss(tmp_path: Path, base: Base) -> None:
    state = fasterdecoding_state(base, 2, 1)
    write_fasterdecoding(tmp_path / "fd", base, state, heads=2, layers=1)
    with pytest.raises(UserError, match="cannot become `shared`"):
        import_heads(tmp_path / "fd", tmp_path / "out", contract="shared")
    for i in range(2):
        state[f"{i}.1.weight"] = base.model.lm_head.weight.detach().clone()
    write_fasterdecoding(tmp_path / "fd", base, state, heads=2, layers=1)
    assert import_heads(tmp_path / "fd", tmp_path / "out", contract="shared").contract == "shared"


@pytest.mark.parametrize(("in_file", "in_config"), [(3, 5), (5, 3), (5, 2)])
def test_count_lies(tmp_path: Path, base: Base, in_file: int, in_config: int) -> None:
    """Hub configs say 2 where the file has 5: nothing is taken on trust, and with --trust-tensors the tensors win."""
    write_fasterdecoding(tmp_path / "fd", base, fasterdecoding_state(base, in_file, 1), heads=in_config, layers=1)
    with pytest.raises(CheckpointError, match="--trust-tensors") as raised:
        import_heads(tmp_path / "fd", tmp_path / "out")
    assert kinds(raised) == {"count"} and f"says {in_config} heads, the tensors have {in_file}" in str(raised.value)
    assert not (tmp_path / "out").exists()
    done = import_heads(tmp_path / "fd", tmp_path / "out", trust_tensors=True)
    assert done.heads == in_file and any("tensors were taken" in note for note in done.notes)
    assert load_checkpoint(tmp_path / "out", base).manifest.medusa_num_heads == in_file


def test_layer_lies_and_size_lies(tmp_path: Path, base: Base) -> None:
    state = fasterdecoding_state(base, 2, 2)
    claims = {"model_type": "medusa", "hidden_size": 4096, "vocab_size": 32001}
    write_fasterdecoding(tmp_path / "fd", base, state, heads=2, layers=1, **claims)
    with pytest.raises(CheckpointError) as raised:
        import_heads(tmp_path / "fd", tmp_path / "out")
    assert len(raised.value.problems) == 3
    assert import_heads(tmp_path / "fd", tmp_path / "out", trust_tensors=True).layers == 2


@pytest.mark.parametrize("name", ["1.1.weight", "2.0.linear.bias", "0.0.linear.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, base: Base, name: str) -> None:
    state = fasterdecoding_state(base, 3, 1)
    del state[name]
    write_fasterdecoding(tmp_path / "fd", base, state, heads=3, layers=1)
    for trust in (False, True):
        with pytest.raises(CheckpointError) as raised:
            import_heads(tmp_path / "fd", tmp_path / "out", trust_tensors=trust)
        assert kinds(raised) == {"missing"} and [problem.where for problem in raised.value.problems] == [name]


def test_a_missing_last_head_is_a_count_lie(tmp_path: Path, base: Base) -> None:
    state = {name: tensor for name, tensor in fasterdecoding_state(base, 3, 1).items() if not name.startswith("2.")}
    write_fasterdecoding(tmp_path / "fd", base, state, heads=3, layers=1)
    with pytest.raises(CheckpointError, match="says 3 heads, the tensors have 2"):
        import_heads(tmp_path / "fd", tmp_path / "out")


def test_aliased_blocks_become_distinct_and_biases_stay(tmp_path: Path, base: Base) -> None:
    """What the reference saves: one block under two names, its weight zero, its bias random."""
    size, vocab = base.model.config.hidden_size, base.model.config.vocab_size
    heads = nn.ModuleList(
        nn.Sequential(*([consumers.RepeatedBlock(size)] * 2), nn.Linear(size, vocab, bias=False)) for _ in range(2)
    )
    state = heads.state_dict()
    assert state["0.0.linear.weight"].data_ptr() == state["0.1.linear.weight"].data_ptr()
    write_fasterdecoding(tmp_path / "fd", base, state, heads=2, layers=2)
    done = import_heads(tmp_path / "fd", tmp_path / "out")
    assert sum("aliased" in note for note in done.notes) == 4
    loaded = load_checkpoint(tmp_path / "out", base, verify="hashes").heads
    one, two = loaded.blocks[0][0].linear, loaded.blocks[0][1].linear
    assert (
        torch.equal(one.bias, two.bias) and torch.equal(one.bias, state["0.0.linear.bias"]) and one.bias.abs().sum() > 0
    )
    with torch.no_grad():
        one.weight.fill_(1)
    assert two.weight.abs().sum() == 0


class Evil:
    def __reduce__(self) -> tuple:
        return (print, ("this must never run",))


def test_pickles_that_hold_more_than_tensors_are_refused(tmp_path: Path, base: Base, capsys) -> None:
    state = fasterdecoding_state(base, 1, 1)
    contents = {
        "code": {"0.0.linear.weight": Evil()},
        "a number": state | {"epoch": 3},
        "nested": {"state_dict": state},
        "a list": list(state.values()),
        "odd names": {0: state["0.1.weight"]},
        "sparse": {"0.1.weight": torch.eye(3).to_sparse()},
    }
    for label, content in contents.items():
        folder = tmp_path / label.replace(" ", "-")
        write_fasterdecoding(folder, base, content, heads=1, layers=1)
        with pytest.raises(CheckpointError) as raised:
            import_heads(folder, tmp_path / "out")
        assert kinds(raised) == {"unsafe"}, label
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "noise.pt").write_bytes(b"\x00\x01garbage" * 50)
    for name in ("raw.pt", "noise.pt"):
        with pytest.raises(CheckpointError):
            import_heads(tmp_path / name, tmp_path / "out", base=str(base.folder))
    assert "never run" not in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_truncated_pt_is_one_clear_error(tmp_path: Path, base: Base) -> None:
    write_fasterdecoding(tmp_path / "fd", base, fasterdecoding_state(base, 1, 1), heads=1, layers=1)
    raw = (tmp_path / "fd" / "medusa_lm_head.pt").read_bytes()
    for length in (0, 1, 100, len(raw) // 2, len(raw) - 1):
        (tmp_path / "fd" / "medusa_lm_head.pt").write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt"):
            import_heads(tmp_path / "fd", tmp_path / "out")


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("contract", ["own", "shared"])
@pytest.mark.parametrize("form", ["vllm", "tgi", "trtllm", "hf-full"])
def test_what_was_exported_comes_back(
    tmp_path: Path, checkpoint, base: Base, hidden, form: str, contract: str, layers: int
) -> None:
    folder, heads = checkpoint(contract, 3, layers)
    export_checkpoint(folder, tmp_path / "out", form)
    done = import_heads(tmp_path / "out", tmp_path / "again", base=str(base.folder))
    assert done.policy == "heads_only"
    loaded = load_checkpoint(tmp_path / "again", base, verify="hashes").heads
    if done.contract == contract:
        assert states_equal(loaded, heads)
    for found, wanted in zip(our_logits(loaded, base, hidden), our_logits(heads, base, hidden), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_vllm_names(tmp_path: Path, base: Base, hidden) -> None:
    """vLLM's own names, its prefix, and blocks without biases (medusa_fc_bias false)."""
    state = fasterdecoding_state(base, 2, 2)
    renamed = {
        f"medusa_heads.{consumers.VllmHeads.remap(name)}": tensor
        for name, tensor in state.items()
        if "bias" not in name
    }
    (tmp_path / "vllm").mkdir()
    save_file(renamed, tmp_path / "vllm" / "model.safetensors")
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 2, "medusa_fc_bias": False}
    sizes = {"hidden_size": base.model.config.hidden_size, "vocab_size": base.model.config.vocab_size}
    (tmp_path / "vllm" / "config.json").write_text(json.dumps(config | sizes))
    done = import_heads(tmp_path / "vllm", tmp_path / "out", base=str(base.folder))
    assert done.layers == 2 and any("no bias" in note for note in done.notes)
    module = consumers.VllmHeads(config | sizes | {"truncated_vocab_size": sizes["vocab_size"]})
    assert module.load(renamed) == (set(dict(module.named_parameters())), set())
    loaded = load_checkpoint(tmp_path / "out", base).heads
    for found, wanted in zip(our_logits(loaded, base, hidden), module(hidden), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_biases_that_vllm_dropped_are_kept_and_told(tmp_path: Path, base: Base) -> None:
    state = fasterdecoding_state(base, 1, 1)
    write_fasterdecoding(tmp_path / "fd", base, state, heads=1, layers=1, medusa_fc_bias=False)
    done = import_heads(tmp_path / "fd", tmp_path / "out")
    assert any("vLLM dropped" in note for note in done.notes)
    assert torch.equal(load_checkpoint(tmp_path / "out").heads.blocks[0][0].linear.bias, state["0.0.linear.bias"])


def test_vllm_shared_projection_that_is_not_the_lm_head(tmp_path: Path, base: Base) -> None:
    state = fasterdecoding_state(base, 2, 1, shared=True)
    state["lm_heads.0.weight"] = base.model.lm_head.weight.detach() + 1
    write_fasterdecoding(tmp_path / "v", base, state, heads=2, layers=1, suffix="safetensors", original_lm_head=True)
    done = import_heads(tmp_path / "v", tmp_path / "out")
    assert done.contract == "own" and any("not the base's lm_head" in note for note in done.notes)
    write_fasterdecoding(tmp_path / "v", base, state, heads=2, layers=1, suffix="safetensors")
    with pytest.raises(CheckpointError, match="head 1 has no projection"):
        import_heads(tmp_path / "v", tmp_path / "out")


@pytest.mark.parametrize("whole_rows", [False, True])
def test_vllm_token_map_becomes_reduced(tmp_path: Path, base: Base, whole_rows: bool) -> None:
    state = fasterdecoding_state(base, 2, 1)
    token_map = torch.tensor([5, 3, 9, 20])
    full = {name: tensor.clone() for name, tensor in state.items() if name.endswith(".1.weight")}
    if not whole_rows:
        state |= {name: tensor[token_map].clone() for name, tensor in full.items()}
    state["token_map"] = token_map
    write_fasterdecoding(tmp_path / "v", base, state, heads=2, layers=1, suffix="safetensors", truncated_vocab_size=4)
    assert import_heads(tmp_path / "v", tmp_path / "out").contract == "reduced"
    heads = load_checkpoint(tmp_path / "out", base).heads
    assert heads.token_map.tolist() == [5, 3, 9, 20]
    assert torch.equal(heads.projections[1].weight, full["1.1.weight"][token_map])


def test_medusa_2_keeps_its_backbone(tmp_path: Path, checkpoint, base: Base, hidden) -> None:
    """Base weights that differ from the base go along; the loaded model computes with them."""
    import copy

    folder, heads = checkpoint("own", 2, 1)
    export_checkpoint(folder, tmp_path / "full", "hf-full")
    trained = copy.deepcopy(base.model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.02)
    shard = tmp_path / "full" / "model-00001-of-00002.safetensors"
    tensors = {name: tensor + 0.02 for name, tensor in load_file(shard).items()}
    save_file(tensors, shard, metadata={"format": "pt"})
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    (tmp_path / "full" / "config.json").write_text(json.dumps(config | {"architectures": ["MedusaModelLlama"]}))
    done = import_heads(tmp_path / "full", tmp_path / "out", base=str(base.folder))
    assert done.policy == "joint" and done.contract == "own"
    loaded_base, loaded = load_with_base(tmp_path / "out", verify="hashes")
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded_base.model(ids).logits, trained(ids).logits, rtol=0, atol=0)
    assert states_equal(loaded.heads, heads)
    names = load_file(tmp_path / "out" / "backbone" / "model.safetensors")
    assert not any("medusa" in name for name in names)
    assert "medusa_num_heads" not in json.loads((tmp_path / "out" / "backbone" / "config.json").read_text())
    with pytest.raises(CheckpointError, match="unchanged model"):
        load_checkpoint(tmp_path / "out", base)


@pytest.mark.parametrize("damage", ["shard", "tensor"])
def test_an_incomplete_medusa_2_folder_is_refused(tmp_path: Path, checkpoint, base: Base, damage: str) -> None:
    """What its backbone lacks was made up at random, differently at each load."""
    folder, _ = checkpoint("own", 2, 1)
    export_checkpoint(folder, tmp_path / "full", "hf-full")
    full, name = tmp_path / "full", "model.layers.1.mlp.down_proj.weight"
    shard = full / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    part = {name: tensors.pop(name)}
    save_file(tensors, shard, metadata={"format": "pt"})
    if damage == "shard":
        save_file(part, full / "model-00003-of-00003.safetensors", metadata={"format": "pt"})
        index = json.loads((full / "model.safetensors.index.json").read_text())
        index["weight_map"][name] = "model-00003-of-00003.safetensors"
        (full / "model.safetensors.index.json").write_text(json.dumps(index))
        (full / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="model-00003-of-00003" if damage == "shard" else name):
        import_heads(full, tmp_path / "out", base=str(base.folder))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_pickled_backbone_beside_the_heads_counts(tmp_path: Path, base: Base, suffix: str) -> None:
    """It was dropped, and the heads imported as if the base were unchanged."""
    folder = tmp_path / "fd"
    write_fasterdecoding(folder, base, fasterdecoding_state(base, 2, 1), heads=2, layers=1, suffix=suffix)
    config = json.loads((base.folder / "config.json").read_text()) | json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    changed = {name: tensor + 0.02 for name, tensor in base.model.state_dict().items()}
    torch.save(changed, folder / "pytorch_model.bin")
    assert import_heads(folder, tmp_path / "out", base=str(base.folder)).policy == "joint"
    with torch.no_grad():
        stored = load_with_base(tmp_path / "out")[0].model.lm_head.weight
    assert torch.equal(stored, changed["lm_head.weight"])


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_an_adapter_beside_the_heads_is_refused(tmp_path: Path, base: Base, name: str) -> None:
    write_fasterdecoding(tmp_path / "fd", base, fasterdecoding_state(base, 2, 1), heads=2, layers=1)
    save_file({"base_model.x.lora_A.weight": torch.ones(2, 2)}, tmp_path / "fd" / name)
    with pytest.raises(UserError, match="an adapter lies beside the heads"):
        import_heads(tmp_path / "fd", tmp_path / "out")


@pytest.mark.parametrize(
    "token_map", [torch.tensor([1, 2, 10**6, 3]), torch.tensor([-1, 2, 4, 3]), torch.ones(4), torch.tensor(3)]
)
@pytest.mark.parametrize("whole_rows", [False, True])
def test_a_token_map_that_names_no_tokens(tmp_path: Path, base: Base, token_map: torch.Tensor, whole_rows) -> None:
    state = fasterdecoding_state(base, 1, 1)
    if not whole_rows:
        state["0.1.weight"] = state["0.1.weight"][:4].clone()
    write_fasterdecoding(tmp_path / "v", base, state | {"token_map": token_map}, heads=1, layers=1)
    with pytest.raises(CheckpointError, match="token_map"):
        import_heads(tmp_path / "v", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("0.0.linear.weight", torch.ones(32, 32).to(torch.float8_e4m3fn)),
        ("0.0.linear.bias", torch.ones(32, device="meta")),
        ("0.0.linear.bias", torch.tensor(1.0)),
        ("300000.0.linear.weight", torch.ones(32, 32)),
        ("0.300000.linear.weight", torch.ones(32, 32)),
    ],
)
def test_odd_tensors_are_one_short_error(tmp_path: Path, base: Base, name: str, tensor: torch.Tensor) -> None:
    state = fasterdecoding_state(base, 1, 1) | {name: tensor}
    write_fasterdecoding(tmp_path / "fd", base, state, heads=1, layers=1)
    with pytest.raises(CheckpointError, match=name) as raised:
        import_heads(tmp_path / "fd", tmp_path / "out")
    assert len(raised.value.problems) <= 2


def test_medusa_2_with_the_base_s_own_weights_is_medusa_1(tmp_path: Path, checkpoint, base: Base) -> None:
    folder, _ = checkpoint("own", 2, 1)
    export_checkpoint(folder, tmp_path / "full", "hf-full")
    done = import_heads(tmp_path / "full", tmp_path / "out", base=str(base.folder))
    assert done.policy == "heads_only" and any("bit for bit" in note for note in done.notes)


def test_modelopt_folder_and_its_pickle_is_never_opened(tmp_path: Path, base: Base) -> None:
    state = fasterdecoding_state(base, 4, 1)
    consumers.write_modelopt(tmp_path / "mo", base.folder, state, 4, 1)
    done = import_heads(tmp_path / "mo", tmp_path / "out", base=str(base.folder))
    assert (done.heads, done.layers, done.contract, done.policy) == (4, 1, "own", "heads_only")
    heads = load_checkpoint(tmp_path / "out", base).heads
    assert torch.equal(heads.projections[3].weight, state["3.1.weight"])
    config = json.loads((tmp_path / "mo" / "config.json").read_text())
    config["medusa"]["medusa_num_heads"] = 2
    (tmp_path / "mo" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"medusa\.medusa_num_heads says 2 heads|says 2 heads"):
        import_heads(tmp_path / "mo", tmp_path / "out", base=str(base.folder))


def test_all_faults_at_once(tmp_path: Path, base: Base) -> None:
    state = fasterdecoding_state(base, 3, 1)
    del state["0.1.weight"]
    state["1.0.linear.weight"] = state["1.0.linear.weight"][:, :-1].clone()
    state["2.0.linear.bias"][0] = float("nan")
    state["1.1.weight"] = torch.zeros(0, base.model.config.hidden_size)
    write_fasterdecoding(tmp_path / "fd", base, state, heads=9, layers=1)
    with pytest.raises(CheckpointError) as raised:
        import_heads(tmp_path / "fd", tmp_path / "out")
    assert kinds(raised) >= {"missing", "shape", "non-finite", "empty", "count"}


def test_strangers_in_a_heads_file(tmp_path: Path, base: Base) -> None:
    state = fasterdecoding_state(base, 1, 1) | {"temperature": torch.ones(1)}
    write_fasterdecoding(tmp_path / "fd", base, state, heads=1, layers=1)
    with pytest.raises(CheckpointError, match=r"\[temperature\]"):
        import_heads(tmp_path / "fd", tmp_path / "out")


def test_mixed_layouts_and_mixed_dtypes(tmp_path: Path, base: Base) -> None:
    state = fasterdecoding_state(base, 1, 1)
    state["blocks.0.layers.0.weight"] = state["0.0.linear.weight"].clone()
    write_fasterdecoding(tmp_path / "fd", base, state, heads=1, layers=1)
    with pytest.raises(CheckpointError, match="two layouts"):
        import_heads(tmp_path / "fd", tmp_path / "out")
    state = fasterdecoding_state(base, 1, 1)
    state["0.0.linear.bias"] = state["0.0.linear.bias"].bfloat16()
    write_fasterdecoding(tmp_path / "fd", base, state, heads=1, layers=1)
    done = import_heads(tmp_path / "fd", tmp_path / "out")
    assert any("mixed dtypes" in note for note in done.notes)
    assert load_checkpoint(tmp_path / "out").manifest.dtype == "F32"


def test_tree_comes_in_with_the_heads(tmp_path: Path, base: Base) -> None:
    write_fasterdecoding(tmp_path / "fd", base, fasterdecoding_state(base, 2, 1), heads=2, layers=1)
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    import_heads(tmp_path / "fd", tmp_path / "out", tree=tmp_path / "tree.json")
    assert load_checkpoint(tmp_path / "out").tree["paths"] == [[0], [1], [0, 0]]
    (tmp_path / "tree.json").write_text("[[0], [0, 0], [0, 0, 0]]")
    with pytest.raises(UserError, match="3 deep"):
        import_heads(tmp_path / "fd", tmp_path / "out2", tree=tmp_path / "tree.json")
    assert not (tmp_path / "out2").exists()


def test_wrong_sources(tmp_path: Path, base: Base, checkpoint) -> None:
    folder, _ = checkpoint()
    with pytest.raises(UserError, match="already"):
        import_heads(folder, tmp_path / "out")
    with pytest.raises(UserError, match="nothing there"):
        import_heads(tmp_path / "nowhere" / "deep" / "x", tmp_path / "out")
    with pytest.raises(UserError, match="named like"):
        import_heads(base.folder, tmp_path / "out")
    (tmp_path / "heads.pt").write_bytes(b"")
    with pytest.raises(CheckpointError):
        import_heads(tmp_path / "heads.pt", tmp_path / "out", base=str(base.folder))
    torch.save(fasterdecoding_state(base, 1, 1), tmp_path / "heads.pt")
    with pytest.raises(UserError, match="--base"):
        import_heads(tmp_path / "heads.pt", tmp_path / "out")
    assert isinstance(import_heads(tmp_path / "heads.pt", tmp_path / "out", base=str(base.folder)), Imported)


def test_heads_of_a_wider_base(tmp_path: Path, base: Base) -> None:
    state = {
        name: torch.randn(8, 8) if "weight" in name else torch.randn(8)
        for name in ("0.0.linear.weight", "0.0.linear.bias")
    }
    write_fasterdecoding(tmp_path / "fd", base, state, heads=1, layers=1)
    with pytest.raises(CheckpointError, match="another backbone"):
        import_heads(tmp_path / "fd", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0.0.linear.weight", ("fasterdecoding", "block", 0, 0, "weight")),
        ("11.2.weight", ("fasterdecoding", "projection", 11, 2, "weight")),
        ("medusa_head.1.0.linear.bias", ("medusa-2", "block", 1, 0, "bias")),
        ("medusa_heads.1.1.weight", ("modelopt", "projection", 1, 1, "weight")),
        ("medusa_heads.blocks.1.layers.0.weight", ("vllm", "block", 1, 0, "weight")),
        ("lm_heads.3.weight", ("vllm", "projection", 3, -1, "weight")),
        ("token_map", ("vllm", "token_map", 0, 0, "weight")),
        ("model.layers.0.mlp.up_proj.weight", None),
        ("lm_head.weight", None),
        ("00.0.linear.weight", None),
        ("blocks.0.0.linear.weight", None),
    ],
)
def test_names(name: str, expected: tuple | None) -> None:
    slot = parse_name(name)
    assert (slot and (slot.layout, slot.kind, slot.head, slot.layer, slot.part)) == expected


def test_reference_heads_are_random_enough(base: Base) -> None:
    """The round trips above could not tell two heads apart if they were equal."""
    heads = trained_heads(base, "own", 2, 1)
    assert not torch.equal(heads.projections[0].weight, heads.projections[1].weight)
