"""The one place where training asks the data set for rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from medusa_train.config.recipe import DataSection
from medusa_train.dataset.rows import TokenRow


def read_rows(paths: Sequence[str], base: Any, data: DataSection) -> tuple[list[TokenRow], str | None]:
    """(rows, manifest hash) of files, hub data sets or folders that `distill` wrote."""
    from medusa_train.dataset.rows import load_rows, row_options

    found = load_rows(list(paths), base, row_options(data))
    return list(found.rows), found.manifest_hash


def split(rows: Sequence[TokenRow], fraction: float, seed: int) -> tuple[list[TokenRow], list[TokenRow]]:
    """(train, held out), all samples of one prompt on one side."""
    from medusa_train.dataset.rows import split_rows

    train, heldout = split_rows(rows, fraction, seed)
    return list(train), list(heldout)
