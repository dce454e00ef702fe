"""What is written is what is read; what cannot be a checkpoint is refused before a byte is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from medusa_train.checkpoint import (
    CheckpointError,
    HeadsManifest,
    atomic,
    inspect_,
    load_checkpoint,
    save_checkpoint,
    store_tree,
)
from medusa_train.errors import UserError
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads
from tests.checkpoint.support import TREE, random_heads, save_toy, states_equal, toy_backbone


@pytest.mark.parametrize("contract", ["own", "shared", "reduced"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_bit_exact(tmp_path: Path, contract: str, layers: int, dtype: torch.dtype) -> None:
    heads = random_heads(contract, 3, layers, bias=layers == 3, dtype=dtype)
    save_toy(tmp_path / "heads", heads)
    loaded = load_checkpoint(tmp_path / "heads", toy_backbone(), verify="hashes")
    assert states_equal(heads, loaded.heads)
    assert loaded.heads.config == heads.config
    assert loaded.tree == TREE
    assert loaded.manifest.offsets == [2, 3, 4]
    assert not loaded.heads.training and not any(p.requires_grad for p in loaded.heads.parameters())


def test_head_without_layers_and_with_own_projection(tmp_path: Path) -> None:
    heads = random_heads("own", 2, 0)
    save_toy(tmp_path / "heads", heads)
    assert states_equal(heads, load_checkpoint(tmp_path / "heads").heads)


def test_folder_holds_what_the_page_says(tmp_path: Path) -> None:
    folder = save_toy(tmp_path / "heads")
    assert sorted(os.listdir(folder)) == [
        "config.json",
        "medusa_heads.safetensors",
        "medusa_manifest.json",
        "tree.json",
    ]
    assert os.listdir(tmp_path) == ["heads"], "no temporary folder is left"
    config = json.loads((folder / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"], config["head_contract"]) == (2, 1, "own")
    assert "architectures" not in config and config["model_type"] == "medusa-train-heads"


def test_loads_in_the_asked_dtype_and_leaves_the_file_alone(tmp_path: Path) -> None:
    folder = save_toy(tmp_path / "heads", random_heads("reduced"))
    before = (folder / "medusa_heads.safetensors").read_bytes()
    loaded = load_checkpoint(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.heads.parameters()} == {torch.bfloat16}
    assert loaded.heads.token_map.dtype == torch.int64
    mapped = load_checkpoint(folder).heads
    with torch.no_grad():
        mapped.blocks[0][0].linear.weight.fill_(7)
    assert (folder / "medusa_heads.safetensors").read_bytes() == before


def test_opening_is_a_matter_of_milliseconds(tmp_path: Path) -> None:
    """64 heads-megabytes and more are mapped, not read: opening costs the same for a large file as for a small one."""
    import time

    heads = random_heads("own", 4, 1, hidden=256, vocab=40_000)
    folder = save_toy(tmp_path / "heads", heads)
    assert (folder / "medusa_heads.safetensors").stat().st_size > 150e6
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        load_checkpoint(folder)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05, seconds


def test_replacing_carries_notes_over_and_drops_the_old_weights(tmp_path: Path) -> None:
    folder = save_toy(tmp_path / "heads", random_heads(seed=1))
    (folder / "NOTES.txt").write_text("mine")
    (folder / "report").mkdir()
    (folder / "report" / "report.html").write_text("<html>")
    new = random_heads(seed=2)
    save_toy(folder, new, tree=None)
    loaded = load_checkpoint(folder, verify="hashes")
    assert states_equal(new, loaded.heads) and loaded.tree is None
    assert (folder / "NOTES.txt").read_text() == "mine"
    assert (folder / "report" / "report.html").read_text() == "<html>"
    assert not (folder / "tree.json").exists()
    (folder / "NOTES.txt").write_text("mine, edited later")
    load_checkpoint(folder, verify="hashes")


def test_a_git_clone_keeps_its_history(tmp_path: Path) -> None:
    """Hidden folders, links and empty folders of a cloned repository outlive both ways of writing."""
    folder = save_toy(tmp_path / "heads")
    (folder / ".git" / "refs").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / "latest").symlink_to("tree.json")
    for write in (lambda: store_tree(folder, TREE), lambda: save_toy(folder, random_heads(seed=3))):
        write()
        assert (folder / ".git" / "HEAD").read_text() == "ref: refs/heads/main" and (folder / ".git" / "refs").is_dir()
        assert (folder / ".gitattributes").exists() and os.readlink(folder / "latest") == "tree.json"
        assert not any(name.startswith((".git", "latest")) for name in load_checkpoint(folder).manifest.files)


def test_old_adapters_and_foreign_weights_do_not_linger(tmp_path: Path) -> None:
    folder = save_toy(tmp_path / "heads")
    (folder / "medusa_lm_head.pt").write_bytes(b"x")
    save_toy(folder)
    assert not (folder / "medusa_lm_head.pt").exists()
    load_checkpoint(folder, verify="hashes")


def test_store_tree_replaces_only_the_tree(tmp_path: Path) -> None:
    folder = save_toy(tmp_path / "heads", tree=None)
    before = (folder / "medusa_heads.safetensors").read_bytes()
    created = load_checkpoint(folder).manifest.created
    (folder / "NOTES.txt").write_text("mine")
    tree = {"format": 1, "paths": [[0], [0, 1]], "method": "joint", "expected_tokens_per_round": 1.5}
    store_tree(folder, tree)
    loaded = load_checkpoint(folder, verify="hashes")
    assert loaded.tree == tree and loaded.manifest.created == created
    assert (folder / "medusa_heads.safetensors").read_bytes() == before
    assert (folder / "NOTES.txt").exists() and os.listdir(tmp_path) == ["heads"]
    store_tree(folder, TREE)
    assert load_checkpoint(folder, verify="hashes").tree == TREE
    store_tree(folder, None)
    assert load_checkpoint(folder, verify="hashes").tree is None and not (folder / "tree.json").exists()


@pytest.mark.parametrize("torn", ["{torn", '{"format": 1, "paths": [[3, 3]]}'])
def test_store_tree_mends_a_damaged_tree_and_refuses_a_damaged_checkpoint(tmp_path: Path, torn: str) -> None:
    folder = save_toy(tmp_path / "heads")
    (folder / "tree.json").write_text(torn)
    with pytest.raises(CheckpointError):
        load_checkpoint(folder)
    store_tree(folder, TREE)
    assert load_checkpoint(folder, verify="hashes").tree == TREE
    (folder / "medusa_heads.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"medusa_heads\.safetensors"):
        store_tree(folder, TREE)


@pytest.mark.parametrize(
    ("paths", "word"),
    [
        ([[0], [1, 0]], "no parent"),
        ([[0], [0, 0], [0, 0, 0]], "3 deep"),
        ([[0], [0]], "twice"),
        ([[-1]], "ranks from 0"),
        ([[0.5]], "ranks from 0"),
        ([[True]], "ranks from 0"),
        ([[]], "non-empty"),
        ([], "no paths"),
    ],
)
def test_what_is_no_tree_is_not_stored(tmp_path: Path, paths: list, word: str) -> None:
    folder = save_toy(tmp_path / "heads")
    with pytest.raises(CheckpointError, match=word):
        store_tree(folder, {"format": 1, "paths": paths})
    assert load_checkpoint(folder, verify="hashes").tree == TREE


@pytest.mark.parametrize("policy", ["joint", "self_distill"])
def test_a_changed_backbone_must_come_along(tmp_path: Path, policy: str) -> None:
    with pytest.raises(CheckpointError, match="adapter"):
        save_toy(tmp_path / "heads", policy=policy)
    assert not (tmp_path / "heads").exists() and os.listdir(tmp_path) == []


def test_heads_only_takes_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unchanged"):
        save_toy(tmp_path / "heads", adapter=tmp_path)


def test_every_reason_against_saving_is_in_one_error(tmp_path: Path) -> None:
    heads = random_heads("reduced", 2, 2)
    with torch.no_grad():
        heads.projections[1].weight[0, 0] = float("nan")
        heads.token_map[0] = heads.token_map[1]
    heads.blocks[1][1].linear.weight = heads.blocks[1][0].linear.weight
    heads.blocks[0][0].linear.bias = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(CheckpointError) as raised:
        save_toy(
            tmp_path / "heads",
            heads,
            policy="mediusa",
            tree={"format": 1, "paths": [[7, 7]]},
            training={"x": float("nan")},
        )
    kinds = {problem.kind for problem in raised.value.problems}
    assert {"policy", "non-finite", "aliased", "shape", "tree", "manifest", "config"} <= kinds
    assert os.listdir(tmp_path) == []


def test_repeated_block_is_refused(tmp_path: Path) -> None:
    """`[Block] * n`, the reference's way, is one block under many names."""
    heads = MedusaHeads(HeadsConfig("shared", 2, 1, 4, 8))
    heads.blocks = torch.nn.ModuleList([heads.blocks[0]] * 2)
    with pytest.raises(CheckpointError) as raised:
        save_toy(tmp_path / "heads", heads)
    assert {problem.kind for problem in raised.value.problems} == {"aliased"}


