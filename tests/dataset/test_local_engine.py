"""The refilled batch gives every row what `generate` gives it alone, in fp32, whatever shares its batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.dataset.backend_local import LocalEngine
from medusa_train.dataset.requests import Completion, Request
from medusa_train.dataset.sampling import Decoding, choose, uniforms
from medusa_train.errors import UserError
from tests.tiny import FAMILIES, tiny_model

VOCABULARY = 96
STOP = (5, 17)


def prompts(count: int, seed: int, longest: int = 30, shared: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    head = generator.integers(20, VOCABULARY, shared).tolist()
    return [
        head + generator.integers(20, VOCABULARY, int(generator.integers(1, longest))).tolist() for _ in range(count)
    ]


def alone(model: torch.nn.Module, prompt: list[int], new: int) -> tuple[list[int], str]:
    """Plain greedy decoding without any cache, one forward over everything per token."""
    ids, out = list(prompt), []
    for _ in range(new):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        out.append(int(logits.argmax()))
        ids.append(out[-1])
        if out[-1] in STOP:
            return out, "stop"
    return out, "length"


def run(model: torch.nn.Module, jobs: list[tuple[list[int], int]], **options) -> dict[int, Completion]:
    engine = LocalEngine(SimpleNamespace(model=model), stop_token_ids=STOP, **options)
    done: dict[int, Completion] = {}
    for index, (ids, new) in enumerate(jobs):
        engine.submit(Request(index, ids, new, seed=index))
    engine.run(lambda completion: done.__setitem__(completion.request.key, completion))
    assert engine.generated == sum(len(completion.token_ids) for completion in done.values())
    return done


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_what_it_is_alone(family: str) -> None:
    """Lengths past the window of 24, refills, a ring that wraps, re-cut rings, a shrinking end."""
    model = tiny_model(family, vocab_size=VOCABULARY, seed=1)
    generator = np.random.default_rng(3)
    jobs = [(ids, int(generator.integers(1, 40))) for ids in prompts(17, seed=2)]
    expected = [alone(model, ids, new) for ids, new in jobs]
    for options in ({"max_rows": 4, "batch_tokens": 10_000}, {"max_rows": 16, "batch_tokens": 200}):
        done = run(model, jobs, **options)
        found = [(done[index].token_ids, done[index].finish_reason) for index in range(len(jobs))]
        assert found == expected, options


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 14),
    shared=st.sampled_from([0, 3, 12]),
    max_rows=st.integers(1, 9),
    batch_tokens=st.sampled_from([1, 60, 150, 100_000]),
    read=st.sampled_from([1, 3]),
)
def test_any_batch(seed: int, count: int, shared: int, max_rows: int, batch_tokens: int, read: int) -> None:
    model = _MODEL
    generator = np.random.default_rng(seed)
    jobs = [(ids, int(generator.integers(1, 24))) for ids in prompts(count, seed, shared=shared)]
    engine = LocalEngine(
        SimpleNamespace(model=model), stop_token_ids=STOP, max_rows=max_rows, batch_tokens=batch_tokens
    )
    engine.steps_per_read = read  # what a GPU does: several steps between two looks
    done: dict[int, Completion] = {}
    for index, (ids, new) in enumerate(jobs):
        engine.submit(Request(index, ids, new))
    engine.run(lambda completion: done.__setitem__(completion.request.key, completion))
    for index, (ids, new) in enumerate(jobs):
        assert (done[index].token_ids, done[index].finish_reason) == alone(model, ids, new)


_MODEL = tiny_model("llama", vocab_size=VOCABULARY, seed=1)


def test_follow_ups_may_be_submitted_while_it_runs() -> None:
    """Second turns are longer than the ring was cut for; they wait for their wave and are right."""
    jobs, done = prompts(9, seed=4), {}
    engine = LocalEngine(SimpleNamespace(model=_MODEL), stop_token_ids=STOP, max_rows=3, batch_tokens=10_000)

    def on_finish(completion: Completion) -> None:
        index, turn = completion.request.key
        done[index, turn] = completion
        if turn == 0:
            longer = [*completion.request.prompt_ids, *completion.token_ids, 30, 31, 32]
            engine.submit(Request((index, 1), longer, 12, wave=1))

    for index, ids in enumerate(jobs):
        engine.submit(Request((index, 0), ids, 12))
    engine.run(on_finish)
    assert len(done) == 18
    for completion in done.values():
        tokens, _ = alone(_MODEL, list(completion.request.prompt_ids), 12)
        assert completion.token_ids == tokens


def test_sampled_rows_do_not_depend_on_their_batch() -> None:
    jobs = [(ids, 20) for ids in prompts(8, seed=6)]
    decoding = Decoding(temperature=1.0, top_p=0.9)
    by_one = run(_MODEL, jobs, max_rows=1, batch_tokens=10_000, decoding=decoding)
    by_five = run(_MODEL, jobs, max_rows=5, batch_tokens=10_000, decoding=decoding)
    assert {key: c.token_ids for key, c in by_one.items()} == {key: c.token_ids for key, c in by_five.items()}
    again = {tuple(c.token_ids) for c in by_one.values()}
    assert len(again) > 1


def test_sampling_has_the_processed_distribution() -> None:
    """Chi-square of 40,000 draws against softmax(logits / T) cut by top-k and top-p, computed here by plain loops."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.2, 0.0, -1.0])
    for decoding in (Decoding(0.7), Decoding(1.3, top_k=4), Decoding(1.0, top_p=0.8), Decoding(0.9, 5, 0.7)):
        scaled = sorted(
            ((value / decoding.temperature, index) for index, value in enumerate(logits.tolist())), reverse=True
        )
        kept = scaled[: decoding.top_k or len(scaled)]
        weights = np.exp([value for value, _ in kept])
        weights /= weights.sum()
        total, law = 0.0, {}
        for weight, (_, index) in zip(weights, kept, strict=True):
            if total < decoding.top_p:
                law[index] = weight
            total += weight
        norm = sum(law.values())
        draws = 40_000
        uniform = torch.from_numpy(uniforms(9, draws))
        ids = choose(logits.expand(draws, -1), decoding, uniform).tolist()
        counts = {index: ids.count(index) for index in set(ids)}
        assert counts.keys() <= law.keys()
        chi = sum((counts.get(i, 0) - draws * p / norm) ** 2 / (draws * p / norm) for i, p in law.items())
        assert chi < 25, (decoding, chi)  # 5 degrees of freedom: p < 1e-4


