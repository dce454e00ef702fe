"""`sample` has exactly the law of plain sampling with the same processors; `typical` is what its oracle says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from medusa_train.decoding.decode import TreeDecoder, decode
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.tree import DraftTree
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import hidden_states, output_projection
from tests.decoding import checks
from tests.decoding.helpers import model_of, random_heads, random_prompt
from tests.decoding.mutants import real_package
from tests.tiny import tiny_model

SMALL = 6  # tokens of the chi-square vocabulary
# Tests of a true law fail with this probability each; seeds are fixed, so a pass stays a pass.
SIGNIFICANCE = 1e-4


@torch.no_grad()
def enumerated_law(model, prompt: list[int], length: int, settings: DecodeSettings) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `length` tokens, token by token, with transformers' own processors."""
    projection, processors = output_projection(model), settings.processors()
    law = {(): 1.0}
    for _ in range(length):
        following: dict[tuple[int, ...], float] = {}
        for text, chance in law.items():
            ids = torch.tensor([[*prompt, *text]])
            scores = processors(ids, projection(hidden_states(model, ids)[:, -1]).float())
            for token, p in enumerate(torch.softmax(scores, -1)[0].tolist()):
                if p > 0:
                    following[(*text, token)] = following.get((*text, token), 0.0) + chance * p
        law = following
    return law


def chi_square(observed: dict, law: dict, draws: int) -> tuple[float, int]:
    """(statistic, degrees of freedom); cells with fewer than five expected draws are taken together."""
    rare_seen = rare_expected = statistic = 0.0
    cells = 0
    for outcome, chance in law.items():
        expected, seen = draws * chance, observed.get(outcome, 0)
        if expected < 5:
            rare_seen, rare_expected = rare_seen + seen, rare_expected + expected
            continue
        statistic += (seen - expected) ** 2 / expected
        cells += 1
    if rare_expected >= 5:
        statistic += (rare_seen - rare_expected) ** 2 / rare_expected
        cells += 1
    return statistic, cells - 1


def chi_square_limit(freedom: int) -> float:
    """The statistic that a true law exceeds with probability SIGNIFICANCE: the upper incomplete gamma, bisected."""
    low, high = 0.0, 10_000.0
    for _ in range(100):
        middle = (low + high) / 2
        half = torch.tensor([freedom / 2, middle / 2], dtype=torch.float64)
        above = torch.special.gammaincc(half[0], half[1]).item() > SIGNIFICANCE
        low, high = (middle, high) if above else (low, middle)
    return low


def test_the_limit_is_right() -> None:
    """The tabulated quantile at 1 - 1e-4 for 10 degrees is 35.564; for 2 it is -2 ln 1e-4 = 18.421."""
    assert chi_square_limit(10) == pytest.approx(35.564, abs=1e-3)
    assert chi_square_limit(2) == pytest.approx(-2 * math.log(1e-4), abs=1e-6)


LAWS = {
    "plain": dict(),
    "warm": dict(temperature=1.7),
    "top-k": dict(temperature=0.8, top_k=4),
    "top-p": dict(top_p=0.8),
    "typical truncation": dict(typical_p=0.7),
    "min-p": dict(min_p=0.15),
    "penalised": dict(repetition_penalty=1.5),
}


@pytest.mark.parametrize("name", LAWS)
def test_sample_has_the_target_law(name: str) -> None:
    """Three tokens over a vocabulary of six, tree and heads in play, against the enumerated law.

    The tree proposes ranks 0..2, so walks both go on and break off at every depth.
    """
    _compare_with_law(name, draws=1200)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_sample_has_the_target_law_over_many_seeds(name: str) -> None:
    _compare_with_law(name, draws=20_000)


def _compare_with_law(name: str, draws: int) -> None:
    # Eos and pad ids are ordinary tokens here: no stop, so that every continuation has three tokens.
    model = tiny_model("llama", vocab_size=SMALL, seed=1, initializer_range=0.25)
    prompt, heads = [3, 4], random_heads(model, 2, seed=2)
    settings = DecodeSettings(mode="sample", max_new_tokens=3, stop_token_ids=(), **LAWS[name])
    law = enumerated_law(model, prompt, 3, settings)
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    decoder, batch = TreeDecoder(model, heads, DraftTree.product([3, 3])), 200
    seen: dict[tuple[int, ...], int] = {}
    lengths = set()
    for start in range(0, draws, batch):
        from dataclasses import replace

        for done in decoder.decode([prompt] * batch, replace(settings, seed=start)):
            seen[done.token_ids] = seen.get(done.token_ids, 0) + 1
            lengths |= {one.num_accepted for one in done.rounds}
    assert sum(seen.values()) == draws
    assert set(seen) <= set(law)
    assert lengths == {0, 1, 2}
    statistic, freedom = chi_square(seen, law, draws)
    assert statistic < chi_square_limit(freedom), (statistic, freedom)


