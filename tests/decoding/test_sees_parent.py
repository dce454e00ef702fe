"""Heads that see the token before: what each head sees along a tree and along text, and that answers stay exact.

The heads here are built so that they guess well from the parent alone: on the text that the model writes, each token
is followed by one other (the first one that followed it), and the heads know that table.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from medusa_train.decoding import calibrate as calibration_module
from medusa_train.decoding.calibrate import calibrate
from medusa_train.decoding.decode import TreeDecoder
from medusa_train.decoding.propose import Descent
from medusa_train.decoding.replay import replay
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.tree import DraftTree, build_buffers
from medusa_train.modeling.backbone import hidden_states_and_middle, input_embeddings, output_projection
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, Seen
from tests.tiny import tiny_model

TREES = [
    DraftTree.product((3, 2, 2)),
    DraftTree.chain(3),
    DraftTree.from_paths([(0,), (1,), (1, 0), (1, 1), (1, 1, 0)]),
]
PROMPTS = [[5, 9, 22, 4], [7, 7, 31], [40, 3, 18, 25, 11, 6]]


def greedy(model, prompt, count):
    """The slow obvious way, to the model's end token: the whole text again for every token."""
    ids, end = list(prompt), model.generation_config.eos_token_id
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] == end:
                break
    return ids[len(prompt) :]


@torch.no_grad()
def knowing_heads(model, texts, reads_layer=None, heads=3):
    """Heads whose best guess below a token is the token that first followed it in `texts`."""
    projection = output_projection(model)
    size, vocab = projection.hidden_size, projection.vocab_size
    config = HeadsConfig("own", heads, 1, size, vocab, sees="parent", reads_layer=reads_layer)
    made = MedusaHeads(config)
    made.hidden_rms.fill_(1.0)
    after = {}
    for text in texts:
        for token, following in itertools.pairwise(text):
            after.setdefault(token, following)
    generator = torch.Generator().manual_seed(0)
    known = torch.tensor(sorted(after))
    for j in range(heads):
        # 60 times the parent's part drowns the hidden state, so features are a function of the parent almost alone.
        made.blocks[j][0].linear.weight[:, -size:] = 60 * torch.randn(size, size, generator=generator)
        made.blocks[j][0].linear.weight[:, :size] = 0.01 * torch.randn(size, size, generator=generator)
        rows = made.features_below(
            torch.zeros(len(known), size),
            torch.zeros(len(known), size),
            input_embeddings(model)(known),
            j,
        )
        wanted = torch.zeros(len(known), vocab)
        wanted[torch.arange(len(known)), torch.tensor([after[int(token)] for token in known])] = 1.0
        made.projections[j].weight.copy_((torch.linalg.pinv(rows) @ wanted).T)
    return made.eval()


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen3"])
def world(request):
    model = tiny_model(request.param).eval()
    texts = [greedy(model, prompt, 40) for prompt in PROMPTS]
    return model, texts


@pytest.mark.parametrize("reads_layer", [None, 1])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.num_nodes))
@pytest.mark.parametrize("launch", ["eager", "fixed"])
def test_greedy_answers_are_plain_greedy_and_guesses_stand(world, reads_layer, tree, launch):
    model, texts = world
    heads = knowing_heads(model, texts, reads_layer)
    decoder = TreeDecoder(model, heads, tree, launch=launch)
    settings = DecodeSettings(max_new_tokens=40)
    accepted = 0
    for prompt, text in zip(PROMPTS, texts, strict=True):
        found = decoder.decode([prompt], settings)[0]
        assert list(found.token_ids) == text
        accepted += sum(done.num_accepted for done in found.rounds)
    assert accepted >= 8, "the test is worth nothing where no guess stands"


def test_a_ragged_batch_gives_what_each_prompt_gives_alone(world):
    model, texts = world
    heads = knowing_heads(model, texts, reads_layer=1)
    decoder = TreeDecoder(model, heads, TREES[0])
    settings = DecodeSettings(max_new_tokens=40)
    together = decoder.decode(PROMPTS, settings)
    for prompt, one in zip(PROMPTS, together, strict=True):
        alone = decoder.decode([prompt], settings)[0]
        assert one.token_ids == alone.token_ids
        assert [done.num_accepted for done in one.rounds] == [done.num_accepted for done in alone.rounds]


def slow_tokens(model, heads, tree, hidden_D, middle_D, root):
    """The tree's tokens one by one, straight from the formula."""
    tokens, projection = {(): root}, output_projection(model)
    for path in tree.paths:
        parent = input_embeddings(model)(torch.tensor([tokens[path[:-1]]]))
        middle = None if middle_D is None else middle_D[None]
        logits = heads.logits(hidden_D[None], len(path) - 1, projection, Seen(parent, middle))[0]
        tokens[path] = int(logits.argsort(descending=True)[path[-1]])
    return [tokens[path] for path in ((), *tree.paths)]


