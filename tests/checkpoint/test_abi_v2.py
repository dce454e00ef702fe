"""Layout version 2: heads that see more than the hidden state. Plain heads are written as version 1, as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa_train.checkpoint import CheckpointError, HeadsManifest, abi, load_checkpoint
from medusa_train.checkpoint.exporting import refusals
from medusa_train.checkpoint.layouts import FORMATS
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads
from tests.checkpoint.support import random_heads, save_toy, states_equal, toy_backbone


def seeing_heads(contract: str = "own", reads_layer: int | None = None, dtype: torch.dtype = torch.float32):
    config = HeadsConfig(
        contract, 2, 2, 4, 8, 5 if contract == "reduced" else None, sees="parent", reads_layer=reads_layer
    )
    made, generator = MedusaHeads(config, dtype=dtype), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if made.token_map is not None:
            made.token_map.copy_(torch.randperm(8, generator=generator)[:5])
    made.hidden_rms.fill_(1.7)
    return made


@pytest.mark.parametrize("contract", ["own", "shared", "reduced"])
@pytest.mark.parametrize("reads_layer", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact(tmp_path: Path, contract: str, reads_layer: int | None, dtype: torch.dtype) -> None:
    heads = seeing_heads(contract, reads_layer, dtype)
    save_toy(tmp_path / "heads", heads)
    loaded = load_checkpoint(tmp_path / "heads", toy_backbone(), verify="hashes")
    assert states_equal(heads, loaded.heads)
    assert loaded.heads.config == heads.config
    assert loaded.manifest.abi_version == 2
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert (config["sees"], config["reads_layer"], config["checkpoint_abi_version"]) == ("parent", reads_layer, 2)


def test_the_stored_number_stays_fp32_in_bf16_heads(tmp_path: Path) -> None:
    heads = seeing_heads().to(torch.bfloat16)
    save_toy(tmp_path / "heads", heads)
    assert load_checkpoint(tmp_path / "heads").heads.hidden_rms.dtype == torch.float32
    assert load_checkpoint(tmp_path / "heads").manifest.dtype == "BF16"


def test_plain_heads_are_still_version_1_to_the_key(tmp_path: Path) -> None:
    save_toy(tmp_path / "heads", random_heads())
    manifest = json.loads((tmp_path / "heads" / "medusa_manifest.json").read_text())
    assert manifest["abi_version"] == 1
    assert not {"sees", "reads_layer"} & manifest.keys()


def test_a_program_that_knows_version_1_alone_refuses_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_toy(tmp_path / "heads", seeing_heads())
    monkeypatch.setattr(abi, "ABI_VERSION", 1)
    with pytest.raises(CheckpointError, match="layout 2") as raised:
        load_checkpoint(tmp_path / "heads")
    assert {problem.kind for problem in raised.value.problems} == {"abi"}


@pytest.mark.parametrize(
    "change", [{"abi_version": 1}, {"sees": "hidden"}, {"sees": "hidden", "abi_version": 1}, {"reads_layer": 0}]
)
def test_a_manifest_that_lies_about_what_heads_see_is_refused(tmp_path: Path, change: dict) -> None:
    folder = save_toy(tmp_path / "heads", seeing_heads(reads_layer=1))
    content = json.loads((folder / "medusa_manifest.json").read_text()) | change
    with pytest.raises(ValueError):
        HeadsManifest.model_validate(content)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_exports_that_cannot_hold_such_heads_are_refused_with_the_reason(tmp_path: Path, form: str) -> None:
    save_toy(tmp_path / "heads", seeing_heads())
    found = refusals(FORMATS[form], load_checkpoint(tmp_path / "heads"), with_tree=False).found
    assert bool(found) == (form != "medusa")
    assert form == "medusa" or any("see the parent" in problem.what for problem in found)
