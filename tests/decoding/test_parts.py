"""Small parts: the block argmax, text streaming, divergences, the cache's edges."""

from __future__ import annotations

import pytest
import torch

from medusa_train.decoding.cache import PreallocatedCache
from medusa_train.decoding.compare import first_divergence
from medusa_train.decoding.stream import TextStream
from medusa_train.errors import UserError
from medusa_train.modeling.argmax import BLOCK, argmax_rows
from tests.decoding.helpers import generated, model_of, random_prompt
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 16 * BLOCK, 17 * BLOCK, 5000])
def test_argmax_with_ties(dtype: torch.dtype, size: int) -> None:
    """Few different values, so nearly every row has ties: the lowest index wins, as in torch."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(-3, 3, (2, 5, size), generator=generator).to(dtype)
    assert torch.equal(argmax_rows(logits), logits.argmax(-1))
    assert torch.equal(argmax_rows(torch.full((3, size), -torch.inf, dtype=dtype)), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    "text", ["Räksmörgås 日本 🙂 ends", "def add(a, b):\n    return a + b\n", "🙂🙂🙂", " two  spaces"]
)
def test_stream_joins_to_the_whole(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


def test_stream_shows_a_cut_character_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("🙂", add_special_tokens=False).input_ids
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token) for token in ids[:-1]) == ""
    assert "\ufffd" in stream.flush()


def test_divergences() -> None:
    model, prompt = model_of("llama"), random_prompt(5, 1)
    answer = list(generated(model, prompt, 8, stops=()))
    assert first_divergence(model, prompt, answer, answer) is None
    other = [*answer[:3], (answer[3] + 1) % 64, *answer[4:]]
    found = first_divergence(model, prompt, answer, other)
    assert (found.index, found.token_a, found.token_b) == (3, answer[3], other[3])
    assert found.logit_a > found.logit_b
    assert not found.near_tie
    shorter = first_divergence(model, prompt, answer, answer[:5])
    assert (shorter.index, shorter.token_b, shorter.near_tie) == (5, None, False)


def test_cache_bounds_and_size() -> None:
    cache = PreallocatedCache(2, 1, 8)
    cache.stage(0, 3)
    keys = torch.zeros(1, 2, 3, 4)
    for layer in range(2):
        cache.update(keys, keys, layer)
    cache.build_slabs()
    assert cache.num_bytes == 2 * 2 * 1 * 2 * 8 * 4 * 4  # layers, keys and values, batch, heads, slots, size, float32
    with pytest.raises(UserError, match="cache of 8 slots, 9 needed"):
        cache.stage(3, 6)


def test_layers_of_different_shape_have_slabs_of_their_own() -> None:
    cache = PreallocatedCache(2, 1, 8)
    cache.stage(0, 4)
    for layer, (heads, size) in enumerate(((2, 4), (1, 6))):
        keys = torch.arange(4.0)[None, None, :, None].expand(1, heads, 4, size).contiguous()
        cache.update(keys, keys + 10, layer)
    cache.build_slabs()
    cache.commit(0, [2, 3])
    cache.stage(3, 1)
    for layer, (heads, size) in enumerate(((2, 4), (1, 6))):
        one = torch.full((1, heads, 1, size), 9.0)
        keys, values = cache.update(one, one, layer)
        assert keys[0, 0, :, 0].tolist() == [0, 2, 3, 9]
        assert values[0, 0, :, 0].tolist() == [10, 12, 13, 9]
