"""The decoder inside transformers' own `generate`:

    model.generate(**inputs, custom_generate=medusa_generate(heads, tree), max_new_tokens=200)

`generate` prepares its processors, stopping criteria and generation config as always; this decodes with them and
returns what `generate` returns. Sampling is exact in distribution with those processors, greedy is exact.

transformers 5.24 keeps `tokenizer` and `streamer` from a custom_generate callable: give stop strings as
`stopping_criteria=[StopStringCriteria(tokenizer, [...])]`, and stream with TreeDecoder's on_round.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.decoding.decode import TreeDecoder
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.tree import DraftTree
from medusa_train.errors import UserError
from medusa_train.modeling.heads import MedusaHeads

# What generate's own eos and length rules say is said by the decoder's; the criteria that do it are left out.
BUILT_IN_RULES = ("MaxLengthCriteria", "EosTokenCriteria")


def medusa_generate(
    heads: MedusaHeads | None, tree: DraftTree | None, *, launch: str = "auto"
) -> Callable[..., Tensor]:
    """A value for `generate`'s `custom_generate`: greedy or sampling decoding with a tree of guesses.

    The decoder is made at the first call and kept while the model stays the same.
    """
    kept: list[TreeDecoder] = []

    def decode(
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        generation_config: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        if not kept or kept[0].model is not model:
            kept[:] = [TreeDecoder(model, heads, tree, launch=launch)]
        _refuse(generation_config)
        prompts = _unpadded(input_ids, kwargs.get("attention_mask"))
        settings = DecodeSettings(
            mode="sample" if generation_config.do_sample else "greedy",
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            stop_token_ids=_eos(generation_config),
            # Drawn from torch's own generator, so that torch.manual_seed makes sampling reproducible, as in generate.
            seed=int(torch.randint(2**31, (1,))) if generation_config.do_sample else 0,
        )
        rules = [rule for rule in stopping_criteria if type(rule).__name__ not in BUILT_IN_RULES]
        # Processors and criteria count and read the padded rows, as they do in generate.
        done = kept[0].decode(
            prompts, settings, processors=logits_processor, stop_rules=rules, seen_prompts=input_ids.tolist()
        )
        return _whole(input_ids, [one.token_ids for one in done], _pad(generation_config))

    return decode


def _refuse(config: Any) -> None:
    if getattr(config, "num_beams", 1) not in (None, 1) or getattr(config, "num_return_sequences", 1) not in (None, 1):
        raise UserError("beams and several answers per prompt", allowed="one answer per prompt, greedy or sampled")
    if getattr(config, "return_dict_in_generate", False):
        raise UserError("return_dict_in_generate", allowed="token ids", fix="use TreeDecoder, whose answers say more")


def _eos(config: Any) -> tuple[int, ...]:
    eos = config.eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _pad(config: Any) -> int:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(_eos(config)), 0)


def _unpadded(ids_BT: Tensor, mask_BT: Tensor | None) -> list[list[int]]:
    if mask_BT is None:
        return ids_BT.tolist()
    return [row[keep.bool()].tolist() for row, keep in zip(ids_BT, mask_BT, strict=True)]


def _whole(ids_BT: Tensor, answers: list[tuple[int, ...]], pad: int) -> Tensor:
    longest = max(map(len, answers))
    rows = [[*answer, *[pad] * (longest - len(answer))] for answer in answers]
    return torch.cat([ids_BT, torch.tensor(rows, device=ids_BT.device, dtype=ids_BT.dtype)], dim=1)
