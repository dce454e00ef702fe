"""Checks with numbers derived by hand. Each takes a package namespace, so that it can also be run on a broken copy.

`d.tree`, `d.verify`, ... are the modules of medusa_train.decoding, or of a mutant of it (see test_mutations.py).
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import torch

from tests.decoding.helpers import ScriptedHeads, brute_force, generated, model_of, random_heads, random_prompt

A31_PATHS = [(0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
# Row tokens: the root 11, head 0 guesses 21 and 22, head 1 guesses 31, 32, 33 under each.
A31_TOKENS = [11, 21, 22, 31, 32, 33, 31, 32, 33]


def a31(d) -> SimpleNamespace:
    tree = d.tree.DraftTree.from_paths(A31_PATHS)
    return SimpleNamespace(tree=tree, buffers=d.tree.build_buffers(tree, top_k=10, num_heads=2))


def check_a31_buffers(d) -> None:
    """DESIGN.md section 8: rows, slots, depths, ancestors and retrieval paths."""
    buffers = a31(d).buffers
    assert buffers.num_rows == 9
    assert buffers.depth_N.tolist() == [0, 1, 1, 2, 2, 2, 2, 2, 2]
    assert buffers.tree_indices_N.tolist() == [0, 1, 2, 11, 12, 13, 11, 12, 13]
    candidates = torch.tensor([11, *range(21, 31), *range(31, 41)])
    assert candidates[buffers.tree_indices_N].tolist() == A31_TOKENS
    ancestors = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 1, 5}, {0, 2, 6}, {0, 2, 7}, {0, 2, 8}]
    assert [set(row.nonzero().flatten().tolist()) for row in buffers.tree_mask_NN] == ancestors
    assert buffers.retrieve_PL.tolist() == [[0, 1, 3], [0, 1, 4], [0, 1, 5], [0, 2, 6], [0, 2, 7], [0, 2, 8]]
    assert buffers.retrieve_valid_PL.all()
    assert buffers.parent_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def check_a31_mask(d) -> None:
    """With P = 5 the mask is [1, 1, 9, 14]: the prefix whole, then ancestors and self only."""
    fixture = a31(d)
    masks = d.masks.TreeMasks(model_of("llama"), fixture.buffers, 32, torch.float32)
    mask = masks.view(5)
    assert mask.shape == (1, 1, 9, 14)
    seen = mask[0, 0] == 0
    assert seen[:, :5].all()
    ancestors = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 1, 5}, {0, 2, 6}, {0, 2, 7}, {0, 2, 8}]
    assert [set(row.nonzero().flatten().tolist()) for row in seen[:, 5:]] == ancestors
    ragged = masks.ragged(torch.tensor([5, 2]), 14)
    assert torch.equal(ragged[0], mask[0])
    assert (ragged[1, 0, :, :2] == 0).all()
    assert torch.equal(ragged[1, 0, :, 2:11], mask[0, 0, :, 5:])
    assert (ragged[1, 0, :, 11:] < 0).all()


def check_windows_by_depth(d) -> None:
    """A window of 4 positions, P = 5: a row of depth 2 is at position 7 and sees positions 4..7, whatever its slot."""
    fixture = a31(d)
    seen = d.masks.wide_tree_mask(fixture.buffers, 16, 4)[:, 16 - 5 : 16 + 9]
    # Root at position 5 sees 2..5; depth 1 at 6 sees 3..6; depth 2 at 7 sees 4..7.
    assert [row[:5].nonzero().flatten().tolist() for row in seen] == [
        [2, 3, 4],
        *[[3, 4]] * 2,
        *[[4]] * 6,
    ]
    # Row 8 lies 8 slots past the prefix, 3 past its parent's row; its root is 2 positions away and in the window.
    assert seen[8, 5:].nonzero().flatten().tolist() == [0, 2, 8]
    narrow = d.masks.wide_tree_mask(fixture.buffers, 16, 2)[:, 16 - 5 : 16 + 9]
    assert narrow[8].nonzero().flatten().tolist() == [5 + 2, 5 + 8]
    # A window of 1: itself only. By slots row 2 would be no distance from row 8.
    alone = d.masks.wide_tree_mask(fixture.buffers, 16, 1)[:, 16 - 5 : 16 + 9]
    assert torch.equal(alone[:, 5:], torch.eye(9, dtype=torch.bool))
    assert not alone[:, :5].any()


def peaked(rows: dict[int, int], num_rows: int = 9, vocab: int = 100) -> torch.Tensor:
    """Logits [1, N, V] whose argmax after row u is rows[u] (99 elsewhere)."""
    logits = torch.zeros(1, num_rows, vocab)
    for row in range(num_rows):
        logits[0, row, rows.get(row, 99)] = 10.0
    return logits


def check_a31_greedy(d) -> None:
    """After 11 comes 21, after 21 comes 31, after that 77. Row 6 agrees with its parent, but that one fell."""
    fixture = a31(d)
    logits = peaked({0: 21, 1: 31, 3: 77, 2: 31, 6: 55})
    found = d.verify.greedy_accept(torch.tensor([A31_TOKENS]), logits, fixture.buffers)
    assert found.path_BL.tolist() == [[0, 1, 3]]
    assert found.num_accepted_B.tolist() == [2]
    assert found.winner_B.tolist() == [3]
    assert found.next_root_B.tolist() == [77]
    # Nothing agrees with the root: only the root is published, and its own argmax follows.
    found = d.verify.greedy_accept(torch.tensor([A31_TOKENS]), peaked({0: 50, 2: 31}), fixture.buffers)
    assert found.path_BL.tolist() == [[0, -1, -1]]
    assert (found.num_accepted_B.tolist(), found.next_root_B.tolist()) == ([0], [50])


def law(probabilities: dict[int, float], vocab: int = 100) -> torch.Tensor:
    """Logits whose softmax gives `probabilities`; what is left over is spread evenly over the other tokens."""
    left = (1 - sum(probabilities.values())) / (vocab - len(probabilities))
    values = torch.full((vocab,), left, dtype=torch.float64)
    for token, p in probabilities.items():
        values[token] = p
    return values.clamp_min(1e-30).log().float()


def check_a31_typical(d) -> None:
    """Both head-0 guesses are plausible, only 22 has a plausible child: rows [0, 2, 6], and 7 follows.

    After the root: 0.5, 0.4 and 0.1 over 98 tokens, H = 0.347 + 0.367 + 0.689 = 1.402 nats, threshold
    min(0.09, 0.3 * 0.246 = 0.074) = 0.074. After 21 the law is spread evenly, p = 0.01 and the threshold is
    0.3 * 0.01 = 0.003, but 31, 32, 33 have 1e-30. After 22: 31 has 0.9.
    """
    fixture = a31(d)
    logits = torch.zeros(1, 9, 100)
    logits[0, 0] = law({21: 0.5, 22: 0.4})
    logits[0, 1] = law({31: 0.0, 32: 0.0, 33: 0.0})
    logits[0, 2] = law({31: 0.9})
    logits[0, 6] = law({7: 0.9})
    found = d.verify.typical_accept(torch.tensor([A31_TOKENS]), logits, fixture.buffers)
    assert found.path_BL.tolist() == [[0, 2, 6]]
    assert found.num_accepted_B.tolist() == [2]
    assert found.next_root_B.tolist() == [7]


def check_typical_threshold(d) -> None:
    """min(eps, alpha exp(-H)): 0.3 / 4 = 0.075 for four equal tokens; 0.09 where one token is nearly sure.

    Half and half: 0.3 / 2 = 0.15, so eps = 0.09 binds: with max for min it would be 0.15. A hundred equal tokens:
    0.003; with exp(+H) it would be 0.09.
    """
    four, sure, half, hundred = law({1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}), law({1: 1.0}), law({1: 0.5, 2: 0.5}), law({})
    logp = torch.log_softmax(torch.stack([four, sure, half, hundred])[None], -1)
    found = d.verify.typical_threshold(logp, 0.09, 0.3)[0].tolist()
    assert np.allclose(found, [0.075, 0.09, 0.09, 0.003], rtol=1e-4)


def check_typical_strict(d) -> None:
    """p equal to the threshold falls: with one sure token per row, threshold = eps exactly, p set to eps."""
    fixture = a31(d)
    logits = torch.full((1, 9, 100), -torch.inf)
    logits[0, :, 50] = 0.0
    logits[0, 0, 21] = 0.0  # p = 0.5 each, H = ln 2, alpha * exp(-H) = 0.15
    accepted = d.verify.typical_accept(
        torch.tensor([A31_TOKENS]), logits, fixture.buffers, epsilon=0.5, alpha=2.0
    ).num_accepted_B
    assert accepted.tolist() == [0]  # 0.5 > min(0.5, 2 * 0.5) is false
    accepted = d.verify.typical_accept(
        torch.tensor([A31_TOKENS]), logits, fixture.buffers, epsilon=0.499, alpha=2.0
    ).num_accepted_B
    assert accepted.tolist() == [1]


def check_typical_ties(d) -> None:
    """Two paths of length 2. Left: p = 0.80 * 0.10; right: 0.15 * 0.60. Summed log p prefers the right one
    (0.09 > 0.08), a sum of raw p would prefer the left one (0.90 > 0.75)."""
    fixture = a31(d)
    logits = torch.zeros(1, 9, 100)
    logits[0, 0] = law({21: 0.80, 22: 0.15})
    logits[0, 1] = law({31: 0.10})
    logits[0, 2] = law({31: 0.60})
    found = d.verify.typical_accept(torch.tensor([A31_TOKENS]), logits, fixture.buffers)
    assert found.path_BL.tolist() == [[0, 2, 6]]


def check_a31_commit(d) -> None:
    """P = 5, rows staged at 5..13, winner rows [0, 2, 6]: slots [5, 7, 11] -> [5, 6, 7], in every layer."""
    cache = d.cache.PreallocatedCache(2, 1, 16)
    marks = torch.arange(14.0)
    for start, count in ((0, 5), (5, 9)):
        cache.stage(start, count)
        for layer in range(2):
            part = marks[start : start + count] + 100 * layer
            keys = part[None, None, :, None].expand(1, 3, count, 4).contiguous()
            cache.update(keys, -keys, layer)
        cache.build_slabs()
    cache.commit(5, [2, 6])
    cache.stage(8, 1)
    for layer in range(2):
        one = torch.full((1, 3, 1, 4), 50.0 + 100 * layer)
        keys, values = cache.update(one, -one, layer)
        expected = torch.tensor([0, 1, 2, 3, 4, 5, 7, 11, 50.0]) + 100 * layer
        assert torch.equal(keys, expected[None, None, :, None].expand(1, 3, 9, 4))
        assert torch.equal(values, -keys)


def check_scripted_rounds(d) -> None:
    """Heads that put the true token where the script says: every round's tokens are known beforehand.

    Tree A31: at most 2 accepted. Script: (rank in head 0, rank in head 1) cycles through (1, 2), (0, 0), (1, miss),
    (3, 0). Rank (1, 2) is path (1, 2): 2 accepted; (0, 0): 2; (1, miss): 1; rank 3 is not in the tree: 0.
    """
    script = [(1, 2), (0, 0), (1, None), (3, 0)]
    for family in ("llama", "gpt2", "gemma3"):
        model, prompt = model_of(family), random_prompt(5, seed=1)
        answer = generated(model, prompt, 24, stops=())
        expected, position, rounds = [], 0, []
        while position < len(answer):
            # The hidden state before the root is at absolute position len(prompt) + position - 1.
            ranks = script[(len(prompt) + position - 1) % 4]
            accepted = {(1, 2): 2, (0, 0): 2, (1, None): 1, (3, 0): 0}[ranks]
            rounds.append(answer[position : position + accepted + 1])
            position += accepted + 1
        heads = ScriptedHeads(model, [*prompt, *answer, *[3] * 3], 2, lambda position, head: script[position % 4][head])
        decoder = d.decode.TreeDecoder(model, heads, d.tree.DraftTree.from_paths(A31_PATHS))
        done = decoder.decode([prompt], d.settings.DecodeSettings(max_new_tokens=24, stop_token_ids=()))[0]
        assert done.token_ids == answer, family
        expected = [tuple(tokens) for tokens in rounds]
        assert [one.tokens for one in done.rounds] == expected, family


def check_greedy_identity(d) -> None:
    """Random heads, wide tree, several families: generate's tokens, and brute force's rounds."""
    tree = d.tree.DraftTree.product([4, 3, 2])
    for family in ("llama", "gpt2", "gemma2", "mistral"):
        model = model_of(family)
        heads = random_heads(model, 3)
        for length in (1, 30):
            prompt = random_prompt(length, seed=length)
            done = d.decode.TreeDecoder(model, heads, tree).decode(
                [prompt], d.settings.DecodeSettings(max_new_tokens=16)
            )[0]
            assert done.token_ids == generated(model, prompt, 16), (family, length)
            assert [one.tokens for one in done.rounds] == brute_force(model, heads, prompt, tree, 16, 10)


def check_frontier_is_the_winner(d) -> None:
    """The heads' next guesses come from the winner's hidden state: brute force proposes the same tokens."""
    model, prompt = model_of("llama"), random_prompt(6, seed=3)
    answer = generated(model, prompt, 12, stops=())
    heads = ScriptedHeads(model, [*prompt, *answer, 3, 3, 3], 2, lambda position, head: 0)
    done = d.decode.TreeDecoder(model, heads, d.tree.DraftTree.chain(2)).decode(
        [prompt], d.settings.DecodeSettings(max_new_tokens=12, stop_token_ids=())
    )[0]
    # All guesses right: 12 tokens in 4 rounds of 3.
    assert [one.num_accepted for one in done.rounds] == [2, 2, 2, 2]


def check_calibration_offset(d) -> None:
    """Head j guesses token t+j+2 from the hidden state at t; with the root at t+1 that is root + 1 + j."""
    model, prompt = model_of("llama"), random_prompt(4, seed=5)
    answer = list(generated(model, prompt, 10, stops=()))
    ids = [*prompt, *answer]
    script = lambda position, head: (position + 2 * head) % 5  # noqa: E731
    heads = ScriptedHeads(model, ids, 3, script)
    row = SimpleNamespace(input_ids=np.array(ids), loss_mask=np.array([0] * 4 + [1] * 10), source="toy", id="r0")
    found = d.calibrate.calibrate(model, heads, [row])
    ranks = found.spans[0].ranks_SK
    assert ranks.shape == (10, 3)
    for root in range(10):
        for head in range(3):
            expected = script(4 + root - 1, head) if root + 1 + head < 10 else d.ranks.END
            assert ranks[root, head] == expected, (root, head)
    hits, counts = found.hits_and_counts()
    assert counts.tolist() == [9, 8, 7]
    assert hits.sum(1).tolist() == [9, 8, 7]
    assert found.greedy_fraction == 1.0


def check_replay_equals_decoder(d) -> None:
    """Rounds counted from ranks are the rounds that the decoder makes, prompt by prompt."""
    model = model_of("gemma2")
    heads, rows, prompts = random_heads(model, 3), [], []
    for seed in range(6):
        prompt = random_prompt(3 + seed, seed)
        answer = list(generated(model, prompt, 20))
        rows.append(
            SimpleNamespace(
                input_ids=np.array([*prompt, *answer]),
                loss_mask=np.array([0] * len(prompt) + [1] * len(answer)),
                source="toy",
                id=str(seed),
            )
        )
        prompts.append(prompt)
    calibration = d.calibrate.calibrate(model, heads, rows)
    for tree in (d.tree.DraftTree.chain(3), d.tree.DraftTree.product([4, 3, 2]), a31(d).tree):
        decoder = d.decode.TreeDecoder(model, heads, tree)
        counted = d.replay.replay(calibration.spans, tree, calibration.top_k)
        made = [
            tuple(
                one.num_accepted
                for one in decoder.decode([prompt], d.settings.DecodeSettings(max_new_tokens=20))[0].rounds
            )
            for prompt in prompts
        ]
        assert list(counted.accepted) == made


def typical_oracle(
    tokens: np.ndarray, logits: np.ndarray, paths: list[tuple[int, ...]], temperature: float, eps: float, alpha: float
) -> tuple[list[int], int]:
    """Typical acceptance leaf by leaf in float64, as the paper says it: (accepted rows, next root)."""
    row = {path: index for index, path in enumerate(((), *paths))}
    leaves = [path for path in paths if not any(other[:-1] == path for other in paths)] or [()]
    best: tuple[int, float, list[int]] | None = None
    for leaf in leaves:
        rows, total = [0], 0.0
        for length in range(1, len(leaf) + 1):
            scores = logits[rows[-1]].astype(np.float64) / temperature
            p = np.exp(scores - scores.max())
            p /= p.sum()
            entropy = -float(np.sum([x * math.log(x) for x in p if x > 0]))
            chance = float(p[tokens[row[leaf[:length]]]])
            if not chance > min(eps, alpha * math.exp(-entropy)):
                break
            rows.append(row[leaf[:length]])
            total += math.log(chance)
        key = (len(rows), total, rows)
        if best is None or key[:2] > (best[0], best[1] + 1e-9) or (key[0] > best[0]):
            best = key
    return best[2], int(np.argmax(logits[best[2][-1]]))


def check_typical_oracle(d, cases: int = 300) -> None:
    """Random trees, logits and thresholds against the leaf-by-leaf oracle."""
    from tests.decoding.helpers import random_tree

    for case in range(cases):
        draw, numbers = random.Random(case), np.random.default_rng(case)
        tree = random_tree(draw, 4, 24, 5)
        buffers = d.tree.build_buffers(d.tree.DraftTree(tree.paths), 5)
        # Siblings carry different tokens, as top-k guesses of one head do; a token may return at another depth.
        guesses = [numbers.permutation(12)[:5] for _ in range(4)]
        tokens = np.array([0, *(guesses[len(path) - 1][path[-1]] for path in tree.paths)])
        logits = (numbers.normal(size=(len(tokens), 12)) * draw.choice([0.5, 2.0, 5.0])).astype(np.float32)
        temperature, eps, alpha = draw.choice([0.7, 1.0, 1.5]), draw.choice([0.05, 0.09, 0.3]), draw.choice([0.1, 0.3])
        found = d.verify.typical_accept(
            torch.from_numpy(tokens)[None],
            torch.from_numpy(logits)[None],
            buffers,
            temperature=temperature,
            epsilon=eps,
            alpha=alpha,
        )
        rows, following = typical_oracle(tokens, logits, list(tree.paths), temperature, eps, alpha)
        assert [row for row in found.path_BL[0].tolist() if row >= 0] == rows, case
        assert found.next_root_B.tolist() == [following], case
