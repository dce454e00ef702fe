"""Masks against a character-level oracle, for every template family on every kind of tokenizer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medusa_train.dataset import Conversation, Message, RowOptions, render_conversation, render_prompt
from medusa_train.dataset.templates import Unmaskable, render_text
from tests.dataset.families import DS_BOS, DS_EOS, FAMILIES, FASTCHAT_SYSTEM, ORIGINALS, Family, Pieces, Turns
from tests.dataset.tokenizers_made import KINDS, base_for, made_base, token_bytes

CASES: dict[str, Turns] = {
    "one turn": [("user", "hello"), ("assistant", "hello there")],
    "answer repeats the question": [("user", "The sky is blue."), ("assistant", "The sky is blue.")],
    "equal answers": [("user", "hi"), ("assistant", "fine"), ("user", "hi"), ("assistant", "fine")],
    "empty answer": [("user", "hi"), ("assistant", "")],
    "white space": [("user", " hi\n"), ("assistant", "  hello \n\n"), ("user", "\tand? "), ("assistant", "\nthe ")],
    "unicode": [("user", "Räksmörgås 日本?"), ("assistant", "🙂 naïve 日本 𝒳"), ("user", "é"), ("assistant", "é🙂")],
    "special token's text in the question": [
        ("user", "what is <|im_end|> and </s> and <s>[INST] x [/INST] <end_of_turn>?"),
        ("assistant", "the end"),
    ],
    "headers in the question": [("user", "hello\nassistant\nhello ASSISTANT: [/INST] hello"), ("assistant", "hello")],
    "straddling": [("user", "the]the"), ("assistant", "the hello"), ("user", "]"), ("assistant", "]the:hello")],
    "three turns": [
        ("user", "hello"),
        ("assistant", "hello there, how are you?"),
        ("user", "fine, thanks"),
        ("assistant", "The sky is blue."),
        ("user", "hello"),
        ("assistant", "fine"),
    ],
    "reasoning": [
        ("user", "hello"),
        ("assistant", "<think>\nso it is\n</think>\n\nfine"),
        ("user", "and?"),
        ("assistant", "<think>\n\n</think>\n\n hello "),
        ("user", "hello"),
        ("assistant", "the end"),
    ],
}  # fmt: skip


def conversation(turns: Turns) -> Conversation:
    return Conversation(tuple(Message(role, text) for role, text in turns), "test")


def characters(pieces: Pieces, specials: tuple[str, ...]) -> list[tuple[int, bool]]:
    """(byte, supervised) of every byte of the pieces."""
    return [(byte, flag) for text, flag in pieces for byte in text.encode()]


def check_row(base: SimpleNamespace, kind: str, row, pieces: Pieces, specials: tuple[str, ...]) -> None:
    """Row and oracle hold the same bytes, and each byte has the same flag.

    Sentencepiece tokenizers of the legacy kind write a space before every stretch of text that follows a special
    token; the oracle's bytes do not have it, so such a space is passed over.
    """
    expected, at = characters(pieces, specials), 0
    after_special, first = True, True
    for token, flag in zip(row.input_ids, row.loss_mask, strict=True):
        data, special = token_bytes(base, kind, token)
        if not special and after_special and _invents_space(kind, first, expected):
            assert data[:1] == b" "
            data = data[1:]
        for byte in data:
            assert at < len(expected) and expected[at][0] == byte, f"byte {at}: {data!r} is not in the oracle's text"
            assert expected[at][1] == bool(flag), f"byte {at} ({bytes([byte])!r}) has flag {flag}"
            at += 1
        after_special, first = special, False
    rest = bytes(byte for byte, _ in expected[at:])
    assert not any(flag for _, flag in expected[at:]), f"supervised bytes are missing: {rest!r}"
    assert not rest.strip(), f"bytes are missing: {rest!r}"


def _invents_space(kind: str, first: bool, expected: list[tuple[int, bool]]) -> bool:
    if kind == "sentencepiece-legacy":
        return True
    return kind == "sentencepiece-first" and first and bytes([expected[0][0]]) != b" "


def oracle_rows(family: Family, turns: Turns, rows: int) -> list[Pieces]:
    """The pieces of each row: of the whole conversation, or of each turn with its context unsupervised."""
    if rows == 1 and not family.per_turn:
        return [family.oracle(turns)]
    ends = [index + 1 for index, (role, _) in enumerate(turns) if role == "assistant"]
    result = []
    for end in ends:
        pieces = family.oracle(turns[:end])
        before = family.oracle(turns[: end - 2]) if end - 2 > 1 else []
        # Supervised pieces of earlier turns are context here.
        earlier = sum(flag for _, flag in before)
        if family.per_turn:
            result.append(pieces)
            continue
        seen, flat = 0, []
        for text, flag in pieces:
            flat.append((text, flag and seen >= earlier))
            seen += flag
        result.append(flat)
    return result


def check(family_name: str, kind: str, turns: Turns) -> int:
    family, base = FAMILIES[family_name], made_base(family_name, kind)
    rows = render_conversation(base, conversation(turns), RowOptions(one_row_per_turn=family.raw))
    answers = sum(role == "assistant" for role, _ in turns)
    assert len(rows) in (1, answers)
    for row, pieces in zip(rows, oracle_rows(family, turns, len(rows)), strict=True):
        check_row(base, kind, row, pieces, family.specials)
    # Training sees the ids that generation sees.
    ends = [index for index, (role, _) in enumerate(turns) if role == "assistant"]
    for number, end in enumerate(ends):
        prompt = render_prompt(base, [{"role": role, "content": text} for role, text in turns[:end]])
        row = rows[number if len(rows) > 1 else 0]
        assert row.input_ids[: len(prompt)].tolist() == prompt
        assert not len(prompt) or not row.loss_mask[: len(prompt)][-1]
    return len(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_mask_is_the_oracles(family: str, kind: str, case: str) -> None:
    check(family, kind, CASES[case])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.system])
def test_mask_with_a_system_turn(family: str, kind: str) -> None:
    check(family, kind, [("system", "You are helpful."), *CASES["equal answers"]])


@pytest.mark.parametrize(
    "family", [name for name, family in FAMILIES.items() if not family.system and name != "mistral-v1"]
)
def test_template_without_system_turns_drops_by_its_own_words(family: str) -> None:
    with pytest.raises(Unmaskable, match="template refuses: "):
        render_conversation(made_base(family, "byte-level"), conversation([("system", "x"), *CASES["one turn"]]))


TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from("the hello\n :].[/INST]<|>assistantUSER"), st.characters(exclude_categories=("Cs", "Co", "Cn"))
    ),
    max_size=24,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_any_conversation(family: str, kind: str, texts: list[tuple[str, str]]) -> None:
    turns = [turn for user, answer in texts for turn in (("user", user), ("assistant", answer))]
    check(family, kind, turns)


PART = st.text(alphabet="ab:\n ]<", min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.tuples(PART, PART, PART, PART),
    texts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=2),
    trim=st.booleans(),
    end=st.sampled_from(["<END>", "<END>\n", ""]),
)
def test_any_template(parts: tuple[str, str, str, str], texts: list[tuple[str, str]], trim: bool, end: str) -> None:
    """Random templates: headers and endings of any text, answers trimmed or not, with a stop token or without one."""
    user_head, user_end, head, answer_head = parts
    content = "m['content'] | trim" if trim else "m['content']"
    family = Family(
        template="{% for m in messages %}{% if m['role'] == 'user' %}{{ uh + m['content'] + ue }}"
        "{% else %}{{ ah + (" + content + ") + end }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ah }}{% endif %}",
        oracle=lambda turns: [],
        specials=("<END>",),
        eos="<END>",
    )
    names = {"uh": user_head, "ue": user_end, "ah": head + answer_head, "end": end or "\n\n"}
    quoted = "".join("{%- set " + name + " = " + repr(text) + " -%}" for name, text in names.items())
    family = dataclasses.replace(family, template=quoted + family.template)
    base = made_random(family)
    turns = [turn for user, answer in texts for turn in (("user", user), ("assistant", answer))]

    def oracle(turns: Turns) -> Pieces:
        pieces: Pieces = []
        for role, text in turns:
            if role == "user":
                pieces.append((names["uh"] + text + names["ue"], False))
            else:
                pieces += [
                    (names["ah"], False),
                    (text.strip() if trim else text, True),
                    ("<END>" if end else "\n\n", True),
                ]
                pieces.append((end[5:], False))
        return pieces

    family = dataclasses.replace(family, oracle=oracle)
    rows = render_conversation(base, conversation(turns))
    for row, pieces in zip(rows, oracle_rows_with_tail(family, turns, len(rows)), strict=True):
        check_row(base, "byte-level-straddling", row, pieces, family.specials)


_RANDOM = base_for(FAMILIES["chatml"], "random", "byte-level-straddling")


def made_random(family: Family) -> SimpleNamespace:
    tokenizer = _RANDOM.tokenizer
    if "<END>" not in tokenizer.get_vocab():
        tokenizer.add_special_tokens({"eos_token": "<END>"})
    return SimpleNamespace(**{**vars(_RANDOM), "chat_template": family.template})


def oracle_rows_with_tail(family: Family, turns: Turns, rows: int) -> list[Pieces]:
    if rows == 1 and sum(role == "assistant" for role, _ in turns) == 1:
        return [family.oracle(turns)]
    return oracle_rows(family, turns, rows)


def test_vicuna_is_fastchats_bytes() -> None:
    """Written out from FastChat's `vicuna_v1.1`: system, space, then USER/ASSISTANT turns with " " and "</s>"."""
    base = made_base("vicuna-v1.1", "byte-level")
    turns = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi!"}]
    text = base.tokenizer.apply_chat_template(
        [*turns, {"role": "user", "content": "How are you?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<s>" + FASTCHAT_SYSTEM + " USER: Hello! ASSISTANT: Hi!</s>USER: How are you? ASSISTANT:"


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.bos])
def test_one_bos_where_the_template_wants_one(family: str) -> None:
    base = made_base(family, "byte-level")
    options = RowOptions(one_row_per_turn=FAMILIES[family].raw)
    ids = render_conversation(base, conversation(CASES["one turn"]), options)[0].input_ids.tolist()
    wanted = 0 if family == "zephyr" else 1
    assert ids.count(base.tokenizer.bos_token_id) == wanted
    assert (ids[0] == base.tokenizer.bos_token_id) == bool(wanted)


def test_terminator_can_stay_unsupervised() -> None:
    base = made_base("chatml", "byte-level")
    row = render_conversation(base, conversation(CASES["equal answers"]), RowOptions(supervise_terminator=False))[0]
    end = base.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert not row.loss_mask[row.input_ids == end].any()
    text = base.tokenizer.decode(row.input_ids[row.loss_mask == 1])
    assert text == "finefine"


@pytest.mark.parametrize("name", ["deepseek-r1", "deepseek-r1-distill"])
def test_reasoning_template_is_refused_with_the_way_out_and_works_by_turn(name: str) -> None:
    """The answer as rendered does not follow the generation prompt (it has lost its thought): one row per turn."""
    base = made_base(name, "byte-level")
    turns: Turns = [
        ("user", "hi"),
        ("assistant", "so\n</think>\n\nfine"),
        ("user", "and"),
        ("assistant", "ok</think>yes"),
    ]
    with pytest.raises(Unmaskable, match="changes the answer's beginning"):
        render_conversation(base, conversation(turns))
    rows = render_conversation(base, conversation(turns), RowOptions(one_row_per_turn=True))
    texts = [base.tokenizer.decode(row.input_ids) for row in rows]
    kept = [base.tokenizer.decode(row.input_ids[row.loss_mask == 1]) for row in rows]
    first = f"{DS_BOS}<｜User｜>hi<｜Assistant｜>"
    assert texts[0] == first + f"<think>\nso\n</think>\n\nfine{DS_EOS}"
    assert texts[1] == first + f"\n\nfine{DS_EOS}<｜User｜>and<｜Assistant｜><think>\nok</think>yes{DS_EOS}"
    assert kept == [f"so\n</think>\n\nfine{DS_EOS}", f"ok</think>yes{DS_EOS}"]


def test_qwen3_drops_earlier_reasoning_and_each_turn_keeps_its_own() -> None:
    base = made_base("qwen3", "byte-level")
    rows = render_conversation(base, conversation(CASES["reasoning"][:4]))
    texts = [base.tokenizer.decode(row.input_ids) for row in rows]
    kept = [base.tokenizer.decode(row.input_ids[row.loss_mask == 1]) for row in rows]
    assert kept == [
        "<think>\nso it is\n</think>\n\nfine<|im_end|>",
        "<think>\n\n</think>\n\n hello <|im_end|>",
    ]
    assert "so it is" in texts[0] and "so it is" not in texts[1] and "assistant\nfine<|im_end|>" in texts[1]


def test_a_system_turn_that_moves_makes_rows_by_turn() -> None:
    """Mistral v0.3 writes the system text into the last user turn, so no two turns share a beginning."""
    turns: Turns = [("system", "Be kind."), *CASES["three turns"][:4]]
    assert check("mistral-v3", "byte-level", turns) == 2
    assert check("mistral-v3", "byte-level", turns[1:]) == 1


@pytest.mark.parametrize("name", ["llama-3", "gemma"])
def test_our_wording_gives_the_originals_text(name: str) -> None:
    """Of two models the template is not copied here: ours must write what the installed one writes."""
    if ORIGINALS[f"{name} (original)"][0] is None:
        pytest.skip(f"the template of {name} is not copied here and trl is not installed")
    ours, original = made_base(name, "byte-level"), made_base(f"{name} (original)", "byte-level")
    for turns in CASES.values():
        for end in range(1, len(turns) + 1):
            messages = conversation(turns[:end]).as_dicts()
            for prompt in (False, True):
                assert render_text(ours, messages, add_generation_prompt=prompt) == render_text(
                    original, messages, add_generation_prompt=prompt
                )


def test_generation_tag_is_transformers_mask() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"
        "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    base = base_for(dataclasses.replace(FAMILIES["chatml"], template=template), "tagged", "byte-level")
    row = render_conversation(base, conversation(CASES["equal answers"]))[0]
    assert base.tokenizer.decode(row.input_ids[row.loss_mask == 1]) == "fine<|im_end|>fine<|im_end|>"
    bare = render_conversation(base, conversation(CASES["equal answers"]), RowOptions(supervise_terminator=False))[0]
    assert base.tokenizer.decode(bare.input_ids[bare.loss_mask == 1]) == "finefine"


def test_masks_are_never_all_ones_or_zeros() -> None:
    for family in FAMILIES:
        options = RowOptions(one_row_per_turn=FAMILIES[family].raw)
        for row in render_conversation(made_base(family, "byte-level"), conversation(CASES["three turns"]), options):
            assert 0 < row.loss_mask.sum() < len(row.loss_mask)
            assert row.input_ids.dtype == np.int32 and row.loss_mask.dtype == np.uint8


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.per_turn])
def test_a_conversation_is_one_row_where_it_can_be(family: str) -> None:
    assert check(family, "byte-level", CASES["three turns"]) == 1


def test_a_merge_across_the_border_makes_rows_by_turn() -> None:
    """Mistral's first template puts the answer right behind "]": a merge of "]the" would hide the border."""
    assert check("mistral-v1", "byte-level-straddling", CASES["straddling"]) == 2
