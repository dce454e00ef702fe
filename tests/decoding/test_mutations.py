"""Each known way of being wrong must make a named check fail: the checks are worth what they catch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.decoding import checks
from tests.decoding.mutants import forget, mutant

# name -> (module, what stands there, what a slip would make of it, the check that must fail)
MUTATIONS = {
    "head offset one too small in calibration": (
        "calibrate",
        "        ahead = head + 1\n",
        "        ahead = head\n",
        "check_calibration_offset",
    ),
    "calibration reads the hidden state at the root": (
        "calibrate",
        "before = slice(start - 1, end - 1)",
        "before = slice(start, end)",
        "check_calibration_offset",
    ),
    "mask not shifted by the committed length": (
        "masks",
        "        start = self.capacity - length\n",
        "        start = self.capacity - length - 1\n",
        "check_a31_mask",
    ),
    "positions by packed row": (
        "rounds",
        "positions_BN = (buffers.depth_N + length)[None]",
        "positions_BN = (torch.arange(buffers.num_rows) + length)[None]",
        "check_scripted_rounds",
    ),
    "window measured by slot": (
        "masks",
        "offset[capacity : capacity + rows] = buffers.depth_N",
        "offset[capacity : capacity + rows] = torch.arange(rows)",
        "check_windows_by_depth",
    ),
    "window ignored": ("masks", "    if window is not None:\n", "    if False:\n", "check_windows_by_depth"),
    "siblings see each other": (
        "tree",
        "        mask_NN[u, rows] = True\n",
        "        mask_NN[u, : u + 1] = True\n",
        "check_a31_mask",
    ),
    "slots without the depth's stride": (
        "tree",
        "1 + (len(path) - 1) * top_k + path[-1]",
        "1 + (len(path) - 1) * (top_k - 1) + path[-1]",
        "check_a31_buffers",
    ),
    "logits judge their own row": (
        "verify",
        "agrees_BN = tokens_BN == target_BN.index_select(1, buffers.parent_N)",
        "agrees_BN = tokens_BN == target_BN",
        "check_a31_greedy",
    ),
    "a match after a mismatch counts": (
        "verify",
        "return (stands_BN[:, None, :] | ~buffers.tree_mask_NN).all(-1)",
        "return stands_BN",
        "check_a31_greedy",
    ),
    "a rows committed, not a + 1": (
        "rounds",
        "            self.lengths[0] += len(paths[0])\n",
        "            self.lengths[0] += len(paths[0]) - 1\n",
        "check_scripted_rounds",
    ),
    "keys and values by length, not by path": (
        "rounds",
        "self.cache.commit(self.lengths[0], paths[0][1:])",
        "self.cache.commit(self.lengths[0], list(range(1, len(paths[0]))))",
        "check_scripted_rounds",
    ),
    "compaction without the start": (
        "cache",
        "source = torch.tensor(rows, device=slab.device) + start",
        "source = torch.tensor(rows, device=slab.device)",
        "check_a31_commit",
    ),
    "next guesses from the winner's predecessor": (
        "rounds",
        "self.hidden_BD = hidden_BND[self.batch_B, acceptance.winner_B]",
        "self.hidden_BD = hidden_BND[self.batch_B, self.d.buffers.parent_N[acceptance.winner_B]]",
        "check_frontier_is_the_winner",
    ),
    "next root from the winner's predecessor": (
        "verify",
        "next_root_B=target_BN.gather(1, winner_B[:, None]).squeeze(1)",
        "next_root_B=target_BN.gather(1, buffers.parent_N[winner_B][:, None]).squeeze(1)",
        "check_a31_greedy",
    ),
    "max for min in the threshold": (
        "verify",
        "torch.clamp(alpha * torch.exp(-entropy_BN), max=epsilon)",
        "torch.clamp(alpha * torch.exp(-entropy_BN), min=epsilon)",
        "check_typical_threshold",
    ),
    "wrong sign of the entropy": (
        "verify",
        "torch.exp(-entropy_BN)",
        "torch.exp(entropy_BN)",
        "check_typical_threshold",
    ),
    "not strictly above the threshold": (
        "verify",
        "edge_logp_BN.exp() > threshold_BN",
        "edge_logp_BN.exp() >= threshold_BN",
        "check_typical_strict",
    ),
    "ties by raw probability": (
        "verify",
        "path_logp_BN = edge_logp_BN @ buffers.tree_mask_NN.T.float()",
        "path_logp_BN = edge_logp_BN.exp() @ buffers.tree_mask_NN.T.float()",
        "check_typical_ties",
    ),
    "temperature left out": (
        "verify",
        "logits_BNV.float() / temperature",
        "logits_BNV.float()",
        "check_typical_oracle",
    ),
    "replay forgets the root": (
        "replay",
        "position += lengths[position] + 1",
        "position += max(1, lengths[position])",
        "check_replay_equals_decoder",
    ),
}


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in {module.partition(".")[0] for module in set(sys.modules) - before if module.startswith("mutant_")}:
        forget(name)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, room: Path) -> None:
    module, old, new, check = MUTATIONS[name]
    broken = mutant(room, f"mutant_{list(MUTATIONS).index(name)}", module, old, new)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        getattr(checks, check)(broken)


def test_an_unchanged_copy_passes(room: Path) -> None:
    """The harness itself breaks nothing: a copy with one empty line more passes what the mutants fail."""
    line = "from __future__ import annotations\n"
    copy = mutant(room, "mutant_none", "verify", line, line + "\n")
    for check in sorted({entry[3] for entry in MUTATIONS.values()}):
        getattr(checks, check)(copy)