def test_greedy_tokens_fail_the_chi_square() -> None:
    """The test can fail: a decoder that prefers the heads' guesses is caught."""
    model = tiny_model("llama", vocab_size=SMALL, seed=1, initializer_range=0.25)
    settings = DecodeSettings(mode="sample", max_new_tokens=3, stop_token_ids=())
    law = enumerated_law(model, [3, 4], 3, settings)
    biased = {outcome: chance for outcome, chance in law.items() if outcome[0] != outcome[1]}
    total = sum(biased.values())
    observed = {outcome: round(1200 * chance / total) for outcome, chance in biased.items()}
    statistic, freedom = chi_square(observed, law, 1200)
    assert statistic > chi_square_limit(freedom)


def test_seeds_reproduce_and_rows_are_independent() -> None:
    """Same seed, same text; a batch row b is what a single row with seed + b is."""
    model = model_of("llama")
    decoder = TreeDecoder(model, random_heads(model), DraftTree.product([3, 2]))
    settings = DecodeSettings(mode="sample", max_new_tokens=16, seed=7, temperature=0.9)
    prompts = [random_prompt(4, 1), random_prompt(9, 2), random_prompt(2, 3)]
    together = [done.token_ids for done in decoder.decode(prompts, settings)]
    assert together == [done.token_ids for done in decoder.decode(prompts, settings)]
    for row, prompt in enumerate(prompts):
        alone = decode(
            model, random_heads(model), prompt, DraftTree.product([3, 2]), mode="sample", max_new_tokens=16,
            seed=7 + row, temperature=0.9,
        )  # fmt: skip
        assert alone.token_ids == together[row]
    other = decoder.decode(prompts, DecodeSettings(mode="sample", max_new_tokens=16, seed=99, temperature=0.9))
    assert [done.token_ids for done in other] != together


def test_the_tree_does_not_change_a_seeded_text() -> None:
    """One draw per published token, in order: plain sampling and any tree give the same text for a seed."""
    model, prompt = model_of("gpt2"), random_prompt(5, 3)
    texts = {
        decode(model, random_heads(model), prompt, tree, mode="sample", seed=3, max_new_tokens=20).token_ids
        for tree in (None, DraftTree.chain(3), DraftTree.product([4, 3, 2]))
    }
    assert len(texts) == 1


def test_a_cold_sample_is_greedy() -> None:
    model, prompt = model_of("llama"), random_prompt(5, 3)
    heads, tree = random_heads(model), DraftTree.product([3, 2])
    cold = decode(model, heads, prompt, tree, mode="sample", top_k=1, max_new_tokens=20)
    assert cold.token_ids == decode(model, None, prompt, max_new_tokens=20).token_ids


@pytest.mark.slow
def test_typical_against_the_oracle_thousands_of_times() -> None:
    checks.check_typical_oracle(real_package(), cases=5000)


def test_typical_with_an_impossible_threshold_is_greedy() -> None:
    """epsilon = 1: p > 1 is never true, so only roots are published, which are the argmax."""
    model, prompt = model_of("llama"), random_prompt(5, 3)
    heads, tree = random_heads(model), DraftTree.product([3, 2])
    strict = decode(model, heads, prompt, tree, mode="typical", epsilon=1.0, alpha=1e9, max_new_tokens=12)
    assert strict.token_ids == decode(model, None, prompt, max_new_tokens=12).token_ids
    assert {done.num_accepted for done in strict.rounds} == {0}


def test_typical_with_no_threshold_takes_a_longest_path() -> None:
    """epsilon = 0: every token with p > 0 stands, so each round takes a path as deep as the tree."""
    model, prompt = model_of("llama"), random_prompt(5, 3)
    loose = decode(
        model, random_heads(model), prompt, DraftTree.product([3, 2]), mode="typical", epsilon=0.0, max_new_tokens=12,
        stop_token_ids=[],
    )  # fmt: skip
    assert [done.num_accepted for done in loose.rounds] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(mode="greedy", top_p=0.5), "top_p with mode 'greedy'"),
        (dict(mode="sample", top_p=0.0), "top_p is 0"),
        (dict(mode="sample", temperature=0.0), "temperature is 0"),
        (dict(mode="sample", top_k=0), "top_k is 0"),
        (dict(mode="typical", epsilon=2.0), "epsilon is 2"),
        (dict(mode="typical", repetition_penalty=1.2), "repetition_penalty with mode 'typical'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        DecodeSettings(**settings)


def test_the_enumeration_covers_everything() -> None:
    model = tiny_model("llama", vocab_size=SMALL, seed=1)
    law = enumerated_law(model, [3], 2, DecodeSettings(mode="sample"))
    assert set(law) == set(itertools.product(range(SMALL), repeat=2))