def test_heads_of_another_size_than_the_backbone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="vocab_size"):
        save_toy(tmp_path / "heads", base=toy_backbone(vocab_size=9))


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years")
    with pytest.raises(UserError, match="something else"):
        save_toy(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    save_toy(tmp_path / "empty")
    load_checkpoint(tmp_path / "empty")


def test_a_symlink_to_a_checkpoint_stays_a_symlink(tmp_path: Path) -> None:
    save_toy(tmp_path / "one", random_heads(seed=1))
    (tmp_path / "latest").symlink_to("one")
    new = random_heads(seed=2)
    save_toy(tmp_path / "latest", new)
    assert (tmp_path / "latest").is_symlink()
    assert states_equal(new, load_checkpoint(tmp_path / "one").heads)


def test_disk_errors_are_user_errors_and_leave_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = random_heads(seed=1)
    folder = save_toy(tmp_path / "heads", old)

    def full(path: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(atomic, "fsync_tree", full)
    with pytest.raises(UserError, match="No space left"):
        save_toy(folder, random_heads(seed=2))
    assert os.listdir(tmp_path) == ["heads"]
    assert states_equal(old, load_checkpoint(folder, verify="hashes").heads)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_really_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads file goes to /dev/full, which refuses every byte."""
    from medusa_train.checkpoint import save

    def redirected(path: Path, state: dict) -> None:
        path.symlink_to("/dev/full")
        with open(path, "wb") as handle:
            handle.write(b"x" * 100_000)

    monkeypatch.setattr(save, "write_tensors", redirected)
    with pytest.raises(UserError, match="No space left"):
        save_toy(tmp_path / "heads")
    assert os.listdir(tmp_path) == []


def test_what_reads_back_different_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that returns other bytes than it was given is caught before the swap."""
    from safetensors.torch import save_file

    from medusa_train.checkpoint import save

    def lying(path: Path, state: dict) -> None:
        changed = {name: tensor.clone() for name, tensor in state.items()}
        changed["blocks.0.0.linear.weight"].view(-1)[0] += 1
        save_file(changed, path, metadata={"format": "pt"})

    monkeypatch.setattr(save, "write_tensors", lying)
    with pytest.raises(CheckpointError, match="reads back different"):
        save_toy(tmp_path / "heads")
    assert os.listdir(tmp_path) == []


def test_without_exchange_two_renames_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    save_toy(tmp_path / "heads", random_heads(seed=1))
    new = random_heads(seed=2)
    save_toy(tmp_path / "heads", new)
    assert states_equal(new, load_checkpoint(tmp_path / "heads", verify="hashes").heads)
    assert os.listdir(tmp_path) == ["heads"]


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint there"):
        load_checkpoint(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="not a folder"):
        load_checkpoint(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=r"medusa_manifest\.json"):
        load_checkpoint(tmp_path / "folder")
    with pytest.raises(UserError, match="hashes"):
        load_checkpoint(tmp_path / "folder", verify="hash")


def test_manifest_is_pydantic_and_strict() -> None:
    with pytest.raises(ValueError, match="abi_version"):
        HeadsManifest.model_validate({"abi_version": 3})


def test_large_files_are_hashed_on_request_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes opening fast: in a large file a flipped number waits for `verify="hashes"`, a name does not."""
    folder = save_toy(tmp_path / "heads")
    monkeypatch.setattr(inspect_, "SMALL_FILE_BYTES", 0)
    path = folder / "medusa_heads.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="sha256"):
        load_checkpoint(folder, verify="hashes")
    path.write_bytes(raw.replace(b'"blocks.0.', b'"blocks.9.', 1))
    with pytest.raises(CheckpointError, match=r"blocks\.9"):
        load_checkpoint(folder)


def test_adapters_and_models_are_what_they_claim(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no adapter"):
        save_checkpoint(
            tmp_path / "heads",
            random_heads(),
            toy_backbone(),
            recipe={},
            policy="joint",
            data_manifest_hash=None,
            training={},
            adapter=tmp_path,
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_are_counted(dtype: torch.dtype, poison: float) -> None:
    values = torch.randn(50, 7).to(dtype)
    assert inspect_.count_non_finite(values) == 0
    values[3, 4] = values[49, 6] = poison
    assert inspect_.count_non_finite(values) == 2
    assert inspect_.count_non_finite(torch.empty(0, dtype=dtype)) == 0


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_tensor_files_have_the_mode_of_any_new_file(tmp_path: Path, umask: int) -> None:
    """safetensors makes its files 0600, which a serving user cannot read; under umask 077 nobody else should."""
    from safetensors.torch import save_file

    before = os.umask(umask)
    try:
        with atomic.staged_folder(tmp_path / "all") as staged:
            (staged / "backbone").mkdir()
            save_file({"x": torch.ones(2)}, staged / "backbone" / "model.safetensors")
        folder = save_toy(tmp_path / "heads")
    finally:
        os.umask(before)
    for path in (tmp_path / "all" / "backbone" / "model.safetensors", folder / "medusa_heads.safetensors"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_nothing_is_written_into_the_hub_s_cache(tmp_path: Path) -> None:
    """Replacing a snapshot's folder there broke the cache of every program on the machine."""
    cached = tmp_path / "hub" / "models--me--heads" / "snapshots" / ("a" * 40)
    cached.parent.mkdir(parents=True)
    save_toy(tmp_path / "heads").rename(cached)
    before = {path: path.stat().st_mtime_ns for path in cached.rglob("*")}
    with pytest.raises(UserError, match="hub's cache"):
        store_tree(cached, {"format": 1, "paths": [[0]], "method": "joint"})
    with pytest.raises(UserError, match="hub's cache"):
        save_toy(cached)
    assert {path: path.stat().st_mtime_ns for path in cached.rglob("*")} == before


def test_a_reader_between_two_renames_does_not_lose_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader heals what looks like a cut swap; the writer tries again."""
    folder, new, rename, cuts = save_toy(tmp_path / "heads"), random_heads(seed=2), os.rename, []

    def with_reader(source, target) -> None:
        if Path(target) == folder and ".tmp-" in str(source) and not cuts:
            cuts.append(1)
            atomic.recover(folder)
            assert folder.exists()
        rename(source, target)

    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", with_reader)
    save_toy(folder, new)
    assert cuts and states_equal(new, load_checkpoint(folder, verify="hashes").heads)
    assert os.listdir(tmp_path) == ["heads"]


def test_a_link_to_nowhere_does_not_block_saving(tmp_path: Path) -> None:
    folder = save_toy(tmp_path / "heads")
    (folder / "notes").symlink_to(tmp_path / "gone")
    save_toy(folder, random_heads(seed=2))
    assert (folder / "notes").is_symlink()


def test_a_checkpoint_from_the_hub_comes_with_every_file_of_its_manifest(tmp_path: Path, monkeypatch) -> None:
    """A fixed list of endings left out tokenizer files (`*.tiktoken`, `*.py`) that the manifest names."""
    import fnmatch
    import shutil

    import huggingface_hub

    from medusa_train.checkpoint.hub import download_checkpoint

    remote, local = tmp_path / "remote", tmp_path / "local"
    remote.mkdir()
    for name in ("qwen.tiktoken", "tokenization_x.py", "a[1].json", "stray.bin", "listed.bin", "README.md"):
        (remote / name).write_text(name)
    listed = ["qwen.tiktoken", "tokenization_x.py", "a[1].json", "listed.bin"]
    (remote / "medusa_manifest.json").write_text(json.dumps({"files": {name: {} for name in listed}}))

    def download(_: str, revision=None, allow_patterns=()) -> str:
        local.mkdir(exist_ok=True)
        for path in remote.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, local)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = sorted(path.name for path in download_checkpoint("me/heads", None).iterdir())
    assert found == ["README.md", "a[1].json", "medusa_manifest.json", "qwen.tiktoken", "tokenization_x.py"]


@pytest.mark.parametrize(("base", "named"), [("owner/base", "owner/base"), ("/home/someone/base", None)])
def test_an_adapter_names_its_base_by_hub_id_only(tmp_path: Path, base: str, named: str | None) -> None:
    """AutoPeftModel needs the id; a path of the training machine is nobody's business."""
    from medusa_train.checkpoint.changed import stage_adapter

    source = tmp_path / "source"
    source.mkdir()
    (source / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/root/cache/base", "r": 4}))
    (source / "adapter_model.safetensors").write_bytes(b"")
    stage_adapter(tmp_path / "target", source, base)
    config = json.loads((tmp_path / "target" / "adapter_config.json").read_text())
    assert config == {"base_model_name_or_path": named, "r": 4}
