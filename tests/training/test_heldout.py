"""Held-out figures against slow oracles: full logits and sorted ranks, calibration's ranks, rounds really decoded."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from medusa_train.cli.fit import tree_replay
from medusa_train.dataset.rows import TokenRow
from medusa_train.decoding.calibrate import calibrate, span_ranks
from medusa_train.decoding.decode import TreeDecoder
from medusa_train.decoding.ranks import Calibration, RankSpan
from medusa_train.decoding.replay import replay
from medusa_train.decoding.search import search
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.tree import DraftTree
from medusa_train.modeling.backbone import hidden_states, output_projection
from medusa_train.modeling.base import Base, load_base
from medusa_train.training.fit import build_trainer
from medusa_train.training.fused import Projection
from medusa_train.training.heldout import END, MISS, HeldOutRows, Scores, SpanRanks, score_rows
from medusa_train.training.losses import IGNORE
from medusa_train.training.prepare import Rows
from medusa_train.training.state import RunFolder
from medusa_train.training.trainer import MedusaTrainer
from tests.decoding.helpers import generated, random_tree
from tests.tiny import save_tiny_base, tiny_tokenizer
from tests.training.support import recipe_of

VALID = len(tiny_tokenizer())
PADDED = VALID + 60  # so many that a head often puts one of them among its ten likeliest
# Rows one by one, so that the cache's states are those of a row run alone, to the bit, before they are rounded.
CACHE = {"kind": "heads_only", "cache": {"enabled": True, "shard_rows": 40, "forward_tokens": 1}}
FREE = {"max_ce_increase": None}
LORA = {"kind": "joint", "lora": {"r": 4, "dropout": 0.3}, "drift": FREE}
HEADS = {
    "own": {"medusa_num_heads": 3},
    "shared": {"medusa_num_heads": 3, "contract": "shared"},
    "reduced": {"medusa_num_heads": 3, "contract": "reduced", "reduced_vocab_size": 60},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base(tmp_path_factory.mktemp("base"), "llama", vocab_size=PADDED)


def base_of(folder: Path) -> Base:
    return load_base(str(folder), dtype="float32")


def row(number: int, ids: list[int], mask: list[int], group: str = "") -> TokenRow:
    return TokenRow(np.array(ids, np.int32), np.array(mask, np.uint8), f"file:{number}", f"row{number}", group)


@torch.no_grad()
def drawn_rows(model: torch.nn.Module, count: int = 9) -> list[TokenRow]:
    """Two answers to a row, the second of 1 to 3 tokens; the last row is one token, at which no head guesses.

    Each token is one of the 20 that the model finds likeliest after the text up to 1 to 4 tokens before it, so that the
    lm_head and every head find their targets at many ranks, and often at none.
    """
    draw, rows = random.Random(0), []
    for number in range(count):
        mask = [0] * draw.randint(4, 6) + [1] * draw.randint(4, 12) + [0] * 2 + [1] * (1 + number % 3) + [0] * 2
        ids = [draw.randrange(3, VALID) for _ in range(4)]
        while len(ids) < len(mask):
            before = ids[: len(ids) + 1 - draw.randint(1, 4)]
            likely = model(input_ids=torch.tensor([before])).logits[0, -1, :VALID].topk(20).indices
            ids.append(int(likely[draw.randrange(20)]))
        rows.append(row(number, ids, mask, f"prompt{number // 2}"))
    return [*rows, row(count, [5, 6, 7, 8], [0, 1, 0, 0])]


def trainer_of(base: Base, folder: Path, rows: list[TokenRow], output: Path, policy, heads, **more) -> MedusaTrainer:
    """A run's trainer over hand-made rows, all of them to train on and all of them held out."""
    world = {"base": str(folder), "data": "no file"}
    recipe = recipe_of(world, output, policy, heads=heads, **more)
    run = RunFolder.of(recipe)
    run.open(recipe, restart=True)
    return build_trainer(recipe, base, Rows(rows, rows, None), run, None)


@torch.no_grad()
def shake(trainer: MedusaTrainer, size: float = 0.05) -> None:
    """Random steps of all that is trained, in place of training."""
    generator = torch.Generator().manual_seed(1)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


