"""Exports as the other programs read them: everything consumed, logits equal, or refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_train.checkpoint import CheckpointError, load_checkpoint, load_with_base
from medusa_train.checkpoint.exporting import export_checkpoint
from medusa_train.checkpoint.layouts import FORMATS
from medusa_train.errors import UserError
from medusa_train.modeling.base import Base
from tests.compat import consumers
from tests.compat.conftest import our_logits

LAYERS = [1, 2, 3]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.allclose(f, e, rtol=1e-5, atol=1e-4) for f, e in zip(found, expected, strict=True)
    )


def base_tensors(base: Base) -> dict[str, torch.Tensor]:
    return consumers.read_folder(base.folder)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("contract", ["own", "shared"])
@pytest.mark.parametrize("form", ["vllm", "tgi"])
def test_one_folder_for_vllm_and_tgi(
    tmp_path: Path, checkpoint, base: Base, hidden, contract: str, layers: int, form: str
) -> None:
    folder, heads = checkpoint(contract, 3, layers)
    done = export_checkpoint(folder, tmp_path / "out", form)
    assert done.contract == ("shared" if contract == "shared" and layers == 1 else "own")
    expected = our_logits(heads, base, hidden)
    module, unfilled, unused = consumers.load_vllm(tmp_path / "out")
    assert unfilled == set() and unused == set()
    assert same(module(hidden), expected)
    kind, run = consumers.load_tgi(tmp_path / "out", base_tensors(base))
    assert kind == done.contract and same(run(hidden), expected)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("contract", ["own", "shared"])
def test_trtllm(tmp_path: Path, checkpoint, base: Base, hidden, contract: str, layers: int) -> None:
    folder, heads = checkpoint(contract, 2, layers)
    export_checkpoint(folder, tmp_path / "out", "trtllm")
    assert same(consumers.load_trtllm(tmp_path / "out")(hidden), our_logits(heads, base, hidden))
    assert json.loads((tmp_path / "out" / "medusa_choices.json").read_text()) == [[0], [1], [0, 0], [0, 2]]


def test_own_folder_serves_three_programs(tmp_path: Path, checkpoint, base: Base, hidden) -> None:
    folder, _ = checkpoint("own", 2, 1)
    for form in ("vllm", "tgi", "trtllm"):
        export_checkpoint(folder, tmp_path / form, form)
    files = [
        tmp_path / form / name
        for name in ("config.json", "medusa_lm_head.safetensors")
        for form in ("vllm", "tgi", "trtllm")
    ]
    assert len({path.read_bytes() for path in files}) == 2
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert set(config) == {
        "model_type",
        "medusa_num_heads",
        "medusa_num_layers",
        "hidden_size",
        "vocab_size",
        "medusa_fc_bias",
        "base_model_name_or_path",
    }
    assert config["medusa_fc_bias"] is True and config["model_type"] == "medusa"


def test_lorax_reads_the_shared_folder(tmp_path: Path, checkpoint, base: Base, hidden) -> None:
    folder, heads = checkpoint("shared", 3, 1)
    export_checkpoint(folder, tmp_path / "out", "tgi")
    run = consumers.load_lorax(tmp_path / "out", base_tensors(base)["lm_head.weight"])
    assert same(run(hidden), our_logits(heads, base, hidden))


def make_pt(folder: Path) -> None:
    """The one line that the export prints, for a loader that wants a pickle."""
    torch.save(load_file(folder / "medusa_lm_head.safetensors"), folder / "medusa_lm_head.pt")


def test_fasterdecoding_own_and_shared(tmp_path: Path, checkpoint, base: Base, hidden) -> None:
    lm_head = base_tensors(base)["lm_head.weight"]
    folder, heads = checkpoint("own", 4, 1)
    done = export_checkpoint(folder, tmp_path / "own", "fasterdecoding")
    assert any("torch.save" in note for note in done.notes)
    make_pt(tmp_path / "own")
    run = consumers.load_fasterdecoding_v01(tmp_path / "own", lm_head.shape[0], lm_head.shape[1])
    assert same(run(hidden), our_logits(heads, base, hidden))
    folder, heads = checkpoint("shared", 4, 1)
    export_checkpoint(folder, tmp_path / "shared", "fasterdecoding")
    make_pt(tmp_path / "shared")
    assert set(load_file(tmp_path / "shared" / "medusa_lm_head.safetensors")) == {
        f"{i}.0.linear.{part}" for i in range(4) for part in ("weight", "bias")
    }
    assert same(
        consumers.load_fasterdecoding_head(tmp_path / "shared", lm_head)(hidden), our_logits(heads, base, hidden)
    )


@pytest.mark.parametrize("layers", [2, 3])
def test_fasterdecoding_repeats_one_block(tmp_path: Path, checkpoint, base: Base, hidden, layers: int) -> None:
    """Its loader keeps the last block for all: refused by name, because what it would make of such heads is wrong."""
    folder, heads = checkpoint("own", 2, layers)
    with pytest.raises(CheckpointError, match="builds one block"):
        export_checkpoint(folder, tmp_path / "out", "fasterdecoding")
    assert not (tmp_path / "out").exists()
    export_checkpoint(folder, tmp_path / "forced", "trtllm")
    make_pt(tmp_path / "forced")
    projection = base_tensors(base)["lm_head.weight"]
    run = consumers.load_fasterdecoding_v01(tmp_path / "forced", *projection.shape)
    assert not same(run(hidden), our_logits(heads, base, hidden))
    with torch.no_grad():
        for blocks in heads.blocks:
            for block in blocks[1:]:
                block.linear.load_state_dict(blocks[0].linear.state_dict())
    from medusa_train.checkpoint import save_checkpoint

    save_checkpoint(folder, heads, base, recipe={}, policy="heads_only", data_manifest_hash=None, training={})
    export_checkpoint(folder, tmp_path / "out", "fasterdecoding")
    make_pt(tmp_path / "out")
    run = consumers.load_fasterdecoding_v01(tmp_path / "out", *projection.shape)
    assert same(run(hidden), our_logits(heads, base, hidden))


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("contract", ["own", "shared"])
def test_hf_full(tmp_path: Path, checkpoint, base: Base, hidden, contract: str, layers: int) -> None:
    folder, heads = checkpoint(contract, 2, layers)
    export_checkpoint(folder, tmp_path / "out", "hf-full")
    run, tensors = consumers.load_medusa_2(tmp_path / "out")
    assert same(run(hidden), our_logits(heads, base, hidden))
    original = base_tensors(base)
    assert tensors.keys() == original.keys() and all(torch.equal(tensors[n], original[n]) for n in original)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, base.model.lm_head.weight)


@pytest.mark.parametrize("form", sorted(set(FORMATS) - {"medusa"}))
def test_reduced_heads_are_refused_by_name(tmp_path: Path, checkpoint, form: str) -> None:
    folder, _ = checkpoint("reduced")
    with pytest.raises(CheckpointError, match=r"`reduced` heads \(20 of \d+ tokens\)") as raised:
        export_checkpoint(folder, tmp_path / "out", form)
    assert "train `own` heads" in str(raised.value) and FORMATS[form].program in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_native_export_is_the_checkpoint(tmp_path: Path, checkpoint) -> None:
    folder, _ = checkpoint("reduced")
    export_checkpoint(folder, tmp_path / "out", "medusa", card="# card")
    assert (tmp_path / "out" / "README.md").read_text() == "# card"
    one, two = load_checkpoint(folder, verify="hashes"), load_checkpoint(tmp_path / "out", verify="hashes")
    assert one.manifest == two.manifest


def test_projection_bias_is_refused(tmp_path: Path, base: Base, checkpoint) -> None:
    from medusa_train.checkpoint import save_checkpoint
    from medusa_train.modeling.heads import HeadsConfig, MedusaHeads

    sizes = base.model.config.hidden_size, base.model.config.vocab_size
    heads = MedusaHeads(HeadsConfig("own", 2, 1, *sizes, projection_bias=True))
    arguments = {"recipe": {}, "policy": "heads_only", "data_manifest_hash": None, "training": {}}
    save_checkpoint(tmp_path / "heads", heads, base, **arguments)
    with pytest.raises(CheckpointError, match="projections have a bias"):
        export_checkpoint(tmp_path / "heads", tmp_path / "out", "vllm")


@pytest.mark.parametrize(
    ("paths", "word"),
    [
        ([[rank] for rank in range(17)], r"rank 16, .* 0\.\.15"),
        ([[0] * depth for depth in range(1, 18)], "17 deep"),
        ([[a] for a in range(8)] + [[a, b] for a in range(8) for b in range(7)], "64 nodes"),
    ],
)
def test_tensorrt_limits(tmp_path: Path, checkpoint, paths: list, word: str) -> None:
    folder, _ = checkpoint("shared", 17, 1, tree={"format": 1, "paths": paths, "method": "joint"})
    with pytest.raises(CheckpointError, match=word):
        export_checkpoint(folder, tmp_path / "out", "trtllm")
    export_checkpoint(folder, tmp_path / "out", "trtllm", with_tree=False)
    assert not (tmp_path / "out" / "medusa_choices.json").exists()
    export_checkpoint(folder, tmp_path / "vllm", "vllm")


def test_bf16_travels_as_it_is(tmp_path: Path, checkpoint) -> None:
    folder, heads = checkpoint("own", 2, 1, dtype=torch.bfloat16)
    export_checkpoint(folder, tmp_path / "out", "vllm")
    tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert (
        torch.equal(tensors["1.0.linear.bias"], heads.blocks[1][0].linear.bias)
        and tensors["0.1.weight"].dtype == torch.bfloat16
    )


def test_target_is_guarded(tmp_path: Path, checkpoint) -> None:
    folder, _ = checkpoint()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="something else"):
        export_checkpoint(folder, tmp_path / "mine", "vllm")
    with pytest.raises(UserError, match="fasterdecoding"):
        export_checkpoint(folder, tmp_path / "out", "fasterdecodin")
    for form in ("vllm", "trtllm", "medusa", "tgi"):
        export_checkpoint(folder, tmp_path / "out", form)
        (tmp_path / "out" / ".git").mkdir(exist_ok=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        ".git",
        "config.json",
        "medusa_export.json",
        "medusa_lm_head.safetensors",
    ]


def test_damaged_checkpoint_is_not_exported(tmp_path: Path, checkpoint) -> None:
    folder, _ = checkpoint()
    path = folder / "medusa_heads.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match="sha256"):
        export_checkpoint(folder, tmp_path / "out", "vllm")


# ------------------------------------------------------------------------------- what the traps would have done


@pytest.fixture
def trap(tmp_path: Path, checkpoint, base: Base, hidden) -> Callable[[Callable[[Path], None]], tuple[bool, set, set]]:
    folder, heads = checkpoint("own", 2, 1)
    export_checkpoint(folder, tmp_path / "out", "vllm")

    def spring(change: Callable[[Path], None]) -> tuple[bool, set, set]:
        change(tmp_path / "out")
        module, unfilled, unused = consumers.load_vllm(tmp_path / "out")
        return same(module(hidden), our_logits(heads, base, hidden)), unfilled, unused

    return spring


def without(key: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))

    return change


def test_trap_of_the_dropped_bias(trap) -> None:
    """Without medusa_fc_bias everything loads in silence, and the logits are others: the test above can fail."""
    equal, unfilled, unused = trap(without("medusa_fc_bias"))
    assert not equal and unfilled == set() and unused == {"0.0.linear.bias", "1.0.linear.bias"}


def test_trap_of_the_missing_projection(trap) -> None:
    def change(folder: Path) -> None:
        path = folder / "medusa_lm_head.safetensors"
        save_file({name: tensor for name, tensor in load_file(path).items() if name != "1.1.weight"}, path)

    equal, unfilled, _ = trap(change)
    assert not equal and unfilled == {"lm_heads.1.weight"}


def test_trap_of_the_architectures_key(tmp_path: Path, checkpoint, base: Base) -> None:
    folder, _ = checkpoint("own", 2, 1)
    export_checkpoint(folder, tmp_path / "out", "tgi")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MedusaModel"]}))
    with pytest.raises(RuntimeError, match="never looked at"):
        consumers.load_tgi(tmp_path / "out", base_tensors(base))


# ------------------------------------------------------------------------------------------ changed backbones


@pytest.fixture
def adapted(base: Base):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        copy.deepcopy(base.model), LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"])
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def model_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(4, 24)[None]).logits


@pytest.mark.parametrize("form", ["medusa", "vllm", "trtllm", "hf-full"])
def test_merged_logits_equal_the_adapter_s(tmp_path: Path, checkpoint, adapted, form: str) -> None:
    from transformers import AutoModelForCausalLM

    folder, _ = checkpoint("shared", 2, 1, policy="joint", adapter=adapted)
    export_checkpoint(folder, tmp_path / "out", form, backbone="merged")
    expected = model_logits(adapted)
    if form == "medusa":
        found = load_with_base(tmp_path / "out", verify="hashes")[0].model
    else:
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / ("" if form == "hf-full" else "backbone"))
    gap = (model_logits(found) - expected).abs().max() / expected.abs().max()
    assert gap < 1e-5


def test_adapter_travels_with_the_heads(tmp_path: Path, checkpoint, adapted) -> None:
    from peft import PeftModel

    folder, _ = checkpoint("own", 2, 1, policy="self_distill", adapter=adapted)
    done = export_checkpoint(folder, tmp_path / "out", "vllm")
    assert any("adapter" in note for note in done.notes)
    base_model = copy.deepcopy(adapted.get_base_model())
    clean = load_with_base(folder)[0].model.unload()
    again = PeftModel.from_pretrained(clean, str(tmp_path / "out" / "adapter")).eval()
    assert torch.equal(model_logits(again), model_logits(adapted))
    del base_model


def test_shared_projection_is_the_student_s(tmp_path: Path, checkpoint, adapted, hidden) -> None:
    """The adapter touches lm_head: the copy that travels with shared heads is the changed one."""
    folder, _ = checkpoint("shared", 2, 1, policy="joint", adapter=adapted)
    export_checkpoint(folder, tmp_path / "out", "vllm", backbone="merged")
    served = consumers.read_folder(tmp_path / "out" / "backbone")["lm_head.weight"]
    copied = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")["lm_heads.0.weight"]
    assert torch.equal(copied, served)
    assert not torch.equal(copied, adapted.get_base_model().lm_head.base_layer.weight)


def test_backbone_choices_that_make_no_sense(tmp_path: Path, checkpoint) -> None:
    folder, _ = checkpoint()
    with pytest.raises(UserError, match="unchanged"):
        export_checkpoint(folder, tmp_path / "out", "vllm", backbone="merged")
    with pytest.raises(UserError, match="whole model"):
        export_checkpoint(folder, tmp_path / "out", "hf-full", backbone="adapter")


def test_an_export_shares_no_file_with_the_checkpoint(tmp_path: Path, checkpoint) -> None:
    """Whoever edits the exported folder in place must not change the checkpoint behind its back."""
    folder, _ = checkpoint("own", 2, 1)
    for form in ("medusa", "hf-full"):
        export_checkpoint(folder, tmp_path / form, form)
        for path in (tmp_path / form).rglob("*.json"):
            with open(path, "r+") as handle:
                handle.write(" ")
    load_checkpoint(folder, verify="hashes")
