"""Slips that mask code invites, made on purpose: the character-level oracle and the batch checks must notice each.

The checks that the mask tests run are run here against the broken code. A mutation that nothing notices would mean that
the tests cannot fail.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from medusa_train.dataset import collate
from tests.dataset import test_masks, test_rows
from tests.dataset.test_masks import CASES, check

# name -> (module, what stands there, what a slip would make of it, the check that must fail)
MUTATIONS = {
    "the last token of the prompt is supervised": (
        "dataset.render",
        "        mask[begin:end] = 1\n",
        "        mask[begin - 1 : end] = 1\n",
        "one_row",
    ),
    "the answer's first token is not": (
        "dataset.render",
        "        mask[begin:end] = 1\n",
        "        mask[begin + 1 : end] = 1\n",
        "one_row",
    ),
    "the terminator is dropped": (
        "dataset.render",
        'stop = answer.terminator if options.supervise_terminator else ""\n        begin',
        'stop = ""\n        begin',
        "one_row",
    ),
    "the terminator is always supervised": (
        "dataset.render",
        'stop = answer.terminator if options.supervise_terminator else ""\n        begin',
        "stop = answer.terminator\n        begin",
        "bare_terminator",
    ),
    "BOS and every other prompt token are supervised": (
        "dataset.render",
        "mask = [0] * len(prompt_ids) + [1] * supervised",
        "mask = [1] * len(prompt_ids) + [1] * supervised",
        "row_by_turn",
    ),
    "user turns are supervised": (
        "dataset.render",
        "        mask[begin:end] = 1\n",
        "        mask[mask.nonzero()[0].max() + 1 if mask.any() else begin : end] = 1\n",
        "one_row",
    ),
    "the answer is looked up by its words": (
        "dataset.templates",
        "            text = whole[len(prompt) : len(whole) - len(suffix)]\n",
        '            at = whole.find(message["content"].strip())\n'
        "            prompt, text = whole[:at], whole[at : len(whole) - len(suffix)]\n",
        "repeated_words",
    ),
    "the whole suffix ends the turn": (
        "dataset.templates",
        "return suffix if best is None else suffix[: best[0] + best[1]]",
        "return suffix",
        "next_header",
    ),
    "a merge across the border goes unseen": (
        "dataset.render",
        "return len(part) if ids[: len(part)] == part else None",
        "return len(part)",
        "straddling",
    ),
    "only the last answer is supervised": (
        "dataset.render",
        "    for answer in answers:\n        if not text",
        "    for answer in answers[-1:]:\n        if not text",
        "one_row",
    ),
    "BOS a second time": (
        "dataset.render",
        'return base.tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]',
        "return [base.tokenizer.bos_token_id or 0] + "
        'base.tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]',
        "one_bos",
    ),
    "document_ids ignored by attention": (
        "modeling.masks",
        "    same = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]\n",
        "    same = torch.ones_like(document_ids_BT[:, :, None] == document_ids_BT[:, None, :])\n",
        "packed_attention",
    ),
    "document_ids ignored by flex attention": (
        "modeling.masks",
        "(query >= key) & (document_ids_BT[line, query] == document_ids_BT[line, key])",
        "(query >= key)",
        "packed_flex",
    ),
    "windows measured by slot, not by position": (
        "modeling.masks",
        "position_ids_BT[:, :, None] - position_ids_BT[:, None, :]",
        "rows[None, :, None] - rows[None, None, :] + 40",
        "packed_windows",
    ),
    "a line's end is no document's end": (
        "modeling.masks",
        "begins_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]",
        "begins_BT.view(-1)[1:] = document_ids_BT.view(-1)[1:] != document_ids_BT.view(-1)[:-1]",
        "starts",
    ),
    "positions run on through a packed line": (
        "dataset.packing",
        "positions[number, at:end] = torch.arange(len(row))",
        "positions[number, at:end] = torch.arange(at, end)",
        "batch",
    ),
    "all documents of a line are one": (
        "dataset.packing",
        "documents[number, at:end] = document\n",
        "documents[number, at:end] = 0\n",
        "batch",
    ),
    "labels shift across documents": (
        "training.losses",
        " & (document_BL == document_ids_BT[:, :length]) & (document_BL >= 0)",
        " & (document_BL >= 0)",
        "labels",
    ),
}


def one_row() -> None:
    for family in ("chatml", "llama-2", "llama-3", "mistral-v3", "deepseek-v3"):
        assert check(family, "byte-level", CASES["three turns"]) == 1


def bare_terminator() -> None:
    test_masks.test_terminator_can_stay_unsupervised()


def row_by_turn() -> None:
    check("qwen3", "byte-level", CASES["three turns"])
    check("deepseek-r1", "sentencepiece-first", CASES["reasoning"])


def repeated_words() -> None:
    check("chatml", "byte-level", CASES["answer repeats the question"])


def next_header() -> None:
    check("chatml", "byte-level", CASES["equal answers"])


def straddling() -> None:
    test_masks.test_a_merge_across_the_border_makes_rows_by_turn()


def one_bos() -> None:
    test_masks.test_one_bos_where_the_template_wants_one("llama-3")


def packed_attention() -> None:
    test_rows.test_packed_hidden_states_are_the_unpacked_ones("llama", "eager")


def packed_flex() -> None:
    test_rows.test_packed_hidden_states_are_the_unpacked_ones("llama", "flex_attention")


def packed_windows() -> None:
    test_rows.test_packed_hidden_states_are_the_unpacked_ones("mistral", "sdpa")


def starts() -> None:
    test_rows.test_document_starts_by_hand()


def batch() -> None:
    test_rows.test_batch_by_hand()


def labels() -> None:
    """Two documents in a line: no label of the first is a token of the second."""
    from medusa_train.training import losses

    line = collate([test_rows.row(5), test_rows.row(4)], max_length=9, packing=True)
    for shift in (1, 2, 3):
        found = losses.shift_labels(line.input_ids_BT, line.loss_mask_BT, line.document_ids_BT, shift)[0].tolist()
        for at, label in enumerate(found):
            inside = at + shift < 5 if at < 5 else at + shift < 9
            wanted = inside and bool(line.loss_mask_BT[0, at + shift])
            assert label == (int(line.input_ids_BT[0, at + shift]) if wanted else losses.IGNORE)


CHECKS = {
    one.__name__: one
    for one in (
        one_row, bare_terminator, row_by_turn, repeated_words, next_header, straddling, one_bos, packed_attention,
        packed_flex, packed_windows, starts, batch, labels,
    )
}  # fmt: skip


def break_module(monkeypatch: pytest.MonkeyPatch, module: ModuleType, old: str, new: str) -> None:
    """Every function of `module` as the changed source has it, put wherever the package and the tests hold the old."""
    source = Path(inspect.getsourcefile(module)).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{module.__name__} no longer has {old!r} once"
    code = compile(source.replace(old, new), module.__file__, "exec")
    broken = ModuleType(module.__name__)
    broken.__dict__.update(__file__=module.__file__, __package__=module.__package__)
    with pytest.MonkeyPatch.context() as names:  # dataclasses look their module up by name
        names.setitem(sys.modules, module.__name__, broken)
        exec(code, broken.__dict__)
    for name, thing in vars(module).items():
        if inspect.isfunction(thing) and thing.__module__ == module.__name__:
            # The function itself takes the changed code, so whoever imported it runs it; its globals stay the module's.
            monkeypatch.setattr(thing, "__code__", vars(broken)[name].__code__)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new, noticed_by = MUTATIONS[name]
    CHECKS[noticed_by]()
    break_module(monkeypatch, importlib.import_module(f"medusa_train.{module}"), old, new)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        CHECKS[noticed_by]()
