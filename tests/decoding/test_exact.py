"""Greedy decoding with any tree and any heads is plain greedy decoding, token for token (float32)."""

from __future__ import annotations

import random

import pytest
import torch

from medusa_train.decoding.decode import TreeDecoder, decode
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.tree import DraftTree
from medusa_train.errors import UserError
from tests.decoding.helpers import (
    EOS,
    PAD,
    VOCAB,
    ScriptedHeads,
    brute_force,
    generated,
    model_of,
    random_heads,
    random_prompt,
    random_tree,
    rounds_of,
)
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

WIDE = DraftTree.product([4, 3, 2])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_equal_generate(family: str) -> None:
    """Prompts from one token to past the sliding window (24); plain, chain and full trees."""
    model = model_of(family)
    heads = random_heads(model)
    for length in (1, 6, 40):
        prompt = random_prompt(length, length)
        expected = generated(model, prompt, 24)
        for tree in (None, DraftTree.chain(3), WIDE):
            found = decode(model, heads, prompt, tree, max_new_tokens=24)
            assert found.token_ids == expected
            assert found.finish_reason == ("stop" if EOS in expected else "length")


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2", "mixtral"])
def test_ragged_batches_equal_single_rows(family: str) -> None:
    """Row by row: the same tokens in the same rounds, prompts in chunks of 7 and whole."""
    model = model_of(family)
    decoder = TreeDecoder(model, random_heads(model), WIDE)
    prompts = [random_prompt(length, length) for length in (33, 1, 12, 5)]
    singles = [decoder.decode([prompt], DecodeSettings(max_new_tokens=20))[0] for prompt in prompts]
    for chunk in (7, 512):
        together = decoder.decode(prompts, DecodeSettings(max_new_tokens=20, prefill_chunk=chunk))
        assert [one.token_ids for one in together] == [one.token_ids for one in singles]
        assert [rounds_of(one) for one in together] == [rounds_of(one) for one in singles]


def test_a_batch_that_accepts_unequally() -> None:
    """Heads that are always right for one row and always wrong for the other: rows advance at their own pace."""
    model = model_of("llama")
    prompts = [random_prompt(4, 1), random_prompt(9, 2)]
    answers = [generated(model, prompt, 18, stops=()) for prompt in prompts]
    knowing = [
        ScriptedHeads(model, [*prompt, *answer, 3, 3, 3], 3, lambda *_, good=good: 1 if good else None)
        for prompt, answer, good in zip(prompts, answers, (True, False), strict=True)
    ]

    class Both(ScriptedHeads):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.config, self.token_map = knowing[0].config, None

        def project(self, features_BD, head, projection):
            parts = [one.project(features_BD[b : b + 1], head, projection) for b, one in enumerate(knowing)]
            return torch.cat(parts)

    tree = DraftTree.product([2, 2, 2])
    found = TreeDecoder(model, Both(), tree).decode(prompts, DecodeSettings(max_new_tokens=18, stop_token_ids=()))
    assert [one.token_ids for one in found] == answers
    assert [done.num_accepted for done in found[0].rounds] == [3, 3, 3, 3, 1]
    assert [done.num_accepted for done in found[1].rounds] == [0] * 18


@pytest.mark.parametrize(
    "filler", [[0], [EOS], [PAD, EOS, VOCAB - 1], [VOCAB - 1]], ids=["zero", "eos", "specials", "last"]
)
@pytest.mark.parametrize("rank", [0, 2, None], ids=["right", "third", "wrong"])
def test_adversarial_heads(rank: int | None, filler: list[int]) -> None:
    """Guesses that are all true, all wrong, token 0, eos, pad or the last row of the vocabulary change no token."""
    for family in ("llama", "gemma3"):
        model, prompt = model_of(family), random_prompt(5, 7)
        answer = generated(model, prompt, 17)
        heads = ScriptedHeads(model, [*prompt, *answer, *[3] * 4], 3, lambda *_: rank, filler)
        found = decode(model, heads, prompt, WIDE, max_new_tokens=17)
        assert found.token_ids == answer
        if rank == 0 and EOS not in answer:
            # Four tokens a round, the seventeenth alone.
            assert [done.num_accepted for done in found.rounds] == [3, 3, 3, 3, 0]


