"""Requests at the edges of what a decoder sizes, pads and stops by; each was wrong once."""

from __future__ import annotations

import torch

from medusa_train.decoding.tree import DraftTree
from tests.decoding.helpers import PAD, ScriptedHeads, random_prompt

WIDE = DraftTree.product([4, 3, 2])


class EachKnows(ScriptedHeads):
    """Heads that know every batch row's own text: all guesses of all rows are right."""

    def __init__(self, knowing: list[ScriptedHeads]) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.token_map, self.knowing = knowing[0].config, None, knowing

    def project(self, features_BD, head, projection):
        parts = [one.project(features_BD[b : b + 1], head, projection) for b, one in enumerate(self.knowing)]
        return torch.cat(parts)


def left_padded(lengths: tuple[int, ...]) -> torch.Tensor:
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(ids, lengths, strict=True):
        row[-length:] = torch.tensor(random_prompt(length, length))
    return ids
