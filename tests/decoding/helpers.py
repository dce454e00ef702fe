"""Models, heads and trees that the decoding tests share, and slow decoders to compare with."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from medusa_train.decoding.tree import DraftTree
from medusa_train.modeling.backbone import hidden_states, output_projection
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, new_heads
from tests.tiny import tiny_model

EOS, PAD, VOCAB = 2, 0, 64


@functools.lru_cache(maxsize=64)
def model_of(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny random model, shared between tests (nobody changes it)."""
    return tiny_model(family, vocab_size=VOCAB, seed=seed, dtype=dtype)


def random_heads(model: nn.Module, num_heads: int = 3, contract: str = "own", seed: int = 0) -> MedusaHeads:
    """Heads of real shape with random weights: most guesses are wrong, some are right."""
    projection = output_projection(model)
    rows = 20 if contract == "reduced" else None
    config = HeadsConfig(contract, num_heads, 1, projection.hidden_size, projection.vocab_size, rows)
    generator = torch.Generator().manual_seed(seed)
    token_map = None if rows is None else torch.randperm(projection.vocab_size, generator=generator)[:rows]
    heads = new_heads(config, projection, token_map)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return heads.eval()


def random_prompt(length: int, seed: int) -> list[int]:
    """Tokens that are neither pad, bos nor eos."""
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(length)]


def random_tree(draw: random.Random, num_heads: int, most: int, top_k: int) -> DraftTree:
    """A random prefix-closed tree of 1..most nodes."""
    paths: set[tuple[int, ...]] = set()
    for _ in range(draw.randint(1, most)):
        parent = draw.choice([(), *(path for path in sorted(paths) if len(path) < num_heads)])
        paths.add((*parent, draw.randrange(top_k)))
    return DraftTree.from_paths(paths)


def generated(
    model: nn.Module, prompt: Sequence[int], count: int, stops: Sequence[int] = (EOS,), **kwargs
) -> tuple[int, ...]:
    """What transformers' own greedy `generate` returns after the prompt."""
    stops = list(stops) or None
    ids = torch.tensor([list(prompt)])
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=stops,
        pad_token_id=PAD,
        **kwargs,
    )
    return tuple(whole[0, len(prompt) :].tolist())


class ScriptedHeads(nn.Module):
    """Heads that know the text: at each of its positions they put the true token at a chosen rank, or nowhere.

    Args:
        model: the backbone; its hidden states along `ids` are how a position is recognised.
        ids: prompt and answer.
        rank: (position of the hidden state, head) -> rank of the true token, or None for not at all.
        filler: tokens for the other ranks, in order (the true token is skipped).
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Sequence[int],
        num_heads: int,
        rank: Callable[[int, int], int | None],
        filler: Sequence[int] = tuple(range(VOCAB)),
    ) -> None:
        super().__init__()
        self.config = HeadsConfig("own", num_heads, 1, output_projection(model).hidden_size, VOCAB)
        self.token_map = None
        self.ids, self.rank, self.filler = list(ids), rank, list(filler)
        with torch.no_grad():
            self.known_TD = hidden_states(model, torch.tensor([self.ids]))[0]

    def features(self, hidden_BD: Tensor, head: int) -> Tensor:
        return hidden_BD

    def to_token_ids(self, rows: Tensor) -> Tensor:
        return rows

    def project(self, features_BD: Tensor, head: int, projection) -> Tensor:
        positions = torch.cdist(features_BD, self.known_TD).argmin(-1).tolist()
        logits = torch.full((len(positions), VOCAB), -100.0)
        for row, position in enumerate(positions):
            ahead = position + head + 2
            true = self.ids[ahead] if ahead < len(self.ids) else None
            order = [token for token in self.filler if token != true]
            order += [token for token in range(VOCAB) if token != true and token not in self.filler]
            rank = self.rank(position, head)
            if true is not None:
                order.insert(len(order) if rank is None else rank, true)
            logits[row, order] = -torch.arange(len(order), dtype=torch.float32)
        return logits


def rounds_of(answer) -> list[tuple[int, ...]]:
    """Published tokens, round by round."""
    return [done.tokens for done in answer.rounds]


@torch.no_grad()
def brute_force(
    model: nn.Module, heads: nn.Module, prompt: Sequence[int], tree: DraftTree, count: int, top_k: int
) -> list[tuple[int, ...]]:
    """Greedy tree decoding where every path is run as a sequence of its own: no cache, no tree mask, no buffers.

    Returns the published tokens of each round.
    """
    projection = output_projection(model)

    def last_hidden(ids: list[int]) -> Tensor:
        return hidden_states(model, torch.tensor([ids]))[:, -1]

    def choice(ids: list[int]) -> int:
        return int(projection(last_hidden(ids))[0].argmax())

    text, rounds = list(prompt), []
    root = choice(text)
    while True:
        done = len(text) - len(prompt)
        if root == EOS or done + 1 == count:
            return [*rounds, (root,)]
        hidden = last_hidden(text)
        guesses = [
            heads.to_token_ids(heads.project(heads.features(hidden, j), j, projection).topk(top_k).indices)[0].tolist()
            for j in range(tree.depth)
        ]
        best = [root]
        for path in tree.paths:
            tokens = [root, *(guesses[j][rank] for j, rank in enumerate(path))]
            good = all(choice([*text, *tokens[: i + 1]]) == tokens[i + 1] for i in range(len(path)))
            if good and len(tokens) > len(best):
                best = tokens
        following = choice([*text, *best])
        if EOS in best:
            best = best[: best.index(EOS) + 1]
        best = best[: count - done]
        rounds.append(tuple(best))
        text += best
        if best[-1] == EOS or len(text) - len(prompt) == count:
            return rounds
        root = following