@pytest.mark.parametrize("reads_layer", [None, 2])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.num_nodes))
@torch.no_grad()
def test_a_tree_is_filled_parent_by_parent(tree, reads_layer):
    model = tiny_model("llama").eval()
    heads = knowing_heads(model, [greedy(model, prompt, 40) for prompt in PROMPTS], reads_layer)
    hidden, middle = hidden_states_and_middle(model, torch.tensor([[5, 9, 22], [8, 1, 3]]), reads_layer=reads_layer)
    hidden, middle = hidden[:, -1], None if middle is None else middle[:, -1]
    descent = Descent(heads, output_projection(model), build_buffers(tree, 10), input_embeddings(model))
    found = descent(hidden, middle, torch.tensor([11, 30]))
    for b, root in enumerate((11, 30)):
        assert found[b].tolist() == slow_tokens(
            model, heads, tree, hidden[b], None if middle is None else middle[b], root
        )


def rounds_of(model, heads, tree, texts):
    """(accepted per round when decoded, the same when replayed from calibrated ranks) of every prompt."""
    decoder = TreeDecoder(model, heads, tree)
    decoded, rows = [], []
    for prompt, text in zip(PROMPTS, texts, strict=True):
        found = decoder.decode([prompt], DecodeSettings(max_new_tokens=len(text)))[0]
        decoded.append(tuple(done.num_accepted for done in found.rounds))
        ids = np.array(prompt + text)
        mask = np.array([0] * len(prompt) + [1] * len(text))
        rows.append(SimpleNamespace(input_ids=ids, loss_mask=mask, source="here", id=str(prompt)))
    found = calibrate(model, heads, rows, top_k=10)
    return decoded, list(replay(found.spans, tree, found.top_k).accepted)


@pytest.mark.parametrize("reads_layer", [None, 1])
def test_calibrated_ranks_replay_to_the_rounds_that_decoding_makes(reads_layer):
    model = tiny_model("llama").eval()
    texts = [greedy(model, prompt, 40) for prompt in PROMPTS]
    heads = knowing_heads(model, texts, reads_layer)
    decoded, replayed = rounds_of(model, heads, TREES[0], texts)
    assert replayed == decoded


@pytest.mark.parametrize("shift", [1, -1], ids=["sees its own target", "sees the token before that"])
def test_a_shift_of_what_is_seen_is_noticed(monkeypatch, shift):
    model = tiny_model("llama").eval()
    texts = [greedy(model, prompt, 40) for prompt in PROMPTS]
    heads = knowing_heads(model, texts)
    right = calibration_module._given_true_parents

    def shifted(heads, projection, hidden, middle, tokens_S, start, top_k, embedding):
        moved = torch.roll(tokens_S, -shift)
        return right(heads, projection, hidden, middle, moved, start, top_k, embedding)

    monkeypatch.setattr(calibration_module, "_given_true_parents", shifted)
    decoded, replayed = rounds_of(model, heads, TREES[0], texts)
    assert replayed != decoded


@torch.no_grad()
def test_a_siblings_parent_or_an_unscaled_row_is_noticed(monkeypatch):
    model = tiny_model("llama").eval()
    heads = knowing_heads(model, [greedy(model, prompt, 40) for prompt in PROMPTS])
    heads.hidden_rms.fill_(3.0)
    tree = TREES[0]
    hidden, _ = hidden_states_and_middle(model, torch.tensor([[5, 9, 22]]), reads_layer=None)
    expected = slow_tokens(model, heads, tree, hidden[0, -1], None, 11)

    def filled():
        descent = Descent(heads, output_projection(model), build_buffers(tree, 10), input_embeddings(model))
        return descent

    assert filled()(hidden[:, -1], None, torch.tensor([11]))[0].tolist() == expected
    siblings = filled()
    parents, rows, places, ranks, most = siblings.depths[1]
    siblings.depths[1] = (parents.roll(1), rows, places, ranks, most)
    assert siblings(hidden[:, -1], None, torch.tensor([11]))[0].tolist() != expected
    for j in range(3):  # a small weight, so that the scale of the row decides
        heads.blocks[j][0].linear.weight.mul_(0.02)
    scaled = filled()(hidden[:, -1], None, torch.tensor([11]))[0].tolist()
    monkeypatch.setattr(MedusaHeads, "scaled", lambda self, rows: rows)
    assert filled()(hidden[:, -1], None, torch.tensor([11]))[0].tolist() != scaled