@pytest.mark.parametrize("contract", ["own", "shared", "reduced"])
def test_contracts_and_brute_force(contract: str) -> None:
    """The same rounds as running every path as a sequence of its own."""
    model = model_of("llama")
    heads = random_heads(model, 3, contract)
    for seed in range(4):
        tree = random_tree(random.Random(seed), 3, 16, 6)
        prompt = random_prompt(3 + 9 * seed, seed)
        found = decode(model, heads, prompt, tree, max_new_tokens=14)
        assert rounds_of(found) == brute_force(model, heads, prompt, tree, 14, 10)


def test_every_stop_token_counts_and_nothing_follows_it() -> None:
    model, prompt = model_of("llama"), random_prompt(5, 1)
    free = generated(model, prompt, 30, stops=())
    heads = ScriptedHeads(model, [*prompt, *free, 3, 3, 3], 3, lambda *_: 0)
    for stops in ([free[6]], [free[9], free[5]], [EOS, free[11]]):
        expected = generated(model, prompt, 30, stops=stops)
        found = decode(model, heads, prompt, WIDE, max_new_tokens=30, stop_token_ids=stops)
        assert found.token_ids == expected
        assert found.finish_reason == "stop"
        assert found.rounds[-1].ended == "stop"


def test_stop_tokens_of_the_generation_config() -> None:
    model = tiny_model("llama", vocab_size=VOCAB)
    prompt = random_prompt(5, 1)
    free = generated(model, prompt, 20, stops=())
    model.generation_config.eos_token_id = [free[4], free[8]]
    ids = torch.tensor([prompt])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    found = decode(model, None, prompt, max_new_tokens=20)
    assert found.token_ids == tuple(whole[0, 5:].tolist())
    assert found.finish_reason == "stop"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_exactly_max_new_tokens(count: int) -> None:
    model, prompt = model_of("llama"), random_prompt(5, 1)
    free = generated(model, prompt, 12, stops=())
    heads = ScriptedHeads(model, [*prompt, *free, 3, 3, 3], 3, lambda *_: 0)
    for tree in (None, WIDE):
        found = decode(model, heads, prompt, tree, max_new_tokens=count, stop_token_ids=[])
        assert found.token_ids == free[:count]
        assert found.finish_reason == "length"
        assert sum(len(done.tokens) for done in found.rounds) == count


def test_stop_strings_as_generate() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), seed=3)
    prompt = tokenizer("The quick brown").input_ids
    ids = torch.tensor([prompt])
    free = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)[
        0, len(prompt) :
    ]
    heads = random_heads(model)
    for token in (4, 11, 17):
        stop = tokenizer.decode(free[token - 1 : token + 1])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=30,
            do_sample=False,
            stop_strings=[stop],
            tokenizer=tokenizer,
        )
        found = decode(model, heads, prompt, WIDE, max_new_tokens=30, stop_strings=[stop], tokenizer=tokenizer)
        assert found.token_ids == tuple(whole[0, len(prompt) :].tolist())
    with pytest.raises(UserError, match="tokenizer"):
        decode(model, None, prompt, stop_strings=["x"])


def test_the_end_of_a_position_table() -> None:
    """GPT-2 with 32 positions: generate can make 32 - prompt + 1 tokens; a wide tree near the end stays inside."""
    model = tiny_model("gpt2", vocab_size=VOCAB, n_positions=32)
    prompt = random_prompt(10, 4)
    expected = generated(model, prompt, 23, stops=())
    heads = ScriptedHeads(model, [*prompt, *expected[:-1]], 3, lambda *_: 0)
    for most in (20, 22, 23, 200):
        found = decode(model, heads, prompt, WIDE, max_new_tokens=most, stop_token_ids=[])
        assert found.token_ids == expected[:most]
        assert found.finish_reason == "length"
    with pytest.raises(UserError, match="33 tokens"):
        decode(model, heads, random_prompt(33, 1), WIDE)


