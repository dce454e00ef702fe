"""A real checkpoint on a tiny real base: heads fitted to the base's own greedy texts, a tree found from its counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny_base

PROMPTS = [
    ("p0", "writing", "The quick brown fox"),
    ("p1", "writing", "Explain why the sky is blue"),
    ("p2", "code", "def add(a, b):"),
    ("p3", "code", "print"),
    ("p4", "lists", "apples, pears and plums"),
]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """The folder of a checkpoint with two `own` heads that guess right now and then, and a stored tree."""
    from medusa_train.checkpoint import save_checkpoint
    from medusa_train.modeling.base import load_base
    from medusa_train.modeling.heads import HeadsConfig

    folder = tmp_path_factory.mktemp("tiny")
    base = load_base(str(save_tiny_base(folder / "base", "llama", seed=3)), dtype="float32", device="cpu")
    config = HeadsConfig(
        contract="own", medusa_num_heads=2, medusa_num_layers=1, hidden_size=32, vocab_size=base.model.config.vocab_size
    )
    heads = _fitted(base, config)
    tree = {
        "format": 1,
        "paths": [[0], [1], [0, 0], [0, 1], [1, 0]],
        "method": "joint",
        "top_k": 10,
        "expected_tokens_per_round": 1.9,
        "node_probability": [0.5, 0.1, 0.2, 0.06, 0.04],
        "calibration": {"hits": [[50, 10, 5], [25, 5, 2]], "counts": [100, 99]},
    }
    save_checkpoint(
        folder / "heads",
        heads,
        base,
        recipe={"base": {"name": base.name}},
        policy="heads_only",
        data_manifest_hash="d" * 64,
        training={},
        tree=tree,
    )
    return folder / "heads"


def _fitted(base, config):
    """Heads after a few steps on greedy texts of every second prompt, so that some guesses are right and some wrong."""
    from medusa_train.dataset import Message, render_prompt
    from medusa_train.decoding.decode import decode
    from medusa_train.modeling.backbone import hidden_states, output_projection
    from medusa_train.modeling.heads import new_heads

    projection = output_projection(base.model)
    heads = new_heads(config, projection)
    rows = []
    for _, _, text in PROMPTS[::2]:
        prompt_ids = render_prompt(base, [Message("user", text)])
        answer = decode(base.model, None, prompt_ids, max_new_tokens=40).token_ids
        ids = torch.tensor([[*prompt_ids, *answer]])
        with torch.no_grad():
            rows.append((hidden_states(base.model, ids)[0], ids[0], len(prompt_ids)))
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.02)
    for _ in range(30):
        loss = torch.zeros(())
        for hidden_TD, ids_T, start in rows:
            for head in range(config.medusa_num_heads):
                logits_TV = heads.logits(hidden_TD[start - 1 : -(head + 2)], head, projection)
                loss = loss + torch.nn.functional.cross_entropy(logits_TV, ids_T[start + head + 1 :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval()


@pytest.fixture
def prompt_file(tmp_path) -> Path:
    """PROMPTS as a file."""
    import json

    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": name, "category": category, "prompt": text}) for name, category, text in PROMPTS]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
