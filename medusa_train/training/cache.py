"""The hidden-state cache: the frozen backbone runs once over the rows, every epoch after that reads from disk.

Kept are the hidden states of supervised positions only (those that some channel has a target at), in bf16, with the
token ids of the channels' targets. Shards are safetensors, memory-mapped when read, written one by one so that an
interrupted build goes on where it was. The index names backbone, data, shifts and lengths; a cache of anything else
is refused.

Rows are run one by one or in right-padded batches of similar length; causal attention never looks at the padding
behind a row, so no mask is needed and the states do not depend on what a row was batched with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from medusa_train.checkpoint import tensorfile
from medusa_train.config.recipe import CacheSection
from medusa_train.console import progress, say
from medusa_train.dataset.rows import TokenRow
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import hidden_states_and_middle
from medusa_train.provenance import canonical_json, fsync_folder, write_atomic
from medusa_train.training.losses import IGNORE, channel_labels, seen_tokens, supervised_rows

INDEX = "index.json"
FORMAT = 2  # 1: `rows` was a hash over lengths and sums of ids, blind to their order and to the mask


@dataclass(frozen=True)
class Sight:
    """What heads see besides the last hidden state, and so what a cache keeps besides it; see `modeling.heads`."""

    sees: str = "hidden"
    reads_layer: int | None = None


@dataclass(frozen=True)
class CacheKey:
    """What decides the content of a cache; two caches with equal keys hold the same."""

    backbone: str
    data: str
    rows: str
    shifts: tuple[int, ...]
    dtype: str
    shard_rows: int
    forward_tokens: int
    sees: str = "hidden"
    reads_layer: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the index and for error messages."""
        return {"format": FORMAT, **self.__dict__, "shifts": list(self.shifts)}


def cache_key(
    base: Any,
    data_hash: str | None,
    rows: Sequence[TokenRow],
    shifts: Sequence[int],
    options: CacheSection,
    sight: Sight = Sight(),
) -> CacheKey:
    """The key for these rows on this backbone; a quantized backbone's states are another cache."""
    backbone = f"{base.fingerprint}{'' if base.quantization is None else ':' + base.quantization}:{base.model.dtype}"
    return CacheKey(
        backbone,
        str(data_hash),
        rows_digest(rows),
        tuple(shifts),
        "bfloat16",
        options.shard_rows,
        options.forward_tokens,
        sight.sees,
        sight.reads_layer,
    )


def rows_digest(rows: Sequence[TokenRow]) -> str:
    """Hex sha256 over length, token ids and loss mask of every row, in order: all of a row that a cache depends on."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.input_ids).to_bytes(8, "little"))  # where a row ends is content too
        digest.update(np.ascontiguousarray(row.input_ids, "<i4"))
        digest.update(np.ascontiguousarray(row.loss_mask, np.uint8))
    return digest.hexdigest()


def row_targets(row: TokenRow, shifts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(positions int64 [m] that have a target in some channel, labels [C, m]) of one row."""
    ids = torch.from_numpy(np.asarray(row.input_ids, np.int64))[None]
    mask = torch.from_numpy(np.asarray(row.loss_mask, np.uint8))[None]
    return supervised_rows(channel_labels(ids, mask, torch.zeros_like(ids), shifts))


def row_sight(row: TokenRow, positions_m: Tensor, num_heads: int) -> Tensor:
    """int64 [K, m]: the tokens that the heads see at some positions of one row."""
    ids = torch.from_numpy(np.asarray(row.input_ids, np.int64))[None]
    return seen_tokens(ids, num_heads)[:, 0, positions_m]


@dataclass(frozen=True)
class _Shard:
    """A run of rows (indices into the sorted order) whose supervised positions make one file."""

    name: str
    rows: tuple[int, ...]
    positions: int


def build_cache(
    folder: str | Path,
    base: Any,
    data_hash: str | None,
    rows: Sequence[TokenRow],
    shifts: Sequence[int],
    options: CacheSection,
    *,
    sight: Sight = Sight(),
    part: tuple[int, int] = (0, 1),
    description: str = "hidden states",
) -> CacheKey:
    """Fills the cache `folder` with what is missing in it.

    Args:
        part: (rank, ranks): this process makes every ranks-th shard.

    Raises:
        UserError: the folder holds the cache of something else; the difference is shown.
    """
    folder = Path(folder)
    key = cache_key(base, data_hash, rows, shifts, options, sight)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_other(folder, key)
    write_atomic(folder / INDEX, json.dumps(key.to_dict(), indent=2) + "\n")
    shards = _plan(rows, shifts, options.shard_rows)
    missing = [shard for shard in shards[part[0] :: part[1]] if not _whole(folder / shard.name, shard, base)]
    if len(missing) < len(shards):
        say(f"{description}: {len(shards) - len(missing)} of {len(shards)} shards are there already")
    if missing:
        tokens = sum(len(rows[index].input_ids) for shard in missing for index in shard.rows)
        with progress(f"{description}: backbone", tokens, "tokens") as job:
            for shard in missing:
                _write_shard(folder, shard, base, rows, shifts, options.forward_tokens, sight, job.advance)
    return key