def test_positions_that_change_with_the_length() -> None:
    """longrope switches at 32 tokens: short requests and long prompts are exact, one across the border is refused."""
    factors = dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4, original_max_position_embeddings=32)
    model = tiny_model(
        "phi3", vocab_size=VOCAB, original_max_position_embeddings=32,
        rope_parameters=dict(rope_type="longrope", rope_theta=1e4, **factors),
    )  # fmt: skip
    heads = random_heads(model)
    for length, count in ((5, 20), (40, 12)):
        prompt = random_prompt(length, length)
        found = decode(model, heads, prompt, WIDE, max_new_tokens=count, prefill_chunk=7)
        assert found.token_ids == generated(model, prompt, count)
    with pytest.raises(UserError, match=r"longrope positions change past 32 tokens(.|\n)*at most 19 new tokens"):
        decode(model, heads, random_prompt(10, 1), WIDE, max_new_tokens=30)
    dynamic = tiny_model(
        "llama", vocab_size=VOCAB, max_position_embeddings=32,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
    )  # fmt: skip
    with pytest.raises(UserError, match="dynamic positions change past 32"):
        decode(dynamic, None, random_prompt(40, 1), max_new_tokens=4)


def test_one_decoder_serves_many_prompts() -> None:
    """Cache and masks are kept between calls; old rows in them must not be seen."""
    model = model_of("gemma3")
    decoder = TreeDecoder(model, random_heads(model), WIDE)
    for length, count in ((40, 20), (3, 8), (60, 4), (2, 40)):
        prompt = random_prompt(length, count)
        found = decoder.decode([prompt], DecodeSettings(max_new_tokens=count))[0]
        assert found.token_ids == generated(model, prompt, count)


def test_greedy_with_a_repetition_penalty() -> None:
    """A law that depends on the text so far: the walk sees each row's own text."""
    for family in ("llama", "gemma2"):
        model, prompt = model_of(family), random_prompt(6, 2)
        expected = generated(model, prompt, 24, repetition_penalty=1.3)
        found = decode(model, random_heads(model), prompt, WIDE, max_new_tokens=24, repetition_penalty=1.3)
        assert found.token_ids == expected


def test_bfloat16_parts_only_at_near_ties() -> None:
    from medusa_train.decoding.compare import first_divergence

    for family in ("llama", "gemma3", "gpt2"):
        model = model_of(family, dtype=torch.bfloat16)
        heads = random_heads(model)
        for seed in range(4):
            prompt = random_prompt(6, seed)
            plain = decode(model, None, prompt, max_new_tokens=24)
            tree = decode(model, heads, prompt, WIDE, max_new_tokens=24)
            parted = first_divergence(model, prompt, plain.token_ids, tree.token_ids)
            assert parted is None or parted.near_tie, (family, seed, parted)


def test_training_mode_and_trace() -> None:
    model = tiny_model("llama", vocab_size=VOCAB).train()
    found = decode(model, random_heads(model), random_prompt(4, 1), WIDE, max_new_tokens=9, trace=True)
    assert model.training
    first = found.rounds[0]
    assert first.tree_tokens[0] == first.root == first.tokens[0]
    assert len(first.tree_tokens) == len(first.target_tokens) == WIDE.num_rows
    assert [len(head) for head in first.proposals] == [10, 10, 10]
    # Row 1 + i of the tree carries the proposal that its path names.
    for row, path in enumerate(WIDE.paths, start=1):
        assert first.tree_tokens[row] == first.proposals[len(path) - 1][path[-1]]
    assert first.seconds.total >= first.seconds.forward > 0


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (DraftTree.chain(4), "4 deep and there are 3 heads"),
        (DraftTree.from_paths([[64]]), "rank 64"),
    ],
)
def test_trees_that_heads_cannot_fill(tree: DraftTree, words: str) -> None:
    model = model_of("llama")
    with pytest.raises(UserError, match=words):
        TreeDecoder(model, random_heads(model), tree)


def test_reduced_heads_know_fewer_ranks() -> None:
    model = model_of("llama")
    with pytest.raises(UserError, match="rank 20"):
        TreeDecoder(model, random_heads(model, 3, "reduced"), DraftTree.from_paths([[20]]))


