"""The shift and the counts, by hand: B=2, T=8, K=3 (DESIGN section 6), packing, masks, and what must not pass."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from medusa_train.dataset.rows import TokenRow
from medusa_train.training import losses
from medusa_train.training.batches import BinCollator
from medusa_train.training.cache import row_targets
from medusa_train.training.heldout import HeldOutRows
from medusa_train.training.losses import (
    IGNORE,
    LossTerms,
    channel_labels,
    cross_entropy_terms,
    inverse_token_map,
    reference_kl_terms,
    shift_labels,
    supervised_rows,
    weighted_sum,
)

X = IGNORE


def test_head_j_of_a_row_of_7_has_5_4_3_targets() -> None:
    ids = torch.arange(7)[None]
    ones, zeros = torch.ones_like(ids), torch.zeros_like(ids)
    counts = [(shift_labels(ids, ones, zeros, shift) != X).sum().item() for shift in (2, 3, 4)]
    assert counts == [5, 4, 3]


# Row 0: u u A A A A u A  (positions 2..5 and 7 supervised).  Row 1: six real tokens, u A A A A A, then padding.
IDS = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25, 0, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1, 0, 0]])
DOCUMENTS = torch.tensor([[0] * 8, [0] * 6 + [-1] * 2])
BY_HAND = {
    1: [[X, 12, 13, 14, 15, X, 17, X], [21, 22, 23, 24, 25, X, X, X]],
    2: [[12, 13, 14, 15, X, 17, X, X], [22, 23, 24, 25, X, X, X, X]],
    3: [[13, 14, 15, X, 17, X, X, X], [23, 24, 25, X, X, X, X, X]],
    4: [[14, 15, X, 17, X, X, X, X], [24, 25, X, X, X, X, X, X]],
}


@pytest.mark.parametrize("shift", [1, 2, 3, 4])
def test_labels_by_hand(shift: int) -> None:
    assert shift_labels(IDS, MASK, DOCUMENTS, shift).tolist() == BY_HAND[shift]


def test_counts_by_hand() -> None:
    """N_0 = 5 + 4, N_1 = 4 + 3, N_2 = 3 + 2."""
    labels = channel_labels(IDS, MASK, DOCUMENTS, (2, 3, 4))
    assert (labels != X).flatten(1).sum(1).tolist() == [9, 7, 5]


def test_supervised_rows_are_those_any_head_has_a_target_at() -> None:
    rows, labels = supervised_rows(channel_labels(IDS, MASK, DOCUMENTS, (2, 3, 4)))
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]
    assert labels[0].tolist() == [12, 13, 14, 15, X, 17, 22, 23, 24, 25]
    assert labels[2].tolist() == [14, 15, X, 17, X, X, 24, 25, X, X]


def test_no_target_crosses_into_the_next_packed_document() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    assert shift_labels(ids, torch.ones_like(ids), documents, 2).tolist() == [[3, X, X, 6, 7, X, X]]


def test_a_pad_that_looks_like_a_real_token_is_no_target() -> None:
    """pad == eos: only document -1 tells them apart, and a mask of ones there must not count."""
    ids = torch.tensor([[5, 6, 2, 2, 2]])
    documents = torch.tensor([[0, 0, 0, -1, -1]])
    assert shift_labels(ids, torch.ones_like(ids), documents, 2).tolist() == [[2, X, X, X, X]]


def test_a_row_shorter_than_the_shift_has_no_target_and_adds_zero() -> None:
    ids = torch.tensor([[1, 2]])
    labels = shift_labels(ids, torch.ones_like(ids), torch.zeros_like(ids), 3)
    assert labels.tolist() == [[X, X]]
    logits = torch.randn(2, 5, requires_grad=True)
    term = cross_entropy_terms(logits, labels[0])
    assert (term.sum.item(), term.count.item(), term.mean().item()) == (0.0, 0, 0.0)
    term.mean().backward()
    assert logits.grad.abs().sum() == 0


def test_mutations_of_the_shift_give_other_labels() -> None:
    """An offset one too small, and a mask that is not shifted with the tokens, differ from the hand-made labels."""
    right = torch.tensor(BY_HAND[3])
    assert not torch.equal(shift_labels(IDS, MASK, DOCUMENTS, 2), right)
    unshifted = torch.full_like(IDS, X)
    unshifted[:, :5] = torch.where(MASK[:, :5].bool(), IDS[:, 3:], X)
    assert not torch.equal(unshifted, right)


def test_sums_are_divided_once_by_the_counts_of_the_step() -> None:
    """lambda = .8, .64, .512; sums 10, 6, 3 over 20, 8, 0: .8/2 + .64 * .75 + 0 = .88."""
    terms = [LossTerms(torch.tensor(value), torch.tensor(0)) for value in (10.0, 6.0, 3.0)]
    counts = torch.tensor([20, 8, 0])
    terms[2] = LossTerms(torch.tensor(0.0), torch.tensor(0))
    assert weighted_sum(terms, [0.8, 0.64, 0.512], counts).item() == pytest.approx(0.4 + 0.48)


def test_tokens_outside_a_reduced_map_are_no_targets_of_the_heads_but_of_the_lm() -> None:
    token_map = torch.tensor([12, 14, 17, 22, 25])
    inverse = inverse_token_map(token_map, 30)
    assert inverse[[12, 13, 25]].tolist() == [0, X, 4]
    labels = channel_labels(IDS, MASK, DOCUMENTS, (1, 2), inverse)
    assert labels[0].tolist() == BY_HAND[1]
    assert labels[1].tolist() == [[0, X, 1, X, X, 2, X, X], [3, X, X, 4, X, X, X, X]]


def test_kl_by_hand_and_zero_for_equal_rows() -> None:
    teacher = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    student = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    # softmax of (0, 0) is (.5, .5); of (1, 0) is (.7311, .2689): KL = .5 ln(.5/.7311) + .5 ln(.5/.2689) = .1201
    term = reference_kl_terms(teacher, student, torch.tensor([1, IGNORE]))
    assert term.sum.item() == pytest.approx(0.12011, abs=1e-4)
    assert term.count.item() == 1
    assert reference_kl_terms(teacher, teacher, torch.tensor([1, 1])).sum.item() == 0.0


def test_cross_entropy_is_torch_s() -> None:
    logits, labels = torch.randn(6, 9), torch.tensor([1, X, 3, 8, X, 0])
    kept = labels != X
    assert cross_entropy_terms(logits, labels).sum.item() == pytest.approx(
        F.cross_entropy(logits[kept], labels[kept], reduction="sum").item(), rel=1e-6
    )


def test_all_that_makes_labels_follows_the_one_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a shift that makes every label 7 plus the shift, batches, caches and held-out rows have such labels only."""
    monkeypatch.setattr(losses, "shift_labels", lambda ids, mask, documents, shift: torch.full_like(ids, 7 + shift))
    row = TokenRow(np.arange(20, 26, dtype=np.int32), np.ones(6, np.uint8), "file:1", "a")
    heldout = next(HeldOutRows([row], (1, 2, 3), None, None).batches()).inputs
    for labels in (
        BinCollator((1, 2, 3), None, 1)([[row]])["labels"],
        row_targets(row, (1, 2, 3))[1],
        heldout["labels"],
        heldout["targets"],
    ):
        assert labels.shape[0] == 3 and [set(channel) for channel in labels.tolist()] == [{8}, {9}, {10}]


ALONG_T = re.compile(r"^(input_ids|loss_mask|labels|targets|tokens|document_ids)(_C?B?T)?$")


def shifts_in(tree: ast.AST) -> list[str]:
    """Reads of a part of tokens, labels, masks or document ids along T, and rolls, outside of `shift_labels`."""
    found: list[str] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "shift_labels":
            continue
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            name = ast.unparse(node.value).split(".")[-1]
            last = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else node.slice
            if isinstance(last, ast.Slice) and (last.lower or last.upper) and ALONG_T.match(name):
                found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("roll", "narrow"):
            found.append(ast.unparse(node))
        found += shifts_in(node)
    return found


def test_nothing_else_in_training_shifts_tokens_labels_or_masks() -> None:
    for path in sorted(Path(losses.__file__).parent.glob("*.py")):
        assert shifts_in(ast.parse(path.read_text())) == [], path.name
    source = Path(losses.__file__).read_text()
    assert len(shifts_in(ast.parse(source.replace("def shift_labels", "def other")))) == 4, "the search finds the shift"
    assert len(shifts_in(ast.parse("batch.input_ids_BT[:, 1:]; labels.roll(-1, 1); labels[index, part]"))) == 2
