"""Trees as people write them (`chain`, `4,3,2,2`, a file) and as people read them (drawn in text)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from medusa_train.decoding.tree import DraftTree, RankPath
from medusa_train.errors import UserError

FORMS = "`chain`, `chain:DEPTH`, widths such as `4,3,2,2`, `none`, or a file of rank paths (JSON)"
MAX_PRODUCT_NODES = 4096


def parse_tree(text: str, num_heads: int) -> DraftTree:
    """A tree from the command line.

    Args:
        text: `chain` (all heads), `chain:3`, `4,3,2,2` (the full product), `none`, or a path of a JSON file.
        num_heads: K of the heads that will fill it.

    Raises:
        UserError: the text is none of these, or the tree does not fit the heads.
    """
    text = text.strip()
    if text == "none":
        return DraftTree()
    if chain := re.fullmatch(r"chain(?::(\d+))?", text):
        depth = num_heads if chain[1] is None else int(chain[1])
        if not 1 <= depth <= num_heads:
            raise UserError(f"tree {text}", allowed=f"a depth of 1..{num_heads}, as many as there are heads")
        tree = DraftTree.chain(depth)
    elif re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
        tree = _product(text)
    else:
        tree = read_tree(Path(text))
    if tree.depth > num_heads:
        tree.check(num_heads, tree.ranks_used, where=text)
    return tree


def _product(text: str) -> DraftTree:
    widths = [int(width) for width in text.split(",")]
    nodes, level = 0, 1
    for width in widths:
        level *= width
        nodes += level
    if nodes > MAX_PRODUCT_NODES:
        raise UserError(f"tree {text} has {nodes:,} nodes", allowed=f"at most {MAX_PRODUCT_NODES:,}")
    return DraftTree.product(widths)


def read_tree(path: Path) -> DraftTree:
    """A tree from a JSON file: a list of rank paths, or an object with such a list under "paths" (tree.json).

    Raises:
        UserError: there is no such file, it is not JSON, or it holds no tree.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no tree {str(path)!r}", allowed=FORMS) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read: {error}", where=str(path)) from None
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}") from None
    return tree_from_json(content, where=str(path))


def tree_from_json(content: Any, where: str | None = None) -> DraftTree:
    """A tree from parsed JSON; see `read_tree`."""
    paths = content.get("paths") if isinstance(content, dict) else content
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
        raise UserError("no list of rank paths", where=where, allowed='[[0], [0, 0], [1]] or {"paths": [...]}')
    try:
        return DraftTree.from_paths(paths)
    except UserError as error:
        raise UserError(error.what, where=where, allowed=error.allowed, fix=error.fix) from None


def draw_tree(tree: DraftTree, weights: dict[RankPath, float] | None = None) -> str:
    """The tree as indented text, one node a line, with each node's weight where given."""
    children = tree.children()
    lines = [f"root ({tree.num_nodes} nodes, {len(tree.leaves())} leaves, depth {tree.depth})"]

    def walk(path: RankPath, indent: str) -> None:
        ranks = children[path]
        for rank in ranks:
            last = rank == ranks[-1]
            node = (*path, rank)
            weight = "" if weights is None or node not in weights else f"  {100 * weights[node]:.1f} %"
            lines.append(f"{indent}{'└─' if last else '├─'} {rank}{weight}")
            walk(node, indent + ("   " if last else "│  "))

    walk((), "")
    return "\n".join(lines)
