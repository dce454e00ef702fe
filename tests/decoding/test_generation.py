"""The decoder as `custom_generate`: what generate returns, padding and stops included."""

from __future__ import annotations

import pytest
import torch
from transformers import StoppingCriteriaList, StopStringCriteria

from medusa_train.decoding.generation import medusa_generate
from medusa_train.decoding.tree import DraftTree
from medusa_train.errors import UserError
from tests.decoding.helpers import EOS, PAD, model_of, random_heads, random_prompt
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
def test_greedy_batches_as_generate(extra: dict) -> None:
    """Left-padded prompts of unlike length; one prompt with processors that look at the text so far."""
    model = model_of("llama")
    prompts = [random_prompt(length, length) for length in (7, 2, 12)]
    ids = torch.full((3, 12), PAD)
    for row, prompt in zip(ids, prompts, strict=True):
        row[-len(prompt) :] = torch.tensor(prompt)
    common = dict(
        attention_mask=(ids != PAD).long(), max_new_tokens=20, do_sample=False, eos_token_id=[EOS, 7, 9], **extra
    )
    custom = medusa_generate(random_heads(model), DraftTree.product([4, 3, 2]))
    if extra:
        # In generate such processors see the padding as text; without padding both see the same.
        ids, common["attention_mask"] = ids[2:], common["attention_mask"][2:]
    found = model.generate(ids, custom_generate=custom, **common)
    assert torch.equal(found, model.generate(ids, **common))


def test_stop_strings_and_seeds() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), seed=3)
    ids = tokenizer("The quick brown", return_tensors="pt").input_ids
    free = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0]
    stop = tokenizer.decode(free[ids.shape[1] + 8 : ids.shape[1] + 10])
    common = dict(
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])]),
    )
    custom = medusa_generate(random_heads(model), DraftTree.product([3, 2]))
    plain = model.generate(ids, do_sample=False, **common)
    assert torch.equal(model.generate(ids, do_sample=False, custom_generate=custom, **common), plain)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, do_sample=True, temperature=1.5, custom_generate=custom, **common).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_what_it_cannot_do_is_refused() -> None:
    model = model_of("llama")
    custom = medusa_generate(None, None)
    ids = torch.tensor([random_prompt(4, 1)])
    with pytest.raises(UserError, match="return_dict_in_generate"):
        model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, custom_generate=custom)
