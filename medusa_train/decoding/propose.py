"""What the heads guess: their best tokens at one hidden row per batch row.

Plain heads guess all depths at once. Heads that see the parent go down the tree: what a row's children are depends on
the row's own token, so each depth is one block and one projection over the rows that have children.

Shape letters: B batch, D hidden, J heads run, k ranks, N tree rows, Q rows of one depth that have children.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_train.decoding.tree import TreeBuffers
from medusa_train.modeling.backbone import OutputProjection
from medusa_train.modeling.heads import MedusaHeads


def top_tokens(
    heads: MedusaHeads, hidden_BD: Tensor, projection: OutputProjection, *, num_heads: int, k: int
) -> Tensor:
    """The k likeliest tokens of the first `num_heads` heads, best first: ids of the full vocabulary, [B, J, k].

    `shared` heads go through the one projection together, so its weight is read once.
    """
    features = [heads.features(hidden_BD, head) for head in range(num_heads)]
    if heads.config.contract == "shared":
        logits_BJV = projection(torch.stack(features, dim=1))
    else:
        logits_BJV = torch.stack(
            [heads.project(feature, head, projection) for head, feature in enumerate(features)], dim=1
        )
    return best_tokens(heads, logits_BJV, projection, k)


def best_tokens(heads: MedusaHeads, logits_MV: Tensor, projection: OutputProjection, k: int) -> Tensor:
    """The k likeliest tokens of some heads' logits [..., V], best first: ids of the full vocabulary, [..., k]."""
    if heads.token_map is None and projection.valid_vocab_size is not None:
        # Rows past the tokenizer are padding of the weight: no token, so no guess.
        logits_MV = logits_MV[..., : projection.valid_vocab_size]
    return heads.to_token_ids(logits_MV.topk(k, dim=-1).indices)


class Descent:
    """Fills a tree with the guesses of heads that see the parent.

    Args:
        buffers: the tree.
        embedding: the backbone's input embedding.
    """

    def __init__(
        self, heads: MedusaHeads, projection: OutputProjection, buffers: TreeBuffers, embedding: nn.Module
    ) -> None:
        self.heads, self.projection, self.embedding = heads, projection, embedding
        self.num_rows = buffers.num_rows
        row = {path: index for index, path in enumerate(((), *buffers.tree.paths))}
        device = buffers.depth_N.device

        def numbers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        # Per depth: the rows with children; per child its row, its parent's place among those, and its rank.
        self.depths: list[tuple[Tensor, Tensor, Tensor, Tensor, int]] = []
        for depth in range(buffers.tree.depth):
            children = [path for path in buffers.tree.paths if len(path) == depth + 1]
            parents = sorted({row[path[:-1]] for path in children})
            place = {parent: index for index, parent in enumerate(parents)}
            self.depths.append(
                (
                    numbers(parents),
                    numbers([row[path] for path in children]),
                    numbers([place[row[path[:-1]]] for path in children]),
                    numbers([path[-1] for path in children]),
                    1 + max(path[-1] for path in children),
                )
            )

    def __call__(self, hidden_BD: Tensor, middle_BD: Tensor | None, root_B: Tensor) -> Tensor:
        """tokens_BN of all rows, the root's included, from the frontier's states and the root."""
        tokens_BN = root_B[:, None].repeat(1, self.num_rows)
        for head, (parents_Q, rows, places, ranks, most) in enumerate(self.depths):
            context_BD = self.heads.context(hidden_BD, middle_BD, head)
            parent_BQD = self.embedding(tokens_BN[:, parents_Q])
            features_BQD = self.heads.features_below(hidden_BD[:, None], context_BD[:, None], parent_BQD, head)
            logits_BQV = self.heads.project(features_BQD, head, self.projection)
            best_BQk = best_tokens(self.heads, logits_BQV, self.projection, most)
            tokens_BN[:, rows] = best_BQk[:, places, ranks]
        return tokens_BN


def ranks_available(heads: MedusaHeads, projection: OutputProjection) -> int:
    """How many different tokens a head can propose."""
    rows = heads.config.projection_rows
    if heads.token_map is None and projection.valid_vocab_size is not None:
        rows = min(rows, projection.valid_vocab_size)
    return rows
