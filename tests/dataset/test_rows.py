"""Rows: counts that add up, splits by prompt, packing, and packed hidden states equal to unpacked ones."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.dataset import RowOptions, TokenRow, collate, collate_bins, load_rows, pack_rows, split_rows
from medusa_train.dataset.packing import best_fit, packing_report
from medusa_train.dataset.rows import row_options
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import hidden_states
from medusa_train.modeling.base import load_base
from medusa_train.modeling.masks import document_starts, packed_attention_mask
from tests.dataset.families import FAMILIES as CHAT_FAMILIES
from tests.dataset.test_reading import DROPS, messages, write
from tests.dataset.tokenizers_made import base_for, made_base
from tests.tiny import FAMILIES, save_tiny_base, tiny_model


def row(length: int, name: str = "r", seed: int = 0, group: str = "") -> TokenRow:
    generator = np.random.default_rng(seed + length)
    mask = np.zeros(length, dtype=np.uint8)
    mask[length // 2 :] = 1
    return TokenRow(generator.integers(3, 60, length).astype(np.int32), mask, "test", name, group)


def test_conversations_in_are_trained_or_dropped(tmp_path: Path) -> None:
    good = [messages(("user", f"hello {n}"), ("assistant", "fine")) for n in range(6)]
    path = write(tmp_path / "a.jsonl", *good, good[0], *DROPS.values())
    base = made_base("chatml", "byte-level")
    with pytest.raises(UserError, match="11 of 17 rows were dropped"):
        load_rows(path, base)
    found = load_rows(path, base, RowOptions(max_drop_fraction=1.0))
    assert found.counts.conversations_in == 17
    assert found.counts.conversations_kept == 6 == len(found.rows)
    assert found.counts.drops == {**dict.fromkeys(DROPS, 1), "exact duplicate": 1}
    assert found.counts.tokens == sum(map(len, found.rows))
    assert found.counts.supervised_tokens == sum(row.supervised for row in found.rows)


def test_template_refusals_and_cut_rows_are_counted(tmp_path: Path) -> None:
    rows = [
        messages(("user", "hi"), ("assistant", "fine " * 40)),
        messages(("user", "hello " * 60), ("assistant", "fine")),
        messages(("system", "x"), ("user", "hi"), ("assistant", "fine")),
    ]
    base = made_base("gemma", "byte-level")
    options = RowOptions(max_length=40, max_drop_fraction=1.0)
    found = load_rows(write(tmp_path / "a.jsonl", *rows), base, options)
    assert [len(row) for row in found.rows] == [40]
    assert found.counts.truncated == 2
    assert found.counts.drops == {"no supervised token": 1, "template refuses: System role not supported": 1}
    assert found.counts.conversations_in == 3 == found.counts.conversations_kept + sum(found.counts.drops.values())


@pytest.mark.parametrize("count", [3, 30])
def test_a_template_that_cannot_be_masked_is_refused_by_name_with_the_way_out(tmp_path: Path, count: int) -> None:
    base = base_for(CHAT_FAMILIES["deepseek-r1"], "some/r1", "byte-level")
    path = write(tmp_path / "a.jsonl", *[messages(("user", f"hi {n}"), ("assistant", "x")) for n in range(count)])
    with pytest.raises(UserError) as caught:
        load_rows(path, base)
    text = str(caught.value)
    assert "the chat template of some/r1 allows no exact mask: template changes the answer's beginning" in text
    assert "--chat-template FILE" in text and "one_row_per_turn" in text
    assert len(load_rows(path, base, RowOptions(one_row_per_turn=True)).rows) == count


def test_manifest_hash_goes_by_ids_and_masks(tmp_path: Path) -> None:
    base = made_base("chatml", "byte-level")
    path = write(tmp_path / "a.jsonl", messages(("user", "hi"), ("assistant", "fine")))
    same = write(tmp_path / "b.json.jsonl", messages(("user", "hi"), ("assistant", "fine")))
    other = load_rows(path, base, RowOptions(supervise_terminator=False)).manifest_hash
    assert load_rows(path, base).manifest_hash == load_rows(same, base).manifest_hash != other


def test_render_options_of_a_recipe() -> None:
    import types

    section = types.SimpleNamespace(max_length=64, max_drop_fraction=0.1, render={"supervise_terminator": False})
    assert row_options(section) == RowOptions(64, False, False, 0.1)
    section.render = {"supervise_terminatr": True}
    with pytest.raises(UserError, match="did you mean 'supervise_terminator'"):
        row_options(section)


def test_split_keeps_answers_to_one_prompt_together_and_is_stable() -> None:
    rows = [row(5, f"{group}-{sample}", group=f"prompt {group}") for group in range(400) for sample in range(2)]
    train, heldout = split_rows(rows, 0.25, seed=3)
    assert len(train) + len(heldout) == 800
    assert not {r.group for r in train} & {r.group for r in heldout}
    assert 140 < len(heldout) < 260  # 200 expected, 2 * sqrt(400 * 1/4 * 3/4) = 17 per deviation
    again, fewer = split_rows(rows[:100], 0.25, seed=3)
    assert {r.id for r in fewer} == {r.id for r in heldout} & {r.id for r in rows[:100]} and again
    assert split_rows(rows, 0.25, seed=4)[1] != heldout
    assert split_rows(rows, 0.0)[1] == []


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), max_size=60), limit=st.integers(30, 64))
def test_packing_loses_nothing_and_fills_lines(lengths: list[int], limit: int) -> None:
    bins = best_fit(lengths, limit)
    assert sorted(index for line in bins for index in line) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in line) for line in bins]
    assert all(load <= limit for load in loads)
    # Best fit never leaves two lines that would fit into one.
    assert all(a + b > limit for i, a in enumerate(loads) for b in loads[i + 1 :])


def test_packing_by_hand() -> None:
    # 6 opens a line (4 free), 5 opens one (5 free), 4 fits the first exactly, 3 and 2 fill the second.
    assert best_fit([2, 6, 3, 5, 4], 10) == [[1, 4], [3, 2, 0]]
    report = packing_report([2, 6, 3, 5, 4], 10)
    assert report == {"rows": 5, "lines": 2, "padding_packed": 0.0, "padding_unpacked": 0.6}
    with pytest.raises(UserError, match="11 tokens does not fit"):
        best_fit([11], 10)


def test_batch_by_hand() -> None:
    a = TokenRow(np.array([5, 6, 7], np.int32), np.array([0, 1, 1], np.uint8), "t", "a")
    b = TokenRow(np.array([8, 9], np.int32), np.array([0, 1], np.uint8), "t", "b")
    c = TokenRow(np.array([4], np.int32), np.array([1], np.uint8), "t", "c")
    batch = collate_bins([[a, b], [c]], pad_to_multiple=4, pad_token_id=2)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9, 2, 2, 2], [4, 2, 2, 2, 2, 2, 2, 2]]
    assert batch.loss_mask_BT.int().tolist() == [[0, 1, 1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.document_ids_BT.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1], [0, -1, -1, -1, -1, -1, -1, -1]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0], [0] * 8]
    assert batch.padding_fraction == 10 / 16
    assert [[r.id for r in line] for line in pack_rows([b, a, c], 4)] == [["a", "c"], ["b"]]
    assert collate([b, a]).input_ids_BT.tolist() == [[8, 9, 0], [5, 6, 7]]


def packed_and_alone(model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states of each row inside a packed batch, and of the row alone by eager attention.

    Rows longer than the window of 24, several per line, padding in between.
    """
    rows = [row(length, seed=length) for length in (31, 7, 40, 3, 1, 26)]
    batch = collate(rows, max_length=64, pad_to_multiple=8, packing=True)
    mask = packed_attention_mask(model, batch.document_ids_BT, batch.position_ids_BT, torch.float32)
    found = []
    with torch.inference_mode():
        hidden_BTD = hidden_states(
            model, batch.input_ids_BT, attention_mask=mask, position_ids_BT=batch.position_ids_BT
        )
        model.set_attn_implementation("eager")
        for line, members in enumerate(pack_rows(rows, 64)):
            for document, member in enumerate(members):
                alone_TD = hidden_states(model, torch.from_numpy(member.input_ids.astype("int64"))[None])[0]
                found.append((hidden_BTD[line][batch.document_ids_BT[line] == document], alone_TD))
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_hidden_states_are_the_unpacked_ones(family: str, attention: str) -> None:
    """Each row's states as if it were alone."""
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("sdpa has no soft-cap inside attention")
    model = tiny_model(family, vocab_size=64, seed=2)
    try:
        model.set_attn_implementation(attention)
    except ValueError as error:
        pytest.skip(f"{family}: {error}")
    # The compiled kernel takes many seconds to make; its uncompiled form is the same sum (the slow test compiles).
    with torch.compiler.set_stance("force_eager"):
        for packed_TD, alone_TD in packed_and_alone(model):
            torch.testing.assert_close(packed_TD, alone_TD, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_compiled_flex_attention_stays_inside_the_document(family: str) -> None:
    model = tiny_model(family, vocab_size=64, seed=2)
    model.set_attn_implementation("flex_attention")
    for packed_TD, alone_TD in packed_and_alone(model):
        torch.testing.assert_close(packed_TD, alone_TD, rtol=2e-5, atol=2e-5)


def flash_on_paper(calls: list[dict]):
    """flash attention's variable-length function written out: full softmax attention from one start to the next."""

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size):
        calls.append({"starts": cu_seqlens_q.tolist(), "longest": max_seqlen_q, "window": window_size})
        assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
        assert cu_seqlens_q.dtype == torch.int32 and isinstance(max_seqlen_q, int)
        out = torch.empty_like(q)
        for begin, end in itertools.pairwise(cu_seqlens_q.tolist()):
            assert end - begin <= max_seqlen_q
            part_q, part_k, part_v = (x[begin:end].transpose(0, 1) for x in (q, k, v))
            part_k, part_v = (x.repeat_interleave(len(part_q) // len(x), dim=0) for x in (part_k, part_v))
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            allowed = (distance >= 0) if window_size is None else (distance >= 0) & (distance <= window_size[0])
            scores = (part_q @ part_k.transpose(1, 2) * softmax_scale).masked_fill(~allowed, -torch.inf)
            out[begin:end] = (scores.softmax(-1) @ part_v).transpose(0, 1)
        return out

    def arguments(query_length, key_length, is_causal, softmax_scale=None, sliding_window=None, **more):
        window = None if sliding_window is None or key_length <= sliding_window else (sliding_window - 1,) * 2
        lengths = {name: more[name] for name in ("max_seqlen_q", "max_seqlen_k") if name in more}
        return {"causal": is_causal, "softmax_scale": softmax_scale, "window_size": window, **lengths}

    return (None, varlen, None, None, None), (arguments, None)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt_neox"])
def test_flash_attention_is_told_where_documents_begin(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the kernel is the real thing: ours down to transformers' call of the variable-length function."""
    from transformers import modeling_flash_attention_utils as flash

    calls: list[dict] = []
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *a, **k: flash_on_paper(calls))
    model = tiny_model(family, vocab_size=64, seed=2)
    model.config._attn_implementation = "flash_attention_2"
    for packed_TD, alone_TD in packed_and_alone(model):
        torch.testing.assert_close(packed_TD, alone_TD, rtol=2e-5, atol=2e-5)
    # Best fit of 31, 7, 40, 3, 1, 26 into 64: 40 + 7 + ... - two lines, the second line's documents after the first's.
    lengths = [[len(one) for one in line] for line in pack_rows([row(n) for n in (31, 7, 40, 3, 1, 26)], 64)]
    width = max(map(sum, lengths)) + -max(map(sum, lengths)) % 8
    expected = [0]
    for line in lengths:
        for length in [*line, *([width - sum(line)] if sum(line) < width else [])]:
            expected.append(expected[-1] + length)
    assert {tuple(call["starts"]) for call in calls} == {tuple(expected)}
    assert {call["longest"] for call in calls} == {max(b - a for a, b in itertools.pairwise(expected))}
    windowed = {"mistral": {(23, 23)}, "qwen2": {None, (23, 23)}, "gemma3": {None, (23, 23)}}
    assert {call["window"] for call in calls} == windowed.get(family, {None})


def test_document_starts_by_hand() -> None:
    starts, longest = document_starts(torch.tensor([[0, 0, 0, 1, -1, -1], [0, 1, 1, 1, 1, 2]]))
    assert starts.tolist() == [0, 3, 4, 6, 7, 11, 12] and starts.dtype == torch.int32 and longest == 4
    # Document 0 ends one line and begins the next: a line's end is a border all the same.
    assert document_starts(torch.zeros(2, 3, dtype=torch.long))[0].tolist() == [0, 3, 6]


def test_a_missing_flash_attention_is_one_clear_error(tmp_path: Path) -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash attention is installed")
    folder = save_tiny_base(tmp_path / "base")
    with pytest.raises(UserError, match=r"a library is missing: .*[Ff]lash"):
        load_base(str(folder), device="cpu", attn_implementation="flash_attention_2")


def test_rows_of_a_distilled_folder_are_its_very_ids(tmp_path: Path) -> None:
    base = made_base("chatml", "byte-level")
    record = {
        "id": "r1", "prompt_id": "p", "prompt_key": "k", "source": "s", "category": "code", "messages": [],
        "input_ids": [1, 2, 3, 4, 5], "loss_mask": [[1, 2], [3, 5]], "finish_reason": "stop", "ids_exact": True,
        "earlier": [{"input_ids": [7, 8], "loss_mask": [[1, 2]]}],
    }  # fmt: skip
    write(tmp_path / "rows.jsonl", record)
    (tmp_path / "manifest.json").write_text(json.dumps({"base": {"template_hash": base.template_hash, "name": "x"}}))
    found = load_rows(tmp_path, base)
    assert [(r.input_ids.tolist(), r.loss_mask.tolist(), r.id) for r in found.rows] == [
        ([7, 8], [0, 1], "r1-0"),
        ([1, 2, 3, 4, 5], [0, 1, 0, 1, 1], "r1-1"),
    ]
    assert {(r.group, r.category, r.prompt_id) for r in found.rows} == {("k", "code", "p")}
    (tmp_path / "manifest.json").write_text(json.dumps({"base": {"template_hash": "other", "name": "x"}}))
    with pytest.raises(UserError, match="generated by x with another chat template"):
        load_rows(tmp_path, base)
    (tmp_path / "manifest.json").write_text("{}")
    write(tmp_path / "rows.jsonl", {**record, "input_ids": [1, 10_000], "earlier": []})
    with pytest.raises(UserError, match=r"rows\.jsonl:1: a token id is outside the tokenizer"):
        load_rows(tmp_path, base)
