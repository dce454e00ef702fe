"""Requests at the edges of what a decoder sizes, pads and stops by; each was wrong once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteriaList

from medusa_train.decoding.decode import TreeDecoder, decode
from medusa_train.decoding.generation import medusa_generate
from medusa_train.decoding.masks import TreeMasks
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.stopping import eos_token_ids
from medusa_train.decoding.tree import DraftTree, build_buffers
from medusa_train.errors import UserError
from tests.decoding.helpers import EOS, PAD, VOCAB, ScriptedHeads, generated, model_of, random_heads, random_prompt
from tests.tiny import tiny_model

WIDE = DraftTree.product([4, 3, 2])


class EachKnows(ScriptedHeads):
    """Heads that know every batch row's own text: all guesses of all rows are right."""

    def __init__(self, knowing: list[ScriptedHeads]) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.token_map, self.knowing = knowing[0].config, None, knowing

    def project(self, features_BD, head, projection):
        parts = [one.project(features_BD[b : b + 1], head, projection) for b, one in enumerate(self.knowing)]
        return torch.cat(parts)


@pytest.mark.parametrize("launch", ["eager", "fixed"])
@pytest.mark.parametrize("longest", range(52, 60))
def test_a_finished_row_may_overshoot_its_limit(longest: int, launch: str) -> None:
    """A row that ends inside a path commits the whole of it, and stages N rows behind that while others go on.

    Here prompt + limit + N runs over the multiples of 64 that capacity is rounded up to: 56 + 3 + 5 = 64 and around
    it. The long row is done after one round of three tokens, its limit; the other accepts nothing and needs three.
    """
    model, prompts = model_of("llama"), [random_prompt(longest, 1), random_prompt(4, 2)]
    answers = [generated(model, prompt, 9, stops=()) for prompt in prompts]
    heads = EachKnows(
        [
            ScriptedHeads(model, [*prompt, *answer, 3, 3, 3], 4, lambda *_, good=good: 0 if good else None)
            for prompt, answer, good in zip(prompts, answers, (True, False), strict=True)
        ]
    )
    decoder = TreeDecoder(model, heads, DraftTree.chain(4), launch=launch)
    found = decoder.decode(prompts, DecodeSettings(max_new_tokens=3, stop_token_ids=()))
    assert [one.token_ids for one in found] == [answer[:3] for answer in answers]


def left_padded(lengths: tuple[int, ...]) -> torch.Tensor:
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(ids, lengths, strict=True):
        row[-length:] = torch.tensor(random_prompt(length, length))
    return ids


@pytest.mark.parametrize(
    "extra",
    [{"min_new_tokens": 9}, {"begin_suppress_tokens": list(range(3, 40))}, {"repetition_penalty": 1.3},
     {"no_repeat_ngram_size": 2}],
)  # fmt: skip
def test_processors_see_left_padding_as_in_generate(extra: dict) -> None:
    """Processors count and read the padded row: stripping the padding moves where they begin."""
    model, ids = model_of("llama"), left_padded((7, 2, 12))
    common = dict(
        attention_mask=(ids != PAD).long(), max_new_tokens=20, do_sample=False, eos_token_id=[EOS, *range(40, 60)],
        pad_token_id=PAD, **extra,
    )  # fmt: skip
    custom = medusa_generate(random_heads(model), WIDE)
    assert torch.equal(model.generate(ids, custom_generate=custom, **common), model.generate(ids, **common))


@pytest.mark.parametrize("as_bool", [True, False])
def test_criteria_see_padding_and_may_return_a_bool(as_bool: bool) -> None:
    """A criterion by the length of the padded row, as a plain bool or as one flag a row."""
    model, ids = model_of("llama"), left_padded((7, 3))

    def fifteen(input_ids, scores, **kwargs):
        done = input_ids.shape[1] >= 15
        return done if as_bool else torch.full((input_ids.shape[0],), done)

    common = dict(
        attention_mask=(ids != PAD).long(), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=PAD
    )
    custom = medusa_generate(random_heads(model), WIDE)
    plain = model.generate(ids, stopping_criteria=StoppingCriteriaList([fifteen]), **common)
    assert plain.shape[1] == 15
    found = model.generate(ids, stopping_criteria=StoppingCriteriaList([fifteen]), custom_generate=custom, **common)
    assert torch.equal(found, plain)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_of_a_mask_begins_at_sixteen_bytes(family: str, dtype: torch.dtype) -> None:
    """CUDA's attention kernels want a mask's pointer and rows aligned, whatever the committed length."""
    model = model_of(family)
    buffers = build_buffers(DraftTree.chain(2), 4)
    masks = TreeMasks(model, buffers, 64, dtype)
    for length in range(1, 60):
        made = masks.view(length)
        for mask in made.values() if isinstance(made, dict) else [made]:
            assert mask.shape == (1, 1, 3, length + 3)
            assert mask.data_ptr() % 16 == 0, length
            assert all(stride * mask.element_size() % 16 == 0 for stride in mask.stride()[:-1]), length
        ragged = masks.ragged(torch.tensor([length, 1]), length + 3)
        for mask in ragged.values() if isinstance(ragged, dict) else [ragged]:
            assert mask.data_ptr() % 16 == 0
            assert all(stride * mask.element_size() % 16 == 0 for stride in mask.stride()[:-1]), length


def test_the_tokenizer_s_end_token_counts_too() -> None:
    """One rule with distill: what generation_config ends at, and the tokenizer's own end token."""
    model, prompt = tiny_model("llama", vocab_size=VOCAB), random_prompt(5, 1)
    free = generated(model, prompt, 20, stops=())
    model.generation_config.eos_token_id = None
    tokenizer = SimpleNamespace(eos_token_id=free[4])
    first = free.index(free[4])
    found = decode(model, None, prompt, max_new_tokens=20, tokenizer=tokenizer)
    assert (found.token_ids, found.finish_reason) == (free[: first + 1], "stop")
    model.generation_config.eos_token_id = [free[9]]
    assert set(eos_token_ids(model, tokenizer)) == {free[4], free[9]}
    assert eos_token_ids(model) == (free[9],)


def made_of(model_type: str, **config) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, vocab_size=VOCAB, **config)).eval()


def test_gpt_neo_s_local_windows_are_refused() -> None:
    """Its local window counts slots and stands in no layer_types: answers were wrong in silence."""
    small = dict(hidden_size=32, num_layers=2, num_heads=2, max_position_embeddings=512, window_size=16)
    model = made_of("gpt_neo", attention_types=[[["global", "local"], 1]], **small)
    with pytest.raises(UserError, match=r"GPTNeoForCausalLM(.|\n)*not known to decode exactly"):
        TreeDecoder(model)


def test_a_probe_that_fails_is_a_refusal_by_name() -> None:
    """Falcon with ALiBi, and any model whose forward cannot be called as a tree needs: no raw library error."""
    falcon = made_of("falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, alibi=True)
    with pytest.raises(UserError, match="FalconForCausalLM"):
        TreeDecoder(falcon)

    model = tiny_model("llama", vocab_size=VOCAB)

    def broken(*args, **kwargs):
        raise AttributeError("'NoneType' object has no attribute 'shape'")

    model.model.layers[0].forward = broken
    with pytest.raises(UserError, match=r"LlamaForCausalLM(.|\n)*AttributeError"):
        TreeDecoder(model)


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = tiny_model("llama", vocab_size=VOCAB)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = torch.nan
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.down_proj\.weight: .*NaN"):
        TreeDecoder(model)
