"""Held-out checks while training: loss and exact ranks of every channel, drift of the ordinary head, replayed rounds.

Greedy text's continuation is known, so the rounds of any tree follow from the ranks of the true tokens; what replays
them is a callable handed in (`Replay`), because a tree is no business of training.

Shape letters: S tokens of a span, K heads, C channels, M rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_train.dataset.rows import TokenRow
from medusa_train.training.cache import CachedRows, _groups, row_sight, row_targets
from medusa_train.training.fused import Projection
from medusa_train.training.ledger import CHECK_ROWS, CHECK_TOKENS
from medusa_train.training.losses import IGNORE
from medusa_train.training.projections import dense_logits, in_fp32
from medusa_train.training.softmax import TOP

MISS, END = -1, -2


@dataclass(frozen=True)
class SpanRanks:
    """Ranks along one answer: ranks_SK[o, j] is the rank of token o+1+j in head j, with token o as a round's root.

    MISS (-1): not among the ten likeliest. END (-2): past the answer.

    Attributes:
        row_id: of the row's group (its prompt), or the row's own: what a search holds out together.
        source: where the row was read.
    """

    ranks_SK: np.ndarray
    row_id: str
    source: str


Replay = Callable[[Sequence[SpanRanks]], dict[str, float]]


@dataclass
class Scores:
    """Sums over held-out rows; `metrics` divides them.

    Attributes:
        channels: names, lm first where there is one.
        sums, counts: cross entropy (nats) and targets of each channel.
        hits: [C, 10] exact-rank hits; their denominators are `counts` plus, for reduced heads, tokens outside the map.
        drift: original CE, KL(original || now) and top-1 agreements of the ordinary head, summed over its targets.
    """

    channels: tuple[str, ...]
    sums: np.ndarray
    counts: np.ndarray
    ranked: np.ndarray
    hits: np.ndarray
    drift: np.ndarray

    @classmethod
    def zero(cls, channels: tuple[str, ...]) -> Scores:
        """Nothing counted yet."""
        size = len(channels)
        return cls(channels, *(np.zeros(size) for _ in range(3)), np.zeros((size, TOP)), np.zeros(3))

    def add(self, output: dict[str, Tensor]) -> None:
        """Adds one batch's output of `score_rows`."""
        for name in ("sums", "counts", "ranked", "hits", "drift"):
            getattr(self, name)[...] += output[name].double().cpu().numpy()

    def metrics(self, weights: Sequence[float]) -> dict[str, float]:
        """Per channel loss and top-1/5/10, the heads' weighted loss, and drift where there is an lm channel."""
        found: dict[str, float] = {}
        losses = self.sums / np.maximum(self.counts, 1)
        for index, name in enumerate(self.channels):
            found[f"{name}_loss"] = float(losses[index])
            for top in (1, 5, 10):
                found[f"{name}_top{top}"] = float(self.hits[index, :top].sum() / max(self.ranked[index], 1))
        heads = [index for index, name in enumerate(self.channels) if name.startswith("head")]
        found["medusa_loss"] = float(sum(w * losses[i] for w, i in zip(weights, heads, strict=True)))
        if len(heads) < len(self.channels):
            original, kl, same = self.drift / max(self.counts[0], 1)
            found["drift_ce"] = float(losses[0] - original)
            found["drift_kl"], found["drift_top1_agreement"] = float(kl), float(same)
        return found


