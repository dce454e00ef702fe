"""Every way a checkpoint can go bad is detected, named, and never a traceback."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_train.checkpoint import CheckpointError, load_checkpoint
from medusa_train.checkpoint.manifest import FileEntry, read_manifest
from medusa_train.checkpoint.problems import Problems
from medusa_train.checkpoint.tensorfile import read_header
from medusa_train.provenance import sha256_file
from tests.checkpoint.support import random_heads, save_toy, toy_backbone

HEADS, MANIFEST, CONFIG, TREE = "medusa_heads.safetensors", "medusa_manifest.json", "config.json", "tree.json"
FILES = (HEADS, MANIFEST, CONFIG, TREE)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp("corruption") / "heads")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(pristine, tmp_path / "heads")
    yield tmp_path / "heads"


def faults(folder: Path, verify: str = "hashes") -> set[str]:
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(folder, toy_backbone(), verify=verify)
    assert raised.value.problems and "to mend it" in str(raised.value)
    return {problem.kind for problem in raised.value.problems}


def reseal(folder: Path) -> None:
    """Makes the manifest vouch for the files as they are, so that only the structural checks can object."""
    manifest = read_manifest(folder, Problems())
    header = read_header(folder / HEADS, Problems())
    files = {
        name: FileEntry(bytes=(folder / name).stat().st_size, sha256=sha256_file(folder / name))
        for name in manifest.files
        if (folder / name).exists()
    }
    changes = {"files": files}
    if header is not None:
        changes["header_sha256"] = header.header_sha256
        changes["tensors"] = {name: digest for name, digest in header.digests().items()}
    (folder / MANIFEST).write_bytes(manifest.model_copy(update=changes).sealed_bytes())


@pytest.mark.parametrize("name", FILES)
def test_every_byte_flip_is_detected(folder: Path, name: str) -> None:
    path, rng = folder / name, random.Random(name)
    raw = path.read_bytes()
    for place in range(len(raw)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ rng.randrange(1, 256)]) + raw[place + 1 :])
        faults(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_bit_flip_is_detected(folder: Path, name: str) -> None:
    path = folder / name
    raw = path.read_bytes()
    for place in range(len(raw)):
        for bit in range(8):
            path.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << bit)]) + raw[place + 1 :])
            faults(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("step", [pytest.param(5, id="each 5th"), pytest.param(1, id="each", marks=pytest.mark.slow)])
def test_every_truncation_is_detected(folder: Path, name: str, step: int) -> None:
    path = folder / name
    raw = path.read_bytes()
    for length in sorted({*range(0, len(raw), step), *range(min(64, len(raw))), len(raw) - 1}):
        path.write_bytes(raw[:length])
        faults(folder, verify="sizes")
    path.write_bytes(raw + b" ")
    faults(folder, verify="sizes")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("verify", ["sizes", "hashes"])
def test_removed_and_renamed_files(folder: Path, name: str, verify: str) -> None:
    (folder / name).rename(folder / f"other-{name}")
    assert "missing" in faults(folder, verify)
    (folder / f"other-{name}").unlink()
    assert "missing" in faults(folder, verify)


def test_a_directory_where_a_file_belongs(folder: Path) -> None:
    for name in FILES:
        saved = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).mkdir()
        assert "missing" in faults(folder)
        (folder / name).rmdir()
        (folder / name).write_bytes(saved)
    load_checkpoint(folder, verify="hashes")


@pytest.mark.parametrize(
    "name", ["extra.safetensors", "medusa_lm_head.pt", "pytorch_model.bin", "adapter/adapter_config.json"]
)
def test_foreign_weights_are_unexpected(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    assert faults(folder, "sizes") == {"unexpected"}


def test_notes_and_hidden_folders_of_the_hub_are_let_be(folder: Path) -> None:
    (folder / "README.md").write_text("card")
    (folder / ".gitattributes").write_text("*")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.json").write_text("{}")
    load_checkpoint(folder, verify="hashes")


def test_swapped_heads_are_named(folder: Path) -> None:
    tensors = load_file(folder / HEADS)
    one, two = "projections.0.weight", "projections.1.weight"
    tensors[one], tensors[two] = tensors[two], tensors[one]
    save_file(tensors, folder / HEADS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(folder, verify="hashes")
    text = str(raised.value)
    assert "written as projections.1.weight: swapped" in text and "written as projections.0.weight: swapped" in text


def test_names_swapped_in_the_header_show_without_hashing_the_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_train.checkpoint import inspect_

    monkeypatch.setattr(inspect_, "SMALL_FILE_BYTES", 0)
    raw = (folder / HEADS).read_bytes()
    swapped = raw.replace(b"projections.0", b"projections.x").replace(b"projections.1", b"projections.0")
    (folder / HEADS).write_bytes(swapped.replace(b"projections.x", b"projections.1"))
    assert faults(folder, "sizes") == {"hash"}


def edit(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / HEADS)
        change(tensors)
        save_file(tensors, folder / HEADS, metadata={"format": "pt"})

    return apply


BLOCK = "blocks.1.0.linear.weight"


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (edit(lambda t: t.pop("blocks.0.0.linear.bias")), {"missing", "manifest"}),
        (edit(lambda t: t.update(extra=torch.zeros(1))), {"unexpected", "manifest"}),
        (
            edit(lambda t: t.update({"blocks.0.0.linear.gain": t.pop("blocks.0.0.linear.bias")})),
            {"missing", "unexpected", "manifest"},
        ),
        (edit(lambda t: t.update({BLOCK: torch.zeros(4, 5)})), {"shape"}),
        (edit(lambda t: t.update({BLOCK: torch.zeros(0, 4)})), {"empty"}),
        (edit(lambda t: t.update({BLOCK: t[BLOCK].half()})), {"dtype"}),
        (edit(lambda t: t[BLOCK].fill_(float("inf"))), {"non-finite"}),
        (
            edit(lambda t: [t.pop(name) for name in list(t) if ".1." in name and not name.startswith("blocks.0")]),
            {"missing", "count", "manifest"},
        ),
        (
            edit(lambda t: t.update({"blocks.2.0.linear.weight": torch.zeros(4, 4)})),
            {"unexpected", "count", "manifest"},
        ),
    ],
    ids=[
        "bias gone",
        "extra",
        "renamed",
        "shape",
        "empty",
        "dtype",
        "non-finite",
        "a head gone",
        "half a head too many",
    ],
)
def test_tensor_faults_are_found_without_hashes(folder: Path, change: Callable[[Path], None], kinds: set[str]) -> None:
    """The file and the manifest agree byte for byte; only the structure is wrong."""
    change(folder)
    reseal(folder)
    assert faults(folder, "sizes") == kinds


def test_aliased_bytes(folder: Path) -> None:
    """Two names over one byte range: a form that no writer produces and a reader must not accept."""
    raw = (folder / HEADS).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header["blocks.1.0.linear.weight"]["data_offsets"] = header["blocks.0.0.linear.weight"]["data_offsets"]
    text = json.dumps(header).encode()
    (folder / HEADS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert "aliased" in faults(folder, "sizes")


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b"nul", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}', b"[" * 20000],
    ids=["list", "torn", "word", "number", "wrong span", "deep"],
)
def test_absurd_headers(folder: Path, header: bytes) -> None:
    (folder / HEADS).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    assert "size" in faults(folder)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"abi_version": true}', "[" * 20_000, '{"abi_version": 1e400}']
)
def test_absurd_manifests(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    faults(folder)


def test_newer_layout_says_upgrade(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text()) | {"abi_version": 3, "novelty": 1}
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="upgrade") as raised:
        load_checkpoint(folder)
    assert {problem.kind for problem in raised.value.problems} == {"abi"}


def test_config_that_lies_about_the_heads(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"medusa_num_heads": 5}))
    reseal(folder)
    assert faults(folder, "sizes") == {"count"}


def test_one_error_holds_every_problem(folder: Path) -> None:
    tensors = load_file(folder / HEADS)
    tensors.pop("blocks.0.0.linear.bias")
    tensors[BLOCK][0, 0] = float("nan")
    tensors["stray"] = torch.zeros(2)
    save_file(tensors, folder / HEADS, metadata={"format": "pt"})
    (folder / TREE).unlink()
    (folder / CONFIG).write_text("{")
    other = toy_backbone(fingerprint="e" * 64, template_hash="b" * 64, vocab_size=9, hidden_size=5)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(folder, other, verify="hashes")
    kinds = {problem.kind for problem in raised.value.problems}
    assert {"missing", "unexpected", "non-finite", "hash", "size", "backbone", "template", "config"} <= kinds
    text = str(raised.value)
    for word in ("blocks.0.0.linear.bias", "stray", "tree.json", "config.json", "hidden size 5", "vocabulary size 9"):
        assert word in text
    assert text.count("  to mend it:") == len({problem.fix for problem in raised.value.problems})


def test_file_names_cannot_leave_the_checkpoint(folder: Path) -> None:
    manifest = read_manifest(folder, Problems())
    (folder.parent / "secret").write_text("x")
    entry = FileEntry(bytes=1, sha256=sha256_file(folder.parent / "secret"))
    changed = manifest.model_copy(update={"files": dict(manifest.files) | {"../secret": entry}})
    (folder / MANIFEST).write_bytes(changed.sealed_bytes())
    assert faults(folder) == {"manifest"}


def test_token_map_with_strangers(tmp_path: Path) -> None:
    folder = save_toy(tmp_path / "heads", random_heads("reduced"))
    tensors = load_file(folder / HEADS)
    tensors["token_map"][0] = 8
    tensors["token_map"][1] = tensors["token_map"][2]
    save_file(tensors, folder / HEADS, metadata={"format": "pt"})
    reseal(folder)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(folder)
    assert len(raised.value.problems) == 2 and "outside the vocabulary 0..7" in str(raised.value)
