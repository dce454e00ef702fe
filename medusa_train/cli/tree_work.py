"""The work behind `medusa-train tree`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from medusa_train.cli.tree import AUTO_SIZES
from medusa_train.console import human_count, out, progress, say, table
from medusa_train.decoding.calibrate import calibrate
from medusa_train.decoding.decode import TreeDecoder
from medusa_train.decoding.held_out import held_out
from medusa_train.decoding.overhead import Overhead, measure_overhead
from medusa_train.decoding.ranks import supervised_spans
from medusa_train.decoding.replay import replay
from medusa_train.decoding.search import exact_rank_accuracies, search
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.tree import DraftTree
from medusa_train.decoding.tree_text import draw_tree, parse_tree
from medusa_train.errors import UserError
from medusa_train.provenance import sha256_file, sha256_json

# Below this part of greedy tokens the text is not what greedy decoding would say, and replay is only an estimate.
GREEDY_ENOUGH = 0.97
ROWS_AT_ONCE = 32


class TreeJob:
    """One run of the command: calibration, search, what is printed and stored."""

    def __init__(self, base: Any, opened: Any, method: str, smoothing: float, top_k: int) -> None:
        self.base, self.heads, self.manifest = base, opened.heads, opened.manifest
        self.method, self.smoothing, self.top_k = method, smoothing, top_k
        self.valid_vocab_size = len(base.tokenizer)

    def calibrate(self, paths: Sequence[str], max_rows: int, answers: str) -> None:
        """Counts ranks along held-out rows."""
        rows = calibration_rows(self.base, self.manifest.recipe, paths)
        rows = [row for row in rows if supervised_spans(row.loss_mask)][:max_rows]
        if not rows:
            raise UserError("no held-out row has a supervised token", fix="name rows with --data")
        if answers == "greedy":
            rows = self._answered(rows)
        self.prompt = self._prompt_of(rows)
        with progress("calibrating", len(rows), "rows") as bar:
            self.calibration = calibrate(
                self.base.model,
                self.heads,
                rows,
                top_k=self.top_k,
                valid_vocab_size=self.valid_vocab_size,
                on_row=lambda _: bar.advance(),
            )
        counts = human_count(self.calibration.num_tokens)
        greedy = self.calibration.greedy_fraction
        say(f"{len(rows)} rows, {counts} tokens, {100 * greedy:.1f} % of them the model's own greedy choice")
        if greedy < GREEDY_ENOUGH:
            say(
                "note: this text is not greedy, so tokens per round below are an estimate for greedy decoding; "
                "--answers greedy counts along the model's own answers"
            )

    def _answered(self, rows: list[Any]) -> list[Any]:
        """The rows' prompts with the model's own greedy answers, decoded plainly in batches of like length."""
        starts = [supervised_spans(row.loss_mask)[0] for row in rows]
        order = sorted(range(len(rows)), key=lambda index: starts[index][0])
        decoder, answered = TreeDecoder(self.base.model), {}
        with progress("answering greedily", len(rows), "rows") as bar:
            for first in range(0, len(order), ROWS_AT_ONCE):
                batch = order[first : first + ROWS_AT_ONCE]
                prompts = [[int(token) for token in rows[index].input_ids[: starts[index][0]]] for index in batch]
                most = max(end - start for start, end in (starts[index] for index in batch))
                done = decoder.decode(prompts, DecodeSettings(max_new_tokens=max(16, most)))
                for index, prompt, answer in zip(batch, prompts, done, strict=True):
                    ids = np.array([*prompt, *answer.token_ids], dtype=np.int32)
                    mask = np.array([0] * len(prompt) + [1] * len(answer.token_ids), dtype=np.uint8)
                    answered[index] = replace(rows[index], input_ids=ids, loss_mask=mask)
                bar.advance(len(batch))
        return [answered[index] for index in range(len(rows))]

    @staticmethod
    def _prompt_of(rows: list[Any]) -> list[int]:
        """Text of ordinary length for timing rounds: the middle row, half of its answer included."""
        row = sorted(rows, key=lambda row: len(row.input_ids))[len(rows) // 2]
        start, end = supervised_spans(row.loss_mask)[0]
        return [int(token) for token in row.input_ids[: (start + end + 1) // 2]]

    def given(self, text: str) -> dict[str, Any]:
        """The content of tree.json for a tree that the user gave."""
        tree = parse_tree(text, self.heads.config.medusa_num_heads)
        tree.check(self.heads.config.medusa_num_heads, self.calibration.top_k, where=text)
        if not tree.num_nodes:
            raise UserError("an empty tree is plain decoding", allowed="a tree with at least one node")
        done = replay(self.calibration.spans, tree, self.calibration.top_k)
        return self._content(tree, "given", None, done, None)

    def searched(self, size: int | None, max_nodes: int) -> dict[str, Any]:
        """The content of tree.json for the best tree of `size` nodes, or of the fastest size."""
        overhead = None
        if size is None:
            size, overhead = self._fastest(max_nodes)
        found = search(self.calibration, size, self.method, smoothing=self.smoothing)
        unseen = held_out(self.calibration, size, self.method, self.smoothing)
        return self._content(found.tree, self.method, found.weights, unseen.replay, overhead, found.passes)

    def _fastest(self, max_nodes: int) -> tuple[int, Overhead]:
        sizes = sorted({size for size in AUTO_SIZES if size < max_nodes} | {max_nodes})
        trees = {size: search(self.calibration, size, self.method, smoothing=self.smoothing).tree for size in sizes}
        repeats = 2
        with progress("timing rounds", (len(sizes) + 1) * (repeats + 1), "runs") as bar:
            overhead = measure_overhead(
                self.base.model, self.heads, trees, self.prompt, repeats=repeats, on_pass=bar.advance
            )
        unseen = {n: held_out(self.calibration, n, self.method, self.smoothing).tokens_per_round for n in sizes}
        best = max(sizes, key=lambda n: unseen[n] / overhead.at(n))
        rows = [
            (
                n,
                f"{1000 * seconds:.1f}",
                f"{overhead.at(n):.2f}",
                f"{unseen[n]:.3f}",
                f"{unseen[n] / overhead.at(n):.3f}" + (" *" if n == best else ""),
            )
            for n, seconds in zip(overhead.nodes, overhead.round_seconds, strict=True)
        ]
        title = f"size by speed (a plain step takes {1000 * overhead.plain_seconds:.1f} ms)"
        table(title, ("nodes", "ms/round", "c", "tokens/round", "speedup"), rows)
        return best, overhead

    def _content(self, tree, method, weights, unseen, overhead, passes=1) -> dict[str, Any]:
        hits, counts = self.calibration.hits_and_counts()
        low, high = unseen.interval()
        content: dict[str, Any] = {
            "format": 1,
            "paths": [list(path) for path in tree.paths],
            "method": method,
            "top_k": self.calibration.top_k,
            "expected_tokens_per_round": unseen.tokens_per_round,
            "interval_95": [low, high],
            "node_probability": list(self._reached(tree) if weights is None else weights),
            "calibration": {
                "hits": hits.tolist(),
                "counts": counts.tolist(),
                "rows": len({span.row_id for span in self.calibration.spans}),
                "tokens": self.calibration.num_tokens,
                "greedy_fraction": self.calibration.greedy_fraction,
            },
            "smoothing": self.smoothing if method == "joint" else None,
            "passes": passes,
        }
        if overhead is not None:
            content["overhead"] = {
                "nodes": list(overhead.nodes),
                "c": list(overhead.overhead),
                "plain_ms": 1000 * overhead.plain_seconds,
                "round_ms": [1000 * seconds for seconds in overhead.round_seconds],
            }
        return content

    def _reached(self, tree: DraftTree) -> list[float]:
        accuracies = exact_rank_accuracies(*self.calibration.hits_and_counts()).tolist()
        weights = {(): 1.0}
        for path in tree.paths:
            weights[path] = weights[path[:-1]] * accuracies[len(path) - 1][path[-1]]
        return [weights[path] for path in tree.paths]

    def show_search(self, content: dict[str, Any], sizes: Sequence[int]) -> None:
        """Prints head accuracies and the two methods side by side."""
        hits, counts = self.calibration.hits_and_counts()
        accuracy = exact_rank_accuracies(hits, counts)
        table(
            "how often the true token is among a head's best (held-out text)",
            ("head", "predicts", "top 1", "top 2", "top 5", "top 10", "of"),
            [
                (j, f"t+{j + 2}", *(f"{100 * accuracy[j, :k].sum():.1f} %" for k in (1, 2, 5, 10)), int(counts[j]))
                for j in range(len(counts))
            ],
        )
        rows = []
        for size in sorted({*sizes, len(content["paths"])}):
            joint = held_out(self.calibration, size, "joint", self.smoothing).tokens_per_round
            independent = held_out(self.calibration, size, "independent", self.smoothing).tokens_per_round
            rows.append((size, f"{joint:.3f}", f"{independent:.3f}"))
        table("tokens per round on rows not used for the search", ("nodes", "joint", "independent"), rows)


def show_tree(content: dict[str, Any]) -> None:
    """Draws the tree of a tree.json and says what it is worth."""
    tree = DraftTree.from_paths(content["paths"])
    weights = dict(zip(tree.paths, content["node_probability"], strict=True))
    out().print(draw_tree(tree, weights), markup=False)
    low, high = content["interval_95"]
    out().print(
        f"{content['method']} tree, {tree.num_nodes} nodes: {content['expected_tokens_per_round']:.3f} tokens per "
        f"round expected (root counted; 95 % interval {low:.3f} to {high:.3f}, rows not used for the search)"
    )


def say_stored(folder: str | Path, how: str) -> None:
    """Says where the tree is."""
    say(f"{Path(folder) / 'tree.json'}: {how}")


def data_sha256(recipe: dict[str, Any], paths: Sequence[str]) -> str:
    """Hash of the files that `calibration_rows` would read, so that a tree of other rows is searched anew."""
    from medusa_train.dataset.files import sources_of

    data = recipe.get("data") or {}
    names = list(paths) or data.get("heldout") or data.get("train") or []
    names = [names] if isinstance(names, str) else names
    files = [file for name in names for file in (sources_of(name) if Path(name).exists() else [name])]
    return sha256_json([[str(file), sha256_file(file) if Path(file).is_file() else None] for file in files])


def calibration_rows(base: Any, recipe: dict[str, Any], paths: Sequence[str]) -> list[Any]:
    """Rows named by `paths`, else the recipe's held-out rows, else those it split off its training rows.

    Raises:
        UserError: the checkpoint's recipe names no rows and neither does the user.
    """
    from medusa_train.config.recipe import DataSection
    from medusa_train.dataset import load_rows, row_options, split_rows

    if not recipe.get("data") and not paths:
        raise UserError("this checkpoint's recipe names no data", fix="name rows to calibrate on with --data")
    data = DataSection.model_validate(recipe.get("data") or {"train": list(paths)})
    # Rendered as in training, so that calibration reads the same ids.
    options = row_options(data)
    if paths or data.heldout:
        return list(load_rows(list(paths or data.heldout), base, options).rows)
    if data.heldout_fraction == 0:
        raise UserError("this checkpoint's recipe held no rows out", fix="name rows to calibrate on with --data")
    rows = load_rows(list(data.train), base, options).rows
    return list(split_rows(rows, data.heldout_fraction, data.split_seed)[1])
