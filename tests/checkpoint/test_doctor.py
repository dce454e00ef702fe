"""doctor: healthy or not, heads that learnt nothing are named, and what would stop the other commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from medusa_train.checkpoint import save_checkpoint
from medusa_train.checkpoint.doctor import Diagnosis, examine_checkpoint, examine_environment
from medusa_train.cli.app import main
from medusa_train.modeling.backbone import output_projection
from medusa_train.modeling.base import Base, load_base
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, new_heads
from tests.tiny import save_tiny_base


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_TRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return load_base(str(save_tiny_base(tmp_path / "base", "llama-tied")))


def heads_of(base: Base, contract: str, heads: int = 3, layers: int = 1) -> MedusaHeads:
    projection = output_projection(base.model)
    token_map = torch.arange(0, 60, 2) if contract == "reduced" else None
    config = HeadsConfig(
        contract,
        heads,
        layers,
        projection.hidden_size,
        projection.vocab_size,
        reduced_vocab_size=30 if contract == "reduced" else None,
    )
    return new_heads(config, projection, token_map)


def save(folder: Path, heads: MedusaHeads, base: Base, **more: object) -> Path:
    arguments = {"recipe": {}, "policy": "heads_only", "data_manifest_hash": None, "training": {}} | more
    return save_checkpoint(folder, heads, base, **arguments)


def examine(folder: Path, base: str | None = None) -> Diagnosis:
    diagnosis = Diagnosis(checkpoint=str(folder))
    examine_environment(diagnosis)
    examine_checkpoint(folder, diagnosis, base)
    json.dumps(diagnosis.to_dict())
    return diagnosis


@pytest.mark.parametrize("contract", ["own", "shared", "reduced"])
def test_untrained_heads_are_named_and_trained_ones_are_not(tmp_path: Path, base: Base, contract: str) -> None:
    heads = heads_of(base, contract)
    with torch.no_grad():
        heads.blocks[1][0].linear.bias[0] = 0.5
    found = examine(save(tmp_path / "heads", heads, base))
    assert found.healthy and found.base == "same"
    assert [head.state for head in found.heads] == ["untrained", "trained", "untrained"]
    assert any("head 0 is untrained" in warning for warning in found.warnings)
    assert not any("head 1" in warning for warning in found.warnings)


def test_distance_from_lm_head_is_a_relative_norm(tmp_path: Path, base: Base) -> None:
    heads = heads_of(base, "own", heads=2)
    with torch.no_grad():
        heads.projections[1].weight.mul_(1.25)
    found = examine(save(tmp_path / "heads", heads, base))
    assert found.heads[0].projection_distance == 0
    assert found.heads[1].projection_distance == pytest.approx(0.25, rel=1e-5)
    assert found.heads[1].projection_norm == pytest.approx(1.25 * found.heads[0].projection_norm, rel=1e-5)


def test_dead_copied_and_half_trained_heads(tmp_path: Path, base: Base) -> None:
    heads = heads_of(base, "own", heads=5, layers=2)
    with torch.no_grad():
        for blocks in heads.blocks:
            blocks[0].linear.weight.fill_(0.1)
            blocks[1].linear.bias.fill_(0.1)
        heads.projections[1].weight.zero_()
        heads.projections[2].weight.copy_(
            heads.projections[2].weight[:1].expand_as(heads.projections[2].weight).clone()
        )
        heads.blocks[4][1].linear.bias.zero_()
    found = examine(save(tmp_path / "heads", heads, base))
    assert [head.state for head in found.heads] == ["trained", "dead", "dead", "trained", "trained"]
    text = "\n".join(found.warnings)
    assert "head 3 is a copy of head 0" in text and "head 4: layers [1] are still the identity" in text


def test_what_would_stop_the_others(tmp_path: Path, base: Base) -> None:
    heads = heads_of(base, "reduced")
    with torch.no_grad():
        for blocks in heads.blocks:
            blocks[0].linear.bias.normal_()
    recipe = {"base": {"quantization": "4bit"}, "training": {"deepspeed": "ds.json"}}
    folder = save(tmp_path / "heads", heads, base, recipe=recipe)
    found = examine(folder)
    assert found.healthy
    assert "export --format medusa" not in found.stops and "eval-acceptance" not in found.stops
    for form in ("vllm", "tgi", "trtllm", "fasterdecoding", "hf-full"):
        assert "`reduced` heads" in found.stops[f"export --format {form}"][0]
    absent = [name for name in ("bitsandbytes", "deepspeed") if not found.extras[name]["present"]]
    assert len(found.stops.get("fit", [])) == len(absent)


def test_damage_and_another_base(tmp_path: Path, base: Base) -> None:
    folder = save(tmp_path / "heads", heads_of(base, "own"), base)
    other = save_tiny_base(tmp_path / "other", "llama-tied", seed=9)
    found = examine(folder, str(other))
    assert not found.healthy and found.base == "different" and {p.kind for p in found.problems} == {"backbone"}
    path = folder / "medusa_heads.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    found = examine(folder)
    assert not found.healthy and found.base == "same"
    assert any("projections.2.weight" in problem.where for problem in found.problems)
    assert all(found.stops[name] for name in ("fit", "eval-acceptance", "export --format vllm"))


def test_a_base_that_is_gone_is_said_and_is_no_fault(tmp_path: Path, base: Base) -> None:
    import shutil

    folder = save(tmp_path / "heads", heads_of(base, "own"), base)
    shutil.rmtree(base.folder)
    found = examine(folder)
    assert found.healthy and found.base == "not found"
    assert found.stops["eval-acceptance"] and "export --format vllm" not in found.stops
    assert "is not here" in found.stops["export --format hf-full"][0]
    assert found.heads[0].projection_distance is None
    assert not examine(folder, str(tmp_path / "nowhere")).healthy


def test_shared_heads_need_the_base_for_export(tmp_path: Path, base: Base) -> None:
    import shutil

    folder = save(tmp_path / "heads", heads_of(base, "shared"), base)
    shutil.rmtree(base.folder)
    stops = examine(folder).stops
    assert {"export --format vllm", "export --format tgi", "export --format trtllm"} <= stops.keys()
    assert "export --format fasterdecoding" not in stops and "export --format medusa" not in stops


def test_changed_backbones_are_examined_too(tmp_path: Path, base: Base) -> None:
    import copy

    from peft import LoraConfig, get_peft_model

    heads = heads_of(base, "own")
    adapted = get_peft_model(copy.deepcopy(base.model), LoraConfig(r=2, target_modules=["q_proj"]))
    found = examine(save(tmp_path / "adapter", heads, base, policy="joint", adapter=adapted))
    assert found.healthy and found.base == "same" and found.summary["backbone"] == "adapter"
    assert found.heads[0].projection_distance == 0
    trained = copy.deepcopy(base.model)
    with torch.no_grad():
        trained.get_output_embeddings().weight.mul_(2)
    folder = save(tmp_path / "merged", heads, base, policy="joint", merged=trained)
    found = examine(folder)
    assert found.healthy and found.base == "same" and found.summary["backbone"] == "merged"
    # Against the changed lm_head, twice as large, the heads stand half of its norm away.
    assert found.heads[0].projection_distance == pytest.approx(0.5, rel=1e-5)
    assert not examine(folder, base.name).healthy


def test_command_line_exit_codes_and_json(tmp_path: Path, base: Base, capsys, monkeypatch) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["medusa-train", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0), *capsys.readouterr()

    folder = save(tmp_path / "heads", heads_of(base, "shared"), base)
    code, stdout, _ = run("doctor", str(folder), "--json")
    assert code == 0
    content = json.loads(stdout)
    assert content["healthy"] and content["summary"]["contract"] == "shared" and len(content["heads"]) == 3
    (folder / "config.json").write_text("{}")
    code, stdout, stderr = run("doctor", str(folder))
    assert code == 1 and "not healthy" in stdout and "config.json" in stderr
    code, stdout, stderr = run("doctor", str(tmp_path / "nowhere"))
    assert code == 2 and "no checkpoint there" in stderr
    code, stdout, _ = run("doctor")
    assert code == 0 and "machine" in stdout
