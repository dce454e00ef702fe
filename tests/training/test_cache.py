"""The hidden-state cache: whose it is, that it is mapped and not read, that no backbone runs once it is there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from medusa_train.checkpoint import tensorfile
from medusa_train.config.recipe import CacheSection
from medusa_train.dataset.rows import TokenRow
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import decoder_of
from medusa_train.modeling.base import Base, load_base
from medusa_train.training import fit as fit_module
from medusa_train.training.cache import CachedRows, build_cache, cache_key
from medusa_train.training.fit import fit
from medusa_train.training.prepare import frequent_tokens
from tests.training.support import losses_of, recipe_of, write_world

SHIFTS = (2, 3)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def base(world: dict) -> Base:
    return load_base(world["base"], dtype="float32")


def row(ids: list[int], mask: list[int], name: str = "a") -> TokenRow:
    return TokenRow(np.array(ids, np.int32), np.array(mask, np.uint8), f"file:{name}", name)


ROWS = [row([5, 6, 7, 8], [0, 1, 1, 1], "a"), row([9, 10, 11, 12], [0, 0, 1, 1], "b")]
# As many rows, tokens and the same sums of ids each time: only what is in them, or where, is another.
CHANGED = {
    "a mask bit flipped": [row([5, 6, 7, 8], [0, 0, 1, 1], "a"), ROWS[1]],
    "a mask bit moved": [row([5, 6, 7, 8], [1, 0, 1, 1], "a"), ROWS[1]],
    "ids permuted": [row([5, 7, 6, 8], [0, 1, 1, 1], "a"), ROWS[1]],
    "ids of one sum": [row([5, 5, 8, 8], [0, 1, 1, 1], "a"), ROWS[1]],
    "rows swapped, names kept": [row([9, 10, 11, 12], [0, 0, 1, 1], "a"), row([5, 6, 7, 8], [0, 1, 1, 1], "b")],
    "rows cut elsewhere": [row([5, 6, 7], [0, 1, 1], "a"), row([8, 9, 10, 11, 12], [1, 0, 0, 1, 1], "b")],
}


@pytest.mark.parametrize("rows", CHANGED.values(), ids=CHANGED)
def test_a_cache_of_other_ids_or_another_mask_is_refused(base: Base, tmp_path: Path, rows: list[TokenRow]) -> None:
    """The data's hash is the same, as it is for held-out rows: it is the training rows'."""
    build_cache(tmp_path, base, "hash", ROWS, SHIFTS, CacheSection(enabled=True))
    with pytest.raises(UserError, match="made for something else") as error:
        build_cache(tmp_path, base, "hash", rows, SHIFTS, CacheSection(enabled=True))
    assert re.search(r"else: rows: '\w{64}' there, '\w{64}' here$", error.value.what)


def test_a_cache_of_the_same_content_is_used_whatever_the_rows_are_called(base: Base, tmp_path: Path) -> None:
    """Equal numbers in other objects, other integer types, under other names: none of it is in the cache."""
    build_cache(tmp_path, base, "hash", ROWS, SHIFTS, CacheSection(enabled=True))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    again = [
        TokenRow(np.array(one.input_ids, np.int64), np.array(one.loss_mask, bool), "elsewhere", f"new {one.id}")
        for one in ROWS
    ]
    build_cache(tmp_path, base, "hash", again, SHIFTS, CacheSection(enabled=True))
    assert written and {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")} == written


def test_a_held_out_file_that_changed_is_not_scored_on_old_labels(world: dict, tmp_path: Path) -> None:
    """The run is begun anew over the cache of the run before it; two words of an answer have changed places."""
    heldout = tmp_path / "heldout.jsonl"
    line = '{"id": "h", "messages": [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "%s"}]}\n'
    heldout.write_text(line % "go sky and plums on")
    data = {"train": [world["data"]], "heldout": [str(heldout)], "max_length": 96}
    policy = {"kind": "heads_only", "cache": {"enabled": True, "folder": str(tmp_path / "cache")}}
    recipe = recipe_of(world, tmp_path / "out", policy, data=data, training={"max_steps": 1})
    fit(recipe)
    heldout.write_text(line % "go plums and sky on")
    with pytest.raises(UserError, match="made for something else: rows") as error:
        fit(recipe, restart=True)
    assert error.value.where.endswith("heldout")


def resident(path: Path) -> tuple[int, int]:
    """(bytes of a file that are mapped into this process, bytes of those that are in memory)."""
    size = held = 0
    mine = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            mine = rest[-1] == str(path)
        elif mine and name in ("Size:", "Rss:"):
            size += int(rest[0]) * 1024 if name == "Size:" else 0
            held += int(rest[0]) * 1024 if name == "Rss:" else 0
    return size, held


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's list of mappings is Linux's")
def test_shards_are_mapped_and_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """32 MiB of hidden states, two rows read: the file is mapped and less than a quarter of it came into memory."""
    positions, size = 16384, 1024
    path = tmp_path / "shard-00000.safetensors"
    hidden = torch.zeros(positions, size, dtype=torch.bfloat16)
    hidden[[7, 9000]] = torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)
    numbers = torch.arange(positions, dtype=torch.int32)
    tensorfile.write_tensors(
        path, {"hidden": hidden, "labels": numbers[:, None].clone(), "row": numbers, "position": numbers.clone()}
    )
    cached = CachedRows(tmp_path)
    assert cached.hidden(torch.tensor([9000, 7]))[:, 0].tolist() == [2.0, 1.0]
    mapped, held = resident(path)
    assert mapped >= hidden.nbytes and 0 < held < hidden.nbytes / 4


class Ran(Exception):
    pass


def test_no_backbone_runs_once_the_cache_is_built(
    world: dict, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three epochs with held-out checks; a backbone that raises from the first step on. Without a cache it does."""
    build = fit_module.build_trainer

    def built(*args, **kwargs):
        trainer = build(*args, **kwargs)
        handles.append(decoder_of(base.model).register_forward_pre_hook(refuse))
        return trainer

    def refuse(*_: object) -> None:
        raise Ran

    monkeypatch.setattr(fit_module, "build_trainer", built)
    training = {"num_train_epochs": 3, "eval_strategy": "epoch", "per_device_train_batch_size": 64}
    handles: list = []
    try:
        policy = {"kind": "heads_only", "cache": {"enabled": True, "shard_rows": 200}}
        fit(recipe_of(world, tmp_path / "cached", policy, training=training), base=base)
    finally:
        for handle in handles:
            handle.remove()
    steps = len(losses_of(tmp_path / "cached"))
    assert len(handles) == 1 and steps >= 3 and steps % 3 == 0
    with pytest.raises(Ran):
        try:
            fit(recipe_of(world, tmp_path / "live", training=training), base=base)
        finally:
            handles[-1].remove()


