"""The draft tree: which guesses are verified together, and the buffers that one forward pass over it needs.

A tree is a set of rank paths: (0, 2, 1) is rank 0 of head 0, then rank 2 of head 1, then rank 1 of head 2. The root
(the token already decided) is the empty path. Paths are sorted by (length, path); row(empty) = 0 and row(path) = 1 +
its index, and every buffer is a function of row.

Shape letters: N packed rows (root counted), P retrieval paths, L path width (root counted).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.errors import UserError

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class DraftTree:
    """A prefix-closed set of rank paths, sorted by (length, path); the empty tree is plain decoding.

    Build one with `from_paths`, `chain` or `product`, which check; the constructor checks too.
    """

    paths: tuple[RankPath, ...] = ()

    def __post_init__(self) -> None:
        _check_paths(self.paths)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> DraftTree:
        """A tree from rank paths in any order.

        Raises:
            UserError: a path is empty, repeated, holds something that is no rank, or its prefix is missing.
        """
        return cls(tuple(sorted((_as_path(path) for path in paths), key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> DraftTree:
        """The best guess of each of the first `depth` heads: no branches."""
        return cls(tuple((0,) * length for length in range(1, depth + 1)))

    @classmethod
    def product(cls, widths: Sequence[int]) -> DraftTree:
        """The full tree: every combination of the first `widths[j]` ranks of head j (3,2,2 has 3 + 6 + 12 nodes)."""
        if any(width < 1 for width in widths):
            raise UserError(f"tree widths {list(widths)}", allowed="numbers of ranks per head, each 1 or more")
        levels = (itertools.product(*map(range, widths[:length])) for length in range(1, len(widths) + 1))
        return cls(tuple(itertools.chain.from_iterable(levels)))

    @property
    def num_nodes(self) -> int:
        """Guessed nodes; the root is not one of them."""
        return len(self.paths)

    @property
    def num_rows(self) -> int:
        """N: rows of the packed forward, root counted."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Heads used; 0 for plain decoding."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def ranks_used(self) -> int:
        """1 + the largest rank, 0 for plain decoding."""
        return 1 + max((max(path) for path in self.paths), default=-1)

    def children(self) -> dict[RankPath, tuple[int, ...]]:
        """Path (the empty one too) -> the ranks of its children, ascending."""
        found: dict[RankPath, list[int]] = {path: [] for path in ((), *self.paths)}
        for path in self.paths:
            found[path[:-1]].append(path[-1])
        return {path: tuple(ranks) for path, ranks in found.items()}

    def leaves(self) -> tuple[RankPath, ...]:
        """The maximal paths, sorted."""
        children = self.children()
        return tuple(path for path in self.paths if not children[path])

    def check(self, num_heads: int, top_k: int, max_nodes: int | None = None, *, where: str | None = None) -> None:
        """Refuses a tree that these heads cannot fill.

        Raises:
            UserError: a path is deeper than the heads, a rank is not below top_k, or the tree is over its budget.
        """
        for path in self.paths:
            if len(path) > num_heads:
                raise UserError(
                    f"tree path {list(path)} is {len(path)} deep and there are {num_heads} heads",
                    where=where,
                    allowed=f"paths of length 1..{num_heads}",
                )
            if max(path) >= top_k:
                raise UserError(
                    f"tree path {list(path)} uses rank {max(path)}", where=where, allowed=f"ranks 0..{top_k - 1}"
                )
        if max_nodes is not None and self.num_nodes > max_nodes:
            raise UserError(
                f"tree path {list(self.paths[max_nodes])} is node {max_nodes + 1} of {self.num_nodes}",
                where=where,
                allowed=f"at most {max_nodes} nodes",
            )


def _as_path(path: Sequence[int]) -> RankPath:
    if isinstance(path, (str, bytes)) or not isinstance(path, Sequence):
        raise UserError(f"tree path {path!r} is no list of ranks")
    if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in path):
        raise UserError(f"tree path {list(path)!r} holds something that is no whole number")
    return tuple(path)


def _check_paths(paths: tuple[RankPath, ...]) -> None:
    seen: set[RankPath] = {()}
    for path in paths:
        if not path:
            raise UserError("tree path [] is empty; the root is always there and is not listed")
        if min(path) < 0:
            raise UserError(f"tree path {list(path)} has a negative rank", allowed="ranks 0, 1, 2, ...")
        if path in seen:
            raise UserError(f"tree path {list(path)} is listed twice")
        if path[:-1] not in seen:
            raise UserError(
                f"tree path {list(path)} has no parent in the tree", fix=f"add {list(path[:-1])}, or leave it out"
            )
        seen.add(path)
    if any(a >= b for a, b in itertools.pairwise((len(path), path) for path in paths)):
        raise UserError("tree paths are not sorted by length, then by ranks", fix="use DraftTree.from_paths")


@dataclass(frozen=True)
class TreeBuffers:
    """What a tree means in rows, on one device. Built once per tree.

    Attributes:
        tree_indices_N: slot of each row's token among the candidates: 0 the root, 1 + (depth-1) * top_k + rank.
        tree_mask_NN: [u, v] true where path(v) is a prefix of path(u), itself included.
        depth_N: length of each row's path; logical position = committed length + depth.
        parent_N: row of the parent (0 for the root itself).
        rows_NL: rows from the root to each row, -1 past its end (a pad is not a row, and not a token).
        retrieve_PL: the same for the leaves only, in path order.
        leaf_N: true where a row has no children.
        tree, top_k, depths: the tree itself, ranks per head among the candidates, depth_N as plain numbers.
    """

    tree: DraftTree
    top_k: int
    depths: tuple[int, ...]
    tree_indices_N: Tensor
    tree_mask_NN: Tensor
    depth_N: Tensor
    parent_N: Tensor
    rows_NL: Tensor
    retrieve_PL: Tensor
    leaf_N: Tensor

    @property
    def retrieve_valid_PL(self) -> Tensor:
        """True where a retrieval slot is a row of its path."""
        return self.retrieve_PL >= 0

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.depths)


def build_buffers(
    tree: DraftTree, top_k: int, num_heads: int | None = None, device: torch.device | str | None = None
) -> TreeBuffers:
    """The buffers of `tree` with `top_k` candidates from each head.

    Raises:
        UserError: see `DraftTree.check`.
    """
    tree.check(tree.depth if num_heads is None else num_heads, top_k)
    row = {path: index for index, path in enumerate(((), *tree.paths))}
    width = tree.depth + 1
    ancestry = [[row[path[:length]] for length in range(len(path) + 1)] for path in row]
    padded = [rows + [-1] * (width - len(rows)) for rows in ancestry]
    mask_NN = torch.zeros(len(row), len(row), dtype=torch.bool)
    for u, rows in enumerate(ancestry):
        mask_NN[u, rows] = True
    children = tree.children()
    slots = [0] + [1 + (len(path) - 1) * top_k + path[-1] for path in tree.paths]
    leaves = [index for path, index in row.items() if not children[path]]

    def numbers(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return TreeBuffers(
        tree=tree,
        top_k=top_k,
        depths=tuple(len(path) for path in row),
        tree_indices_N=numbers(slots),
        tree_mask_NN=mask_NN.to(device),
        depth_N=numbers([len(path) for path in row]),
        parent_N=numbers([row[path[:-1]] if path else 0 for path in row]),
        rows_NL=numbers(padded),
        retrieve_PL=numbers([padded[index] for index in leaves]),
        leaf_N=torch.tensor([not children[path] for path in row], device=device),
    )
