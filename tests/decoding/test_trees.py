"""Trees: buffers of published trees, refusals, the ways of writing a tree, drawing it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from medusa_train.decoding.tree import DraftTree, build_buffers
from medusa_train.decoding.tree_text import draw_tree, parse_tree, tree_from_json
from medusa_train.errors import UserError

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "trees"
published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"no published trees in {PUBLISHED}")


@published
def test_published_tree() -> None:
    """vicuna_7b_stage2: 63 paths, depth counts 10/23/23/7, 42 leaves (2/14/19/7 by depth), width 5."""
    tree = parse_tree(str(PUBLISHED / "vicuna_7b_stage2.json"), 4)
    assert tree.num_nodes == 63
    assert [Counter(map(len, tree.paths))[depth] for depth in (1, 2, 3, 4)] == [10, 23, 23, 7]
    leaves = tree.leaves()
    assert len(leaves) == 42
    assert [Counter(map(len, leaves))[depth] for depth in (1, 2, 3, 4)] == [2, 14, 19, 7]
    children = tree.children()
    assert [len(children[(rank,)]) for rank in range(10)] == [10, 5, 2, 2, 1, 1, 1, 1, 0, 0]
    buffers = build_buffers(tree, 10, 4)
    assert buffers.retrieve_PL.shape == (42, 5)
    assert int(buffers.retrieve_valid_PL.sum()) == sum(len(path) + 1 for path in leaves)


@published
@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.json")), ids=lambda path: path.stem)
def test_every_published_tree_has_sound_buffers(path: Path) -> None:
    """Every buffer against its definition, row by row."""
    tree = parse_tree(str(path), 5)
    buffers = build_buffers(tree, 10)
    rows = [(), *tree.paths]
    for u, path_u in enumerate(rows):
        assert buffers.depth_N[u] == len(path_u)
        assert buffers.parent_N[u] == (rows.index(path_u[:-1]) if path_u else 0)
        seen = [v for v, path_v in enumerate(rows) if path_u[: len(path_v)] == path_v]
        assert buffers.tree_mask_NN[u].nonzero().flatten().tolist() == seen
        slot = 0 if not path_u else 1 + (len(path_u) - 1) * 10 + path_u[-1]
        assert buffers.tree_indices_N[u] == slot
        assert [row for row in buffers.rows_NL[u].tolist() if row >= 0] == seen


def test_full_tree_and_chain() -> None:
    full = DraftTree.product([3, 2, 2])
    assert full.num_nodes == 3 + 6 + 12 == 21
    assert len(full.leaves()) == 12
    assert DraftTree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert parse_tree("3,2,2", 3) == full
    assert parse_tree("chain", 4) == DraftTree.chain(4)
    assert parse_tree("chain:2", 4) == DraftTree.chain(2)
    assert parse_tree("none", 4) == DraftTree()


def test_pads_are_no_tokens() -> None:
    """Leaves of unequal depth: what is missing is -1, never row 0, and is marked invalid."""
    buffers = build_buffers(DraftTree.from_paths([[0], [1], [0, 0]]), 2)
    assert buffers.retrieve_PL.tolist() == [[0, 2, -1], [0, 1, 3]]
    assert buffers.retrieve_valid_PL.tolist() == [[True, True, False], [True, True, True]]
    assert buffers.leaf_N.tolist() == [False, False, True, True]


def test_the_empty_tree_is_plain_decoding() -> None:
    buffers = build_buffers(DraftTree(), 1)
    assert buffers.num_rows == 1
    assert buffers.tree_mask_NN.tolist() == [[True]]
    assert buffers.rows_NL.tolist() == [[0]]


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([[0, 0]], r"\[0, 0\] has no parent.*\n.*add \[0\]"),
        ([[0], [0]], r"\[0\] is listed twice"),
        ([[-1]], r"\[-1\] has a negative rank"),
        ([[]], r"\[\] is empty"),
        ([[0.5]], r"\[0.5\] holds something that is no whole number"),
        ([[True]], r"no whole number"),
        (["0"], r"'0' is no list"),
        ([3], r"3 is no list"),
    ],
)
def test_paths_that_make_no_tree(paths: list, words: str) -> None:
    with pytest.raises(UserError, match=words):
        DraftTree.from_paths(paths)


def test_trees_that_do_not_fit() -> None:
    tree = DraftTree.from_paths([[0], [0, 0], [0, 0, 0], [3]])
    with pytest.raises(UserError, match=r"\[0, 0, 0\] is 3 deep and there are 2 heads"):
        build_buffers(tree, 10, num_heads=2)
    with pytest.raises(UserError, match=r"\[3\] uses rank 3"):
        build_buffers(tree, 3, num_heads=3)
    with pytest.raises(UserError, match=r"\[0, 0, 0\] is node 4 of 4"):
        tree.check(3, 10, max_nodes=3)
    tree.check(3, 4, max_nodes=4)


def test_files(tmp_path: Path) -> None:
    def written(text: str) -> str:
        (tmp_path / "tree.json").write_text(text)
        return str(tmp_path / "tree.json")

    assert parse_tree(written("[[1], [0, 1], [0]]"), 2).paths == ((0,), (1,), (0, 1))
    assert parse_tree(written(json.dumps({"format": 1, "paths": [[0]]})), 2).paths == ((0,),)
    with pytest.raises(UserError, match=r"tree.json:1: not JSON"):
        parse_tree(written("[[0],"), 2)
    with pytest.raises(UserError, match="no list of rank paths"):
        parse_tree(written('{"tree": []}'), 2)
    with pytest.raises(UserError, match=r"tree.json: tree path \[1, 0\] has no parent"):
        parse_tree(written("[[0], [1, 0]]"), 2)
    with pytest.raises(UserError, match="3 deep and there are 2 heads"):
        parse_tree("2,2,2", 2)
    with pytest.raises(UserError, match=r"no tree 'missing\.json'"):
        parse_tree("missing.json", 2)
    with pytest.raises(UserError, match="at most 4,096"):
        parse_tree("99,99,99", 3)
    with pytest.raises(UserError, match="1 or more"):
        parse_tree("0,2", 2)
    with pytest.raises(UserError, match="no list of rank paths"):
        tree_from_json({"paths": [0, 1]})


def test_drawing() -> None:
    tree = DraftTree.from_paths([[0], [1], [0, 0], [0, 2]])
    drawn = draw_tree(tree, dict(zip(tree.paths, (0.5, 0.25, 0.2, 0.1), strict=True)))
    assert drawn.splitlines() == [
        "root (4 nodes, 3 leaves, depth 2)",
        "├─ 0  50.0 %",
        "│  ├─ 0  20.0 %",
        "│  └─ 2  10.0 %",
        "└─ 1  25.0 %",
    ]


def test_windows_against_a_slow_oracle() -> None:
    """Random trees, lengths and windows: a row sees a slot if the slot is prefix or ancestor and near enough."""
    import random

    from medusa_train.decoding.masks import wide_tree_mask
    from tests.decoding.helpers import random_tree

    for case in range(60):
        draw = random.Random(case)
        tree = random_tree(draw, 4, 20, 4)
        buffers, length, window = build_buffers(tree, 4), draw.randint(0, 20), draw.choice([None, 1, 2, 3, 7, 40])
        capacity = length + buffers.num_rows
        seen = wide_tree_mask(buffers, capacity, window)[:, capacity - length : 2 * capacity - length]
        rows = [(), *tree.paths]
        expected = torch.zeros_like(seen)
        for u, path_u in enumerate(rows):
            position = length + len(path_u)
            for slot in range(length):
                expected[u, slot] = window is None or position - slot < window
            for v, path_v in enumerate(rows):
                near = window is None or len(path_u) - len(path_v) < window
                expected[u, length + v] = path_u[: len(path_v)] == path_v and near
        assert torch.equal(seen, expected)