@torch.no_grad()
def head_logits(trainer: MedusaTrainer, hidden_TD: torch.Tensor, head: int, lm_head) -> torch.Tensor:
    """One head written out: z = h + silu(W h + b), times its own rows or through the lm_head."""
    state = trainer.model.heads.state_dict()
    linear = f"blocks.{head}.0.linear"
    z_TD = hidden_TD + F.silu(hidden_TD @ state[f"{linear}.weight"].T + state[f"{linear}.bias"])
    own = state.get(f"projections.{head}.weight")
    return lm_head(z_TD) if own is None else z_TD @ own.T


def rank_of(logits_V: torch.Tensor, label: int) -> int:
    return logits_V.argsort(descending=True).tolist().index(label)


def expected_of(rows: list[TokenRow], logits_of, shift: int, token_map: list[int] | None, valid: int) -> dict:
    """One channel's loss and top-1/5/10, target by target."""
    losses, ranks = [], []
    for one in rows:
        logits_TV = logits_of(one)
        for t in range(len(one) - shift):
            if not one.loss_mask[t + shift]:
                continue
            target = int(one.input_ids[t + shift])
            if token_map is not None and target not in token_map:
                ranks.append(math.inf)
                continue
            label = target if token_map is None else token_map.index(target)
            losses.append(-float(F.log_softmax(logits_TV[t].double(), -1)[label]))
            ranks.append(rank_of(logits_TV[t, :valid], label))
    found = {"loss": sum(losses) / len(losses)}
    return found | {f"top{top}": sum(rank < top for rank in ranks) / len(ranks) for top in (1, 5, 10)}


def test_scores_by_hand() -> None:
    """Logits ln 1, 2, 5 (softmax 1/8, 2/8, 5/8). Label 1: loss ln 4, second of three, and first of the first two."""
    rows_MV = torch.tensor([[1.0, 2.0, 5.0]] * 4).log()
    projection = Projection(((rows_MV, torch.eye(3)),), None, 1.0, None)
    labels = torch.tensor([[1, 2, IGNORE, IGNORE]])
    targets = torch.tensor([[1, 2, 7, IGNORE]])  # a token outside a reduced map, then no target at all
    weights, names = [0.5], ("head0",)
    for proposable, ranks, top1 in ((None, [1, 0, MISS, MISS], 1 / 3), ([2], [0, MISS, MISS, MISS], 1 / 3)):
        output = score_rows([projection], labels, targets, None, proposable)
        assert output["ranks"].tolist() == [ranks]
        scores = Scores.zero(names)
        scores.add(output)
        found = scores.metrics(weights)
        loss = (math.log(4) + math.log(8 / 5)) / 2
        assert found["head0_loss"] == pytest.approx(loss) and found["medusa_loss"] == pytest.approx(0.5 * loss)
        assert found["head0_top1"] == pytest.approx(top1)
        assert found["head0_top5"] == pytest.approx(2 / 3 if proposable is None else 1 / 3)


@pytest.mark.parametrize("policy", ["heads_only", CACHE], ids=["live", "cached"])
@pytest.mark.parametrize("contract", HEADS)
def test_losses_and_ranks_of_heads_are_those_of_full_logits(
    folder: Path, tmp_path: Path, policy, contract: str
) -> None:
    base = base_of(folder)
    rows = drawn_rows(base.model)
    trainer = trainer_of(base, folder, rows, tmp_path / "out", policy, HEADS[contract])
    shake(trainer)
    found = trainer.score()[0].metrics(trainer.recipe.head_weights())
    token_map = None if contract != "reduced" else trainer.model.heads.token_map.tolist()

    def hidden_of(one: TokenRow) -> torch.Tensor:
        with torch.no_grad():
            hidden_TD = base.model.model(input_ids=torch.tensor(one.input_ids[None]).long()).last_hidden_state[0]
        return hidden_TD.bfloat16().float() if policy == CACHE else hidden_TD

    wanted = {}
    for head in range(3):
        one = expected_of(
            rows,
            lambda r, j=head: head_logits(trainer, hidden_of(r), j, base.model.lm_head),
            head + 2,
            token_map,
            VALID,
        )
        wanted |= {f"head{head}_{name}": value for name, value in one.items()}
    wanted["medusa_loss"] = sum(w * wanted[f"head{j}_loss"] for j, w in enumerate((0.8, 0.64, 0.512)))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert 0 < wanted["head0_top1"] < wanted["head0_top10"] < 1  # the case tells ranks apart


