"""Trees as they stand in files: JSON lists of rank paths. Building and searching trees is the decoder's business.

`tree.json` is {"format": 1, "paths": [[0], [0, 0], [1], ...], ...}; a bare list of paths is what others exchange.
A path is a list of ranks: [0, 2] = rank 0 of head 0, then rank 2 of head 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.abi import TREE_FILE
from medusa_train.checkpoint.problems import Problems
from medusa_train.errors import UserError

FORMAT = 1
_SEARCH_AGAIN = "search the tree again with `medusa-train tree`, or give another file with --tree"


def check_tree(tree: Any, heads: int, problems: Problems, label: str = TREE_FILE) -> None:
    """Notes everything that makes `tree` no tree for K = `heads`: format, ranks, depth, duplicates, missing parents."""
    if not isinstance(tree, dict) or tree.get("format") != FORMAT or not isinstance(tree.get("paths"), list):
        problems.add("tree", label, f'not {{"format": {FORMAT}, "paths": [...]}}', _SEARCH_AGAIN)
        return
    seen: set[tuple[int, ...]] = set()
    for path in tree["paths"]:
        if not isinstance(path, list) or not path or not all(type(rank) is int and rank >= 0 for rank in path):
            problems.add("tree", label, f"path {path!r} is not a non-empty list of ranks from 0", _SEARCH_AGAIN)
            continue
        if len(path) > heads:
            problems.add("tree", label, f"path {path} is {len(path)} deep, there are {heads} heads", _SEARCH_AGAIN)
        if tuple(path) in seen:
            problems.add("tree", label, f"path {path} stands twice", _SEARCH_AGAIN)
        seen.add(tuple(path))
    for path in sorted(seen, key=lambda path: (len(path), path)):
        if len(path) > 1 and path[:-1] not in seen:
            problems.add("tree", label, f"path {list(path)} has no parent {list(path[:-1])}", _SEARCH_AGAIN)
    if not seen:
        problems.add("tree", label, "no paths", _SEARCH_AGAIN)


def read_tree_file(path: Path, heads: int) -> dict[str, Any]:
    """A tree from a file: our `tree.json`, or the bare list that other programs use.

    Raises:
        UserError: no such file, not JSON, or no tree for this many heads.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the tree cannot be read ({error.strerror or error})", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise UserError("the tree is not JSON", where=str(path), allowed="[[0], [0, 0], [1], ...]") from error
    tree = {"format": FORMAT, "paths": content, "method": "imported"} if isinstance(content, list) else content
    problems = Problems()
    check_tree(tree, heads, problems, label=Path(path).name)
    problems.raise_if_any("this tree cannot be used", path)
    return tree


def sorted_paths(tree: dict[str, Any]) -> list[list[int]]:
    """The paths by (length, path): parents first, the order of the packed rows."""
    return sorted(tree["paths"], key=lambda path: (len(path), path))
