"""Requests at the edges of what a decoder sizes, pads and stops by; each was wrong once."""

from __future__ import annotations

from medusa_train.decoding.tree import DraftTree

WIDE = DraftTree.product([4, 3, 2])
