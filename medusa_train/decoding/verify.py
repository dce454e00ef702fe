"""Which guesses of a tree stand: pure functions from (tokens, logits) of the tree's rows to the accepted path.

Row u's logits score its successors, so a row's token is judged by its parent's logits. A row counts only if all its
ancestors do: a match after a mismatch counts nothing. Rows are sorted by depth and siblings carry different tokens.

- `greedy`: exact. A token stands if it is the argmax of its parent's logits.
- `typical`: a heuristic (Medusa, arXiv 2401.10774, section 2.3.1): p > min(epsilon, alpha * exp(-H)), strictly, with H
  the entropy of the parent's law; the longest path wins, ties by summed log p. The next root is the argmax.
- `walk`: one token is chosen at each row that is reached, from the root on; the walk goes on while the chosen token is
  a child. Exact in distribution for any way of choosing (sampling with processors, greedy with processors).

Shape letters: B batch, N tree rows, V vocabulary, L path width (root counted).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.decoding.tree import TreeBuffers
from medusa_train.modeling.argmax import argmax_rows


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one round.

    Attributes:
        path_BL: accepted rows from the root on, -1 past the end.
        num_accepted_B: accepted edges, the root not counted.
        winner_B: the last accepted row: hidden state, logits and cache rows all come from its path.
        next_root_B: the token that follows the winner, the root of the next round.
        target_BN: the verifier's choice after each row, -1 where it was not computed.
    """

    path_BL: Tensor
    num_accepted_B: Tensor
    winner_B: Tensor
    next_root_B: Tensor
    target_BN: Tensor


def greedy_accept(tokens_BN: Tensor, logits_BNV: Tensor, buffers: TreeBuffers) -> Acceptance:
    """The path whose every token is the argmax of its parent's logits; the root always stands."""
    target_BN = argmax_rows(logits_BNV)
    agrees_BN = tokens_BN == target_BN.index_select(1, buffers.parent_N)
    reached_BN = reached_rows(agrees_BN, buffers)
    # Rows are sorted by depth and at most one child of a row agrees, so the last reached row is the deepest.
    order_N = torch.arange(1, buffers.num_rows + 1, device=tokens_BN.device)
    return _acceptance((reached_BN * order_N).argmax(-1), target_BN, buffers)


def typical_accept(
    tokens_BN: Tensor,
    logits_BNV: Tensor,
    buffers: TreeBuffers,
    *,
    temperature: float = 1.0,
    epsilon: float = 0.09,
    alpha: float = 0.3,
) -> Acceptance:
    """Typical acceptance; temperature applies before the softmax and so before the entropy.

    Args:
        temperature: > 0.
        epsilon: the threshold is never above it.
        alpha: weight of exp(-H); H in nats.
    """
    logp_BNV = torch.log_softmax(logits_BNV.float() / temperature, dim=-1)
    threshold_BN = typical_threshold(logp_BNV, epsilon, alpha)
    parent_N = buffers.parent_N
    edge_logp_BN = logp_BNV[:, parent_N].gather(-1, tokens_BN[..., None]).squeeze(-1)
    stands_BN = edge_logp_BN.exp() > threshold_BN.index_select(1, parent_N)
    reached_BN = reached_rows(stands_BN, buffers)
    # A root edge does not exist; rows that fall take no part (and their -inf must not turn 0 * -inf into nan).
    edge_logp_BN = edge_logp_BN.masked_fill(~stands_BN, 0.0)
    edge_logp_BN[:, 0] = 0.0
    path_logp_BN = edge_logp_BN @ buffers.tree_mask_NN.T.float()
    length_BN = torch.where(reached_BN, buffers.depth_N, -1)
    longest_BN = length_BN == length_BN.max(-1, keepdim=True).values
    winner_B = path_logp_BN.masked_fill(~longest_BN, -torch.inf).argmax(-1)
    return _acceptance(winner_B, argmax_rows(logits_BNV), buffers)


def typical_threshold(logp_BNV: Tensor, epsilon: float, alpha: float) -> Tensor:
    """min(epsilon, alpha * exp(-H)) of each law, [B, N]."""
    entropy_BN = torch.special.entr(logp_BNV.exp()).sum(-1)
    return torch.clamp(alpha * torch.exp(-entropy_BN), max=epsilon)


def reached_rows(stands_BN: Tensor, buffers: TreeBuffers) -> Tensor:
    """Rows all of whose ancestors (and themselves) stand; the root stands always. bool [B, N]."""
    stands_BN = stands_BN.clone()
    stands_BN[:, 0] = True
    return (stands_BN[:, None, :] | ~buffers.tree_mask_NN).all(-1)


def walk_accept(
    tokens_BN: Tensor,
    logits_BNV: Tensor,
    buffers: TreeBuffers,
    choose: Callable[[int, Tensor, list[int]], int],
) -> Acceptance:
    """Walks from the root while the chosen token is a child; the choice that is no child becomes the next root.

    Args:
        choose: (batch row, logits_V, tokens of this round up to and including the row) -> token id. Called for reached
            rows only, once each, so a seeded generator gives the same text whatever the tree.
    """
    batch, rows = tokens_BN.shape
    target_BN = tokens_BN.new_full((batch, rows), -1)
    winners = []
    children: list[list[int]] = [[] for _ in range(rows)]
    for row, parent in enumerate(buffers.parent_N.tolist()[1:], start=1):
        children[parent].append(row)
    for b, tokens in enumerate(tokens_BN.tolist()):
        row, so_far = 0, [tokens[0]]
        while True:
            token = choose(b, logits_BNV[b, row], so_far)
            target_BN[b, row] = token
            following = next((child for child in children[row] if tokens[child] == token), None)
            if following is None:
                break
            row, so_far = following, [*so_far, token]
        winners.append(row)
    return _acceptance(torch.tensor(winners, device=tokens_BN.device), target_BN, buffers)


def _acceptance(winner_B: Tensor, target_BN: Tensor, buffers: TreeBuffers) -> Acceptance:
    return Acceptance(
        path_BL=buffers.rows_NL.index_select(0, winner_B),
        num_accepted_B=buffers.depth_N.index_select(0, winner_B),
        winner_B=winner_B,
        next_root_B=target_BN.gather(1, winner_B[:, None]).squeeze(1),
        target_BN=target_BN,
    )