@torch.no_grad()
def score_rows(
    channels: Sequence[Projection],
    labels_CM: Tensor,
    targets_CM: Tensor,
    original: Projection | None,
    proposable: Sequence[int | None] | None = None,
) -> dict[str, Tensor]:
    """CE sums, counts, exact ranks of every channel over some rows.

    Args:
        labels_CM: in rows of each channel's projection; targets_CM: the same targets as IGNORE or not, before a reduced
            map removed those outside it (they count as misses).
        original: the lm channel's projection of the untouched backbone, where drift is asked for.
        proposable: per channel, how many of its first logits are ranked; None: all. Rows past the tokenizer are never
            proposed by a head, so they take no rank from a token; their logits stay in the losses, as in training.
    """
    count, rows = labels_CM.shape
    ranks_CM = torch.full((count, rows), MISS, dtype=torch.int16, device=labels_CM.device)
    sums = torch.zeros(count, device=labels_CM.device)
    drift = torch.zeros(3, device=labels_CM.device)
    original = None if original is None else in_fp32(original)
    for index, channel in enumerate(channels):
        projection = in_fp32(channel)
        for start in range(0, rows, CHECK_ROWS):
            part = slice(start, start + CHECK_ROWS)
            labels_m = labels_CM[index, part]
            logits_mV = dense_logits(_part(projection, part))
            sums[index] += F.cross_entropy(logits_mV, labels_m, ignore_index=IGNORE, reduction="sum")
            ranked_mV = logits_mV if proposable is None else logits_mV[:, : proposable[index]]
            top = ranked_mV.topk(min(TOP, ranked_mV.shape[1]), dim=-1).indices
            equal = top == labels_m[:, None]
            ranks_CM[index, part] = torch.where(equal.any(1), equal.int().argmax(1), MISS).to(torch.int16)
            if index == 0 and original is not None:
                drift += _drift(logits_mV, dense_logits(_part(original, part)), labels_m)
            del logits_mV, ranked_mV  # before the next ones are there
        del projection
    hits = torch.stack([(ranks_CM == rank).sum(1) for rank in range(TOP)], dim=1)
    counted = (labels_CM != IGNORE).sum(1)
    ranked = (targets_CM != IGNORE).sum(1)
    return {"sums": sums, "counts": counted, "ranked": ranked, "hits": hits, "drift": drift, "ranks": ranks_CM}


def _drift(now_mV: Tensor, original_mV: Tensor, labels_m: Tensor) -> Tensor:
    keep_m = labels_m != IGNORE
    before, after = F.log_softmax(original_mV, -1), F.log_softmax(now_mV, -1)
    ce = -before.gather(1, labels_m.clamp(min=0)[:, None]).squeeze(1)
    kl = (before.exp() * (before - after)).sum(-1)
    same = (before.argmax(-1) == after.argmax(-1)).float()
    return torch.stack([torch.where(keep_m, value, 0.0).sum() for value in (ce, kl, same)])


def _part(projection: Projection, part: slice) -> Projection:
    products = tuple((x[part], w) for x, w in projection.products)
    return Projection(products, projection.bias, projection.scale, projection.softcap)


@dataclass(frozen=True)
class HeldOutBatch:
    """Inputs of one evaluation forward, and which (row, position) each of its M rows is."""

    inputs: dict[str, Any]
    row_M: Tensor
    position_M: Tensor


