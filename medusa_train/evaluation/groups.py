"""What is measured: trees, arms, the backbones they run on, and the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from medusa_train.evaluation.divergence import NextLogits
from medusa_train.evaluation.records import AnswerRecord
from medusa_train.evaluation.schema import Mode

if TYPE_CHECKING:
    from medusa_train.decoding.stopping import RopeSwitch


@dataclass(frozen=True)
class TreeInfo:
    """A tree as the report shows it.

    Attributes:
        probability: the search's prediction for each of `paths`, where there is one.
        calibration: hits by rank and count of every head, as the search counted them.
    """

    name: str
    paths: tuple[tuple[int, ...], ...]
    method: str | None = None
    probability: tuple[float, ...] | None = None
    expected_tokens_per_round: float | None = None
    calibration: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclass(frozen=True)
class ArmInfo:
    """One checkpoint with one tree in one mode; `checkpoint_hash` covers every file of the checkpoint."""

    name: str
    checkpoint: str
    checkpoint_hash: str
    mode: Mode
    heads: int
    tree: TreeInfo


@dataclass(frozen=True)
class GroupInfo:
    """One backbone and the arms that run on it."""

    base: str
    base_fingerprint: str
    checkpoint: str
    dtype: str
    device: str
    arms: tuple[ArmInfo, ...]
    quantization: str | None = None
    attention: str | None = None


# (prompt ids, most tokens to generate, seed of sampling, called with the number of tokens of each round) -> answer
Decoder = Callable[[Sequence[int], int, int, Callable[[int], None]], AnswerRecord]


@dataclass(frozen=True)
class OpenedGroup:
    """A loaded backbone with everything needed to decode: no file is read and no name looked up after this.

    Attributes:
        render: (role, content) messages ending in a user turn -> prompt ids.
        detokenize: ids -> text, special tokens kept.
        answer_text: ids -> text as the next turn's history, special tokens dropped.
        plain: plain decoders by law: "greedy" (the baseline of greedy and typical arms) and "sample"; empty for none.
        generate: transformers' own greedy generate, where asked for.
        arms: one decoder per entry of info.arms.
        context_length: most positions the model takes, None for no limit.
        rope_switch: where rotary frequencies change, None where they never do.
    """

    info: GroupInfo
    render: Callable[[Sequence[tuple[str, str]]], list[int]]
    detokenize: Callable[[Sequence[int]], str]
    answer_text: Callable[[Sequence[int]], str]
    next_logits: NextLogits
    plain: dict[str, Decoder]
    generate: Decoder | None
    arms: tuple[Decoder, ...]
    context_length: int | None = None
    rope_switch: RopeSwitch | None = None


@dataclass(frozen=True)
class RunOptions:
    """What to decode and how to summarise it. Sampling settings belong to the arms' modes."""

    max_new_tokens: int = 96
    all_turns: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    typical_eps: float = 0.09
    typical_alpha: float = 0.3
    seed: int = 0
    bootstrap_resamples: int = 2000
    available_prompts: int | None = field(default=None)