def test_the_reduced_vocabulary_is_the_most_frequent_supervised_tokens() -> None:
    """Supervised: token 9 three times, 4 and 7 twice, 2 and 8 once; 0 and 1 stand under mask 0 and do not count."""
    rows = [
        row([1, 9, 9, 4, 7], [0, 1, 1, 1, 1]),
        row([1, 1, 1, 9, 4, 7, 8, 2, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0]),
    ]
    for size, tokens, covered in (
        (1, [9], 3), (2, [4, 9], 5), (3, [4, 7, 9], 7), (4, [2, 4, 7, 9], 8), (6, [0, 2, 4, 7, 8, 9], 9)
    ):  # fmt: skip
        found, coverage = frequent_tokens(rows, size, 12)
        assert found.tolist() == tokens and found.dtype == torch.int64
        assert coverage == pytest.approx(covered / 9)


def test_a_key_names_what_a_cache_is_of(base: Base) -> None:
    """One thing at a time is another, and the key differs in that one field."""
    options = CacheSection(enabled=True)
    key = cache_key(base, "hash", ROWS, SHIFTS, options).to_dict()
    others = {
        "data": cache_key(base, "other", ROWS, SHIFTS, options),
        "shifts": cache_key(base, "hash", ROWS, (1, *SHIFTS), options),
        "shard_rows": cache_key(base, "hash", ROWS, SHIFTS, CacheSection(enabled=True, shard_rows=17)),
        "rows": cache_key(base, "hash", ROWS[:1], SHIFTS, options),
    }
    for name, other in others.items():
        assert [field for field, value in other.to_dict().items() if value != key[field]] == [name]