class HeldOutRows:
    """Held-out rows as evaluation batches, from a hidden-state cache or to be run through the backbone.

    Args:
        cached: hidden states of exactly these rows, or None.
        inverse_map: token id -> row of a reduced projection, or None; lm channels are not mapped.
        sees: the heads see tokens, which belong into the batches.
    """

    def __init__(
        self,
        rows: Sequence[TokenRow],
        shifts: Sequence[int],
        inverse_map: Tensor | None,
        cached: CachedRows | None,
        sees: bool = False,
        forward_tokens: int = CHECK_TOKENS,
    ) -> None:
        self.rows, self.shifts, self.inverse_map, self.cached = rows, tuple(shifts), inverse_map, cached
        self.sees, self.forward_tokens = sees, forward_tokens

    @property
    def num_heads(self) -> int:
        """K."""
        return sum(shift >= 2 for shift in self.shifts)

    def batches(self, members: Sequence[int] | None = None) -> Iterator[HeldOutBatch]:
        """All rows, or those with the given indices, in batches."""
        if self.cached is not None:
            yield from self._from_cache(members)
            return
        chosen = range(len(self.rows)) if members is None else members
        order = sorted(chosen, key=lambda index: (len(self.rows[index].input_ids), index))
        for group in _groups(order, self.rows, self.forward_tokens):
            yield self._to_run(group)

    def _from_cache(self, members: Sequence[int] | None) -> Iterator[HeldOutBatch]:
        cached = self.cached
        wanted = torch.arange(len(cached))
        if members is not None:
            wanted = (
                torch.isin(cached.row_N, torch.tensor(list(members), dtype=cached.row_N.dtype)).nonzero().squeeze(1)
            )
        for indices_M in wanted.split(2048):
            targets_CM = cached.labels_NC[indices_M].T.long().contiguous()
            inputs = {"hidden": cached.hidden(indices_M), "labels": self._mapped(targets_CM), "targets": targets_CM}
            inputs |= cached.sight(indices_M)
            yield HeldOutBatch(inputs, cached.row_N[indices_M].long(), cached.position_N[indices_M].long())

    def _to_run(self, group: Sequence[int]) -> HeldOutBatch:
        longest = max(len(self.rows[index].input_ids) for index in group)
        ids_BT = torch.zeros(len(group), longest, dtype=torch.int64)
        flat, labels, row_M, position_M = [], [], [], []
        seen = []
        for line, index in enumerate(group):
            row = self.rows[index]
            ids_BT[line, : len(row.input_ids)] = torch.from_numpy(np.asarray(row.input_ids, np.int64))
            positions, targets = row_targets(row, self.shifts)
            flat.append(positions + line * longest)
            labels.append(targets)
            row_M.append(torch.full_like(positions, index))
            if self.sees:
                seen.append(row_sight(row, positions, self.num_heads))
            position_M.append(positions)
        targets_CM = torch.cat(labels, dim=1)
        inputs = {
            "input_ids": ids_BT,
            "position_ids": torch.arange(longest).expand(len(group), -1),
            "rows": torch.cat(flat),
            "labels": self._mapped(targets_CM),
            "targets": targets_CM,
        }
        if self.sees:
            inputs["seen"] = torch.cat(seen, dim=1)
        return HeldOutBatch(inputs, torch.cat(row_M), torch.cat(position_M))

    def _mapped(self, targets_CM: Tensor) -> Tensor:
        if self.inverse_map is None:
            return targets_CM
        mapped = torch.where(targets_CM == IGNORE, IGNORE, self.inverse_map[targets_CM.clamp(min=0)])
        heads = torch.tensor([shift >= 2 for shift in self.shifts])[:, None]
        return torch.where(heads, mapped, targets_CM)

    def spans(
        self,
        ranks_NK: np.ndarray,
        row_N: np.ndarray,
        position_N: np.ndarray,
        members: Sequence[int] | None = None,
    ) -> list[SpanRanks]:
        """Ranks of scored positions as spans, one per answer of all rows, or of those with the given indices.

        An answer of one token has no rank, and is a round all the same.
        """
        found: dict[int, dict[int, np.ndarray]] = {}
        for row, position, ranks in zip(row_N.tolist(), position_N.tolist(), ranks_NK, strict=True):
            found.setdefault(row, {})[position] = ranks
        heads, spans = self.num_heads, []
        for index in sorted(range(len(self.rows)) if members is None else members):
            row = self.rows[index]
            for start, end in _answers(row.loss_mask):
                ranks_SK = np.full((end - start, heads), END, dtype=np.int16)
                for o in range(end - start - 1):
                    known = min(heads, end - start - 1 - o)
                    ranks_SK[o, :known] = found[index][start + o - 1][:known]
                spans.append(SpanRanks(ranks_SK, row.group or row.id, row.source))
        return spans


def _answers(loss_mask: Any) -> list[tuple[int, int]]:
    """Runs [start, end) of supervised tokens; a token at position 0 has no hidden state before it."""
    mask = np.asarray(loss_mask, dtype=np.int8).copy()
    mask[:1] = 0
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