def test_refusals() -> None:
    model = model_of("llama")
    with pytest.raises(UserError, match="no tokens"):
        decode(model, None, [])
    with pytest.raises(UserError, match="needs heads"):
        decode(model, None, [3], DraftTree.chain(1))
    with pytest.raises(UserError, match="acceptance mode"):
        decode(model, None, [3], mode="greedi")
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        decode(model, None, [3], max_new_tokens=0)


@pytest.mark.parametrize(
    ("model_type", "config", "words"),
    [
        ("mamba", dict(hidden_size=16, num_hidden_layers=1, state_size=4), "recurrent state"),
        ("bloom", dict(hidden_size=16, n_layer=1, n_head=2), "position"),
        ("t5", dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2), "encoder-decoder"),
    ],
)
def test_families_that_cannot_work(model_type: str, config: dict, words: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    made = AutoConfig.for_model(model_type, vocab_size=VOCAB, **config)
    auto = AutoModelForSeq2SeqLM if model_type == "t5" else AutoModelForCausalLM
    with pytest.raises(UserError, match=words):
        TreeDecoder(auto.from_config(made))


def test_attention_without_masks_is_refused() -> None:
    model = tiny_model("llama", vocab_size=VOCAB)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="4-D mask"):
        TreeDecoder(model, check=True)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("launch", ["eager", "fixed"])
def test_flex_attention_takes_the_tree_s_mask(family: str, launch: str) -> None:
    """Flex attention's own arithmetic, uncompiled; the compiled kernel is for CUDA (scripts/gpu_check.py runs it)."""
    model = tiny_model(family, vocab_size=VOCAB)
    prompts = [random_prompt(length, length) for length in (3, 40)]
    expected = [generated(model, prompt, 20) for prompt in prompts]
    heads = random_heads(model)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UserError, match="'flex_attention' on cpu"):
        TreeDecoder(model, heads, WIDE)
    with torch.compiler.set_stance("force_eager"):
        decoder = TreeDecoder(model, heads, WIDE, check=False, launch=launch)
        found = [decoder.decode([prompt], DecodeSettings(max_new_tokens=20))[0] for prompt in prompts]
        ragged = decoder.decode(prompts, DecodeSettings(max_new_tokens=20))
    assert [one.token_ids for one in found] == [one.token_ids for one in ragged] == expected


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_property_greedy_equals_generate(part: int) -> None:
    """2,048 random cases: model, weights, tree, heads, prompt, stop tokens, batch."""
    families = sorted(FAMILIES)
    for case in range(part * 128, (part + 1) * 128):
        draw = random.Random(case)
        family = families[case % len(families)]
        model = model_of(family, seed=draw.randrange(3))
        prompt = random_prompt(draw.choice([1, 2, 5, 13, 30, 60]), case)
        count = draw.randint(1, 16)
        stops = draw.choice([[EOS], [EOS, 5, 9], list(range(2, 20)), []])
        expected = generated(model, prompt, count, stops)
        num_heads = draw.randint(1, 4)
        tree = random_tree(draw, num_heads, draw.choice([3, 12, 40]), draw.choice([1, 4, 10]))
        if draw.random() < 0.5:
            heads = random_heads(model, num_heads, draw.choice(["own", "shared", "reduced"]), seed=case)
        else:
            rank = draw.choice([lambda *_: 0, lambda *_: None, lambda p, j: (p * 7 + j) % 5])
            filler = draw.choice([[0], [EOS], [PAD, EOS, VOCAB - 1], list(range(VOCAB))])
            # Past the answer the heads have nothing to say; any token will do there.
            heads = ScriptedHeads(model, [*prompt, *expected, 3, 3], num_heads, rank, filler)
        chunk = draw.choice([3, 512])
        found = decode(model, heads, prompt, tree, max_new_tokens=count, stop_token_ids=stops, prefill_chunk=chunk)
        assert found.token_ids == expected, case
        if case % 8 == 0 and EOS in stops and len(stops) == 1:
            top_k = min(20 if getattr(heads, "token_map", None) is not None else VOCAB, max(10, tree.ranks_used))
            assert rounds_of(found) == brute_force(model, heads, prompt, tree, count, top_k), case