@pytest.mark.parametrize(
    ("policy", "contract"),
    [
        (LORA, "shared"),
        ({**LORA, "kind": "self_distill"}, "reduced"),
        ({"kind": "joint", "adapter": "none", "drift": FREE}, "shared"),
    ],
    ids=["joint", "self_distill", "full"],
)
def test_drift_is_that_of_full_logits_before_and_after(folder: Path, tmp_path: Path, policy, contract: str) -> None:
    original = base_of(folder).model
    rows = drawn_rows(original)
    trainer = trainer_of(base_of(folder), folder, rows, tmp_path / "out", policy, HEADS[contract])
    trainer.keep_original_rows()
    shake(trainer, 0.02)
    found = trainer.score()[0].metrics(trainer.recipe.head_weights())
    changed = trainer.model.backbone.eval()
    ce, kl, same = [], [], []
    with torch.no_grad():
        for one in rows:
            ids_1T = torch.tensor(one.input_ids[None]).long()
            before, now = (
                F.log_softmax(model(input_ids=ids_1T).logits[0].double(), -1) for model in (original, changed)
            )
            for t in range(len(one) - 1):
                if one.loss_mask[t + 1]:
                    token = int(one.input_ids[t + 1])
                    ce.append(float(before[t, token] - now[t, token]))
                    kl.append(float((before[t].exp() * (before[t] - now[t])).sum()))
                    same.append(int(before[t].argmax()) == int(now[t].argmax()))
        lm = expected_of(
            rows, lambda one: changed(input_ids=torch.tensor(one.input_ids[None]).long()).logits[0], 1, None, PADDED
        )
    assert found["drift_ce"] == pytest.approx(sum(ce) / len(ce), rel=1e-4)
    assert found["drift_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)
    assert found["drift_top1_agreement"] == pytest.approx(sum(same) / len(same))
    assert 0.2 < found["drift_top1_agreement"] < 1 and found["drift_kl"] > 0.01
    assert {name: found[f"lm_{name}"] for name in lm} == pytest.approx(lm, rel=1e-5)


RANKED = {
    "own": ("heads_only", "own"),
    "reduced": ("heads_only", "reduced"),
    "shared, cached": (CACHE, "shared"),
    "reduced, cached": (CACHE, "reduced"),
    "shared, LoRA on the lm_head": (LORA, "shared"),
    "reduced, LoRA": (LORA, "reduced"),
    "own, all weights": ({"kind": "joint", "adapter": "none", "drift": FREE}, "own"),
}


@pytest.mark.parametrize(("policy", "contract"), RANKED.values(), ids=RANKED)
def test_spans_are_those_that_calibration_finds(folder: Path, tmp_path: Path, policy, contract: str) -> None:
    base = base_of(folder)
    rows = drawn_rows(base.model)
    trainer = trainer_of(base, folder, rows, tmp_path / "out", policy, HEADS[contract])
    shake(trainer)
    spans = trainer.score()[1]
    model, heads = trainer.model.backbone or base.model, trainer.model.heads
    calibrated = calibrate(model.eval(), heads.eval(), rows, valid_vocab_size=VALID).spans
    wanted = [span.ranks_SK for span in calibrated]
    if policy == CACHE:
        wanted = [ranks_of_rounded(base, heads, one, start, end) for one, start, end in answers(rows)]
    assert [span.ranks_SK.tolist() for span in spans] == [ranks_SK.tolist() for ranks_SK in wanted]
    assert [(span.row_id, span.source) for span in spans] == [(span.row_id, span.source) for span in calibrated]
    every = np.concatenate([span.ranks_SK for span in spans])
    assert (every == END).any() and (every == MISS).any() and len(set(every[every >= 0].tolist())) > 5


def answers(rows: list[TokenRow]) -> list[tuple[TokenRow, int, int]]:
    """Every run of supervised tokens, found by walking."""
    found = []
    for one in rows:
        mask = [*one.loss_mask.tolist(), 0]
        starts = [t for t in range(1, len(one)) if mask[t] and not mask[t - 1]]
        found += [(one, start, next(t for t in range(start, len(mask)) if not mask[t])) for start in starts]
    return found


@torch.no_grad()
def ranks_of_rounded(base: Base, heads, one: TokenRow, start: int, end: int) -> np.ndarray:
    """Calibration's ranks from states rounded to bf16, as a cache keeps them."""
    ids_T = torch.tensor(one.input_ids).long()
    hidden_TD = hidden_states(base.model, ids_T[None])[0].bfloat16().float()
    projection = output_projection(base.model, VALID)
    return span_ranks(heads, projection, hidden_TD[start - 1 : end - 1], ids_T[start:end], 10)[0]


@pytest.fixture(scope="module")
def greedy(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[MedusaTrainer, Base, list[TokenRow]]:
    """Rows that the model answered greedily itself, and heads trained on them until they guess well."""
    base, draw, rows = base_of(folder), random.Random(3), []
    for number in range(10):
        prompt = [draw.randrange(3, VALID) for _ in range(draw.randint(3, 8))]
        answer = generated(base.model, prompt, 14 + number, [base.tokenizer.eos_token_id])
        rows.append(row(number, [*prompt, *answer], [0] * len(prompt) + [1] * len(answer)))
    training = {"num_train_epochs": 60, "per_device_train_batch_size": 8}
    output = tmp_path_factory.mktemp("greedy") / "out"
    trainer = trainer_of(base, folder, rows, output, "heads_only", HEADS["own"], training=training)
    trainer.train()
    return trainer, base, rows


def decoded_rounds(base: Base, heads, tree: DraftTree, one: TokenRow) -> list[int]:
    """Tokens published by each round that the decoder really makes from the row's prompt."""
    start = int(one.loss_mask.argmax())
    decoder = TreeDecoder(base.model, heads.eval(), tree, valid_vocab_size=VALID)
    done = decoder.decode([one.input_ids[:start].tolist()], DecodeSettings(max_new_tokens=len(one) - start))[0]
    assert list(done.token_ids) == one.input_ids[start:].tolist()
    return [len(round_.tokens) for round_ in done.rounds]


@pytest.mark.parametrize("seed", range(3))
def test_replay_along_greedy_rows_is_what_the_decoder_does(greedy, seed: int) -> None:
    """Round by round: as many rounds, and as many tokens in each."""
    trainer, base, rows = greedy
    tree = DraftTree.product([3, 2, 2]) if seed == 0 else random_tree(random.Random(seed), 3, 20, 10)
    found = replay(trainer.score()[1], tree, 10)
    wanted = [decoded_rounds(base, trainer.model.heads, tree, one) for one in rows]
    assert [[count + 1 for count in span] for span in found.accepted] == wanted
    assert (found.rounds, found.tokens) == (sum(map(len, wanted)), sum(map(sum, wanted)))
    assert seed > 0 or found.tokens > 1.3 * found.rounds  # the heads guess something


def test_tokens_per_round_of_fit_is_decoded_by_trees_searched_on_the_other_half(greedy) -> None:
    trainer, base, rows = greedy
    spans = trainer.score()[1]
    found = tree_replay(7)(spans)["tokens_per_round"]
    held = [RankSpan(s.ranks_SK, np.ones(len(s.ranks_SK), bool), s.row_id, s.source) for s in spans]
    halves = Calibration(tuple(held), 10).split()
    by_id = {one.id: one for one in rows}
    rounds = []
    for searched, replayed in (halves, halves[::-1]):
        tree = search(searched, 7, "joint").tree
        rounds += [decoded_rounds(base, trainer.model.heads, tree, by_id[s.row_id]) for s in replayed.spans]
    assert len(rounds) == len(rows)
    assert found == pytest.approx(sum(map(sum, rounds)) / sum(map(len, rounds)))


@pytest.mark.parametrize(("first", "second"), [("p0", "p1"), ("p0", "p3"), ("p2", "p5"), ("p4", "p7")])
def test_samples_of_one_prompt_are_never_searched_and_replayed_both(first: str, second: str) -> None:
    """Head 0 is right at rank 4 along one prompt's samples, at rank 7 along the other's: a tree of one node that was
    searched on the one accepts nothing along the other, which is 1 token per round."""
    rows = [row(n, list(range(3, 13)), [0, 0] + [1] * 8, first if n < 4 else second) for n in range(8)]
    heldout = HeldOutRows(rows, (2,), None, None)
    at = [(n, t) for n in range(8) for t in range(1, 9)]
    ranks = np.array([[4 if n < 4 else 7] for n, _ in at], np.int16)
    spans = heldout.spans(ranks, *(np.array(column) for column in zip(*at, strict=True)))
    assert [span.row_id for span in spans] == [first] * 4 + [second] * 4
    assert tree_replay(1)(spans)["tokens_per_round"] == 1.0
    # Told apart by row, each half knows both prompts, and some rounds accept.
    leaky = [SpanRanks(span.ranks_SK, f"row{number}", span.source) for number, span in enumerate(spans)]
    assert tree_replay(1)(leaky)["tokens_per_round"] > 1.2
