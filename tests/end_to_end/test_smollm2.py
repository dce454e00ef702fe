"""SmolLM2-135M-Instruct, fp32: with heads on, every held-out prompt gets the ids that transformers' generate gives it.

Slow (about eight minutes on one core). The heads are trained here, briefly: exactness must not depend on how good they
are, but heads that are accepted now and then exercise the commit, which heads that never are would not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NEW_TOKENS = 32

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2():
    from medusa_train.errors import UserError
    from medusa_train.modeling.base import load_base

    try:
        return load_base("smollm2-135m", dtype="float32", device="cpu")
    except UserError as problem:
        pytest.skip(f"SmolLM2-135M-Instruct is not to be had here: {problem}")


def held_out_prompts(base) -> list[list[int]]:
    lines = (ROOT / "data" / "prompts" / "heldout.jsonl").read_text().splitlines()
    return [
        base.tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["prompt"]}], add_generation_prompt=True
        )["input_ids"]
        for line in lines
    ]


@pytest.fixture(scope="module")
def plain_answers(smollm2):
    """What transformers' own greedy generate writes, one prompt at a time."""
    import torch

    answers = []
    for prompt in held_out_prompts(smollm2):
        ids = torch.tensor([prompt])
        found = smollm2.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        answers.append(found[0, len(prompt) :].tolist())
    return answers


def briefly_trained_heads(base, rows):
    """Three own-projection heads over a few thousand tokens, a few dozen plain AdamW steps on the given answers."""
    import torch
    from torch.nn import functional as F

    from medusa_train.modeling.backbone import hidden_states, output_projection
    from medusa_train.modeling.heads import HeadsConfig, new_heads

    projection = output_projection(base.model)
    used = torch.tensor(sorted({token for _, answer in rows for token in answer}))
    config = HeadsConfig(
        "reduced", 3, 1, projection.hidden_size, projection.vocab_size, len(used), projection.bias is not None
    )
    heads = new_heads(config, projection, used)
    place = {int(token): index for index, token in enumerate(used)}
    with torch.no_grad():
        states = [hidden_states(base.model, torch.tensor([prompt + answer]))[0] for prompt, answer in rows]
    optimizer = torch.optim.AdamW(heads.parameters(), lr=2e-3)
    for _ in range(3):
        for (prompt, answer), hidden in zip(rows, states, strict=True):
            loss = torch.zeros(())
            for head in range(3):
                first = len(prompt) - head - 2  # the hidden row whose token t+head+2 is the answer's first
                labels = torch.tensor([place[token] for token in answer])
                start = max(0, -first)
                logits = heads.logits(hidden[first + start : first + len(answer)], head, projection)
                loss = loss + F.cross_entropy(logits, labels[start:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return heads.eval()


def test_fp32_ids_equal_plain_greedy_on_every_held_out_prompt(smollm2, plain_answers):
    from medusa_train.decoding.decode import TreeDecoder
    from medusa_train.decoding.settings import DecodeSettings
    from medusa_train.decoding.tree_text import parse_tree

    prompts = held_out_prompts(smollm2)
    assert len(prompts) == 64
    heads = briefly_trained_heads(smollm2, list(zip(prompts, plain_answers, strict=True))[:24])
    decoder = TreeDecoder(smollm2.model, heads, parse_tree("3,2,1", 3))
    stop = (smollm2.tokenizer.eos_token_id,)
    accepted = 0
    for prompt, expected in zip(prompts, plain_answers, strict=True):
        settings = DecodeSettings(max_new_tokens=NEW_TOKENS, stop_token_ids=stop)
        decoded = decoder.decode([prompt], settings)[0]
        assert list(decoded.token_ids) == expected
        accepted += sum(round_.num_accepted for round_ in decoded.rounds)
    assert accepted > 100, "heads that are never accepted would prove little"
