"""What goes into the local engine and comes out; prompts laid side by side for one prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Request:
    """One completion to generate: ``prompt_ids`` and what to do with the answer (`key` is the caller's)."""

    key: object
    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    wave: int = 0  # later turns wait until the earlier turns of all conversations are done: they are longer


@dataclass(frozen=True)
class Completion:
    """Generated ids (the stop token included where one was emitted) and why it ended: "stop" or "length"."""

    request: Request
    token_ids: list[int]
    finish_reason: str


@dataclass
class Row:
    request: Request
    first_step: int  # the step at which the row's first slot (padding included) was written
    end_step: int  # one past the last step that the row may need
    token_ids: list[int] = field(default_factory=list)
    uniforms: np.ndarray | None = None


def right_aligned(prompts: Sequence[Sequence[int]], shared: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids [G, T] of the prompts after their shared beginning, ending together; validity, positions [G, shared + T]."""
    count, width = len(prompts), max(map(len, prompts)) - shared
    ids = np.zeros((count, width), dtype=np.int64)
    valid = np.zeros((count, shared + width), dtype=bool)
    positions = np.zeros((count, shared + width), dtype=np.int64)
    valid[:, :shared], positions[:, :shared] = True, np.arange(shared)
    for index, prompt in enumerate(prompts):
        tail = prompt[shared:]
        ids[index, width - len(tail) :] = tail
        valid[index, shared + width - len(tail) :] = True
        positions[index, shared + width - len(tail) :] = np.arange(shared, shared + len(tail))
    return ids, valid, positions