def _refuse_other(folder: Path, key: CacheKey) -> None:
    try:
        found = json.loads((folder / INDEX).read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UserError(f"the cache's index cannot be read: {error}", where=str(folder)) from None
    wanted = key.to_dict()
    if canonical_json(found) != canonical_json(wanted):
        names = [f"{name}: {found.get(name)!r} there, {wanted.get(name)!r} here" for name in wanted]
        differing = [text for name, text in zip(wanted, names, strict=True) if found.get(name) != wanted[name]]
        raise UserError(
            "this hidden-state cache was made for something else: " + "; ".join(differing),
            where=str(folder),
            fix="remove the folder, or name another one with policy.cache.folder",
        )


def _plan(rows: Sequence[TokenRow], shifts: Sequence[int], shard_rows: int) -> list[_Shard]:
    """Shards over the rows by length (so that batches are nearly free of padding), at least `shard_rows` each."""
    order = sorted(range(len(rows)), key=lambda index: (len(rows[index].input_ids), index))
    shards, members, positions = [], [], 0
    for index in order:
        members.append(index)
        positions += row_targets(rows[index], shifts)[0].numel()
        if positions >= shard_rows:
            shards.append(_Shard(f"shard-{len(shards):05d}.safetensors", tuple(members), positions))
            members, positions = [], 0
    if members:
        shards.append(_Shard(f"shard-{len(shards):05d}.safetensors", tuple(members), positions))
    return shards


def _whole(path: Path, shard: _Shard, base: Any) -> bool:
    """A shard that was written to its end has its name (it is renamed last) and the planned shape."""
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as handle:
        return handle.get_slice("hidden").get_shape()[0] == shard.positions


@torch.no_grad()
def _write_shard(
    folder: Path,
    shard: _Shard,
    base: Any,
    rows: Sequence[TokenRow],
    shifts: Sequence[int],
    forward_tokens: int,
    sight: Sight,
    done: Callable[[float], None],
) -> None:
    pieces: dict[str, list[Tensor]] = {"hidden": [], "labels": [], "row": [], "position": []}
    for group in _groups(shard.rows, rows, forward_tokens):
        hidden_BTD, middle_BTD = run_rows_and_middle(base.model, [rows[index] for index in group], sight.reads_layer)
        for line, index in enumerate(group):
            positions_m, labels_Cm = row_targets(rows[index], shifts)
            pieces["hidden"].append(
                hidden_BTD[line].index_select(0, positions_m.to(hidden_BTD.device)).bfloat16().cpu()
            )
            if middle_BTD is not None:
                middle_mD = middle_BTD[line].index_select(0, positions_m.to(middle_BTD.device))
                pieces.setdefault("middle", []).append(middle_mD.bfloat16().cpu())
            if sight.sees == "parent":
                num_heads = sum(shift >= 2 for shift in shifts)
                pieces.setdefault("seen", []).append(row_sight(rows[index], positions_m, num_heads).T.to(torch.int32))
            pieces["labels"].append(labels_Cm.T.to(torch.int32))
            pieces["row"].append(torch.full((positions_m.numel(),), index, dtype=torch.int32))
            pieces["position"].append(positions_m.to(torch.int32))
        done(sum(len(rows[index].input_ids) for index in group))
    temporary = folder / f".{shard.name}.partial"
    tensorfile.write_tensors(temporary, {name: torch.cat(parts).contiguous() for name, parts in pieces.items()})
    temporary.replace(folder / shard.name)
    fsync_folder(folder)


def _groups(members: Sequence[int], rows: Sequence[TokenRow], forward_tokens: int) -> list[list[int]]:
    """Neighbours in length, padded size at most `forward_tokens` (a longer row goes alone)."""
    groups: list[list[int]] = []
    for index in members:
        length = len(rows[index].input_ids)
        if groups and (len(groups[-1]) + 1) * length <= forward_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def run_rows(model: Any, rows: Sequence[TokenRow]) -> Tensor:
    """hidden_BTD of right-padded rows; what stands behind a row's end is of no meaning."""
    return run_rows_and_middle(model, rows, None)[0]


def run_rows_and_middle(model: Any, rows: Sequence[TokenRow], reads_layer: int | None) -> tuple[Tensor, Tensor | None]:
    """The same, and the middle layer's states where one is asked for."""
    longest = max(len(row.input_ids) for row in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    for line, row in enumerate(rows):
        ids_BT[line, : len(row.input_ids)] = torch.from_numpy(np.asarray(row.input_ids, np.int64))
    positions_BT = torch.arange(longest).expand(len(rows), -1)
    device = next(model.parameters()).device
    return hidden_states_and_middle(
        model, ids_BT.to(device), reads_layer=reads_layer, position_ids_BT=positions_BT.to(device)
    )


class CachedRows(Dataset):
    """Supervised positions of a cache, memory-mapped; one item is one position.

    Args:
        inverse_map: token id -> row of a reduced projection, or None.
        names: what error messages call the token rows.

    Attributes:
        labels_NC: int32 [N, C], in rows of the heads' projection (IGNORE where there is no target).
        row_N, position_N: which token row, and where in it.
    """

    def __init__(
        self, folder: str | Path, inverse_map: Tensor | None = None, names: Sequence[str] | None = None
    ) -> None:
        from safetensors.torch import load_file

        self.shards = [load_file(path, device="cpu") for path in sorted(Path(folder).glob("shard-*.safetensors"))]
        if not self.shards:
            raise UserError("no shard in this hidden-state cache", where=str(folder))
        self.starts = torch.tensor([0, *(len(shard["hidden"]) for shard in self.shards)]).cumsum(0)
        labels_NC = torch.cat([shard["labels"] for shard in self.shards])
        if inverse_map is not None:
            known_NC = inverse_map.to(torch.int32)[labels_NC.clamp(min=0).long()]
            labels_NC = torch.where(labels_NC == IGNORE, IGNORE, known_NC)
        self.labels_NC, self.names = labels_NC, names
        self.items: Tensor | None = None
        self.soft: Any = None
        self.row_N = torch.cat([shard["row"] for shard in self.shards])
        self.position_N = torch.cat([shard["position"] for shard in self.shards])

    def __len__(self) -> int:
        return self.size if self.items is None else len(self.items)

    @property
    def size(self) -> int:
        """N, positions in the cache."""
        return int(self.starts[-1])

    def hidden(self, indices_M: Tensor) -> Tensor:
        """bf16 [M, D], in the order of the indices."""
        return self._gather("hidden", indices_M)

    def sight(self, indices_M: Tensor) -> dict[str, Tensor]:
        """What heads see besides: seen int64 [K, M] and middle bf16 [M, D], where the cache holds them."""
        found = {}
        if "seen" in self.shards[0]:
            found["seen"] = self._gather("seen", indices_M).T.long().contiguous()
        if "middle" in self.shards[0]:
            found["middle"] = self._gather("middle", indices_M)
        return found

    def _gather(self, name: str, indices_M: Tensor) -> Tensor:
        first = self.shards[0][name]
        out_MD = torch.empty(len(indices_M), first.shape[1], dtype=first.dtype)
        owner_M = torch.searchsorted(self.starts, indices_M, right=True) - 1
        for number, shard in enumerate(self.shards):
            mine = (owner_M == number).nonzero().squeeze(1)
            if mine.numel():
                out_MD[mine] = shard[name].index_select(0, indices_M[mine] - self.starts[number])
        return out_MD

    def select(self, keep_N: Tensor) -> None:
        """Makes only these positions items of the data set."""
        self.items = keep_N.nonzero().squeeze(1)

    def name(self, row: int) -> str:
        """What error messages call a token row."""
        return str(row) if self.names is None else self.names[row]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        """A whole batch at once; the loader asks for one when this method exists."""
        indices_M = torch.tensor(indices)
        if self.items is not None:
            indices_M = self.items[indices_M]
        labels_CM = self.labels_NC[indices_M].T.long().contiguous()
        extra = {} if self.soft is None else self.soft.batch(indices_M, labels_CM)
        return {
            "hidden": self.hidden(indices_M),
            "labels": labels_CM,
            "row_M": self.row_N[indices_M],
            **self.sight(indices_M),
            **extra,
        }


def keep_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """The collator of `CachedRows`: it hands out whole batches already."""
    return batch