@pytest.mark.parametrize(
    "decoding", [Decoding(0.7), Decoding(1.0, top_p=0.3), Decoding(2.5, top_p=0.9), Decoding(1.0, 40, 0.8)]
)
@pytest.mark.parametrize("size", [5003, 32768])
def test_draws_over_a_large_vocabulary_invert_the_distribution(decoding: Decoding, size: int) -> None:
    """Blocks, cached rows and the sorted head against one cumulative sum over the law, in double precision."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(40, size, generator=generator) * 2
    uniform = torch.rand(40, generator=generator)
    got = choose(logits, decoding, uniform)
    scores = logits.double() / decoding.temperature
    order = scores.argsort(-1, descending=True)
    cut = decoding.top_k > 0 or decoding.top_p < 1.0
    for row in range(40):
        ids = order[row] if cut else torch.arange(size)
        law = torch.softmax(scores[row, ids[: decoding.top_k or None]], -1)
        before = law.cumsum(-1) - law
        law = torch.where(before < decoding.top_p, law, 0.0)
        edge = float((law.cumsum(-1) / law.sum())[(ids == got[row]).nonzero()[0, 0]])
        start = edge - float((law / law.sum())[(ids == got[row]).nonzero()[0, 0]])
        assert start - 1e-5 <= float(uniform[row]) <= edge + 1e-5


def test_samples_of_one_prompt_are_prefilled_once() -> None:
    jobs = [([30, 31, 32, 33], 8)] * 5 + [([40] * 9, 8)] * 3
    decoding = Decoding(1.0)
    done = run(_MODEL, jobs, max_rows=8, batch_tokens=10_000, decoding=decoding)
    alone_too = run(_MODEL, jobs, max_rows=1, batch_tokens=10_000, decoding=decoding)
    assert {k: c.token_ids for k, c in done.items()} == {k: c.token_ids for k, c in alone_too.items()}
    assert len({tuple(done[k].token_ids) for k in range(5)}) > 1


def test_a_uniform_of_almost_one_never_leaves_the_support() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert choose(logits, Decoding(1.0), torch.tensor([0.99999994])).item() in (0, 1)
    assert choose(logits, Decoding(1.0, top_p=0.4), torch.tensor([0.99999994])).item() in (0, 1)


def test_too_long_for_the_model_is_a_clear_error() -> None:
    engine = LocalEngine(SimpleNamespace(model=_MODEL), stop_token_ids=STOP, max_rows=3, batch_tokens=1000)
    with pytest.raises(UserError, match="exceed the model's context"):
        engine.submit(Request(0, [1] * 500, 20))
