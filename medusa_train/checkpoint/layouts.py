"""Every other program's checkpoint layout as data: names, files, configs, limits. `export` and `import` read it.

All of them compute x + SiLU(W x + b) on the hidden state after the final norm, and their head i predicts t + 2 + i.
They differ in names, in what they require, and in what they drop in silence. Letters: i head, j layer, n layers in all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from medusa_train.checkpoint.problems import Problems


@dataclass(frozen=True)
class Naming:
    """How a program names the tensors of one head."""

    block: str
    projection: str

    def block_name(self, head: int, layer: int, part: str) -> str:
        """Name of a block's "weight" or "bias"."""
        return self.block.format(i=head, j=layer, part=part)

    def projection_name(self, head: int, layers: int) -> str:
        """Name of a head's own projection, in a file whose heads have `layers` layers."""
        return self.projection.format(i=head, n=layers)


OURS = Naming("blocks.{i}.{j}.linear.{part}", "projections.{i}.weight")
FASTERDECODING = Naming("{i}.{j}.linear.{part}", "{i}.{n}.weight")
VLLM = Naming("blocks.{i}.layers.{j}.{part}", "lm_heads.{i}.weight")
MEDUSA_2 = Naming("medusa_head.{i}.{j}.linear.{part}", "medusa_head.{i}.{n}.weight")
MODELOPT = Naming("medusa_heads.{i}.{j}.linear.{part}", "medusa_heads.{i}.{n}.weight")

HEADS_SAFETENSORS = "medusa_lm_head.safetensors"
HEADS_PT = "medusa_lm_head.pt"
# vLLM's shared projection: one copy of the base's lm_head under this name.
VLLM_SHARED_PROJECTION = "lm_heads.0.weight"
TOKEN_MAP = "token_map"
# Prefixes of heads inside a whole-model folder (or a heads file that kept them).
PREFIXES = {"medusa_head.": "medusa-2", "medusa_heads.": "modelopt", "medusa_lm_head.": "fasterdecoding"}


@dataclass(frozen=True)
class Slot:
    """What one foreign tensor name stands for: a block's part, a head's projection (layer = n) or the token map."""

    layout: str
    kind: str
    head: int = 0
    layer: int = 0
    part: str = "weight"


_INDEX = r"(0|[1-9]\d*)"
_PATTERNS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("fasterdecoding", "block", re.compile(rf"{_INDEX}\.{_INDEX}\.linear\.(weight|bias)")),
    ("fasterdecoding", "projection", re.compile(rf"{_INDEX}\.{_INDEX}\.(weight|bias)")),
    ("vllm", "block", re.compile(rf"blocks\.{_INDEX}\.layers\.{_INDEX}\.(weight|bias)")),
    ("vllm", "projection", re.compile(rf"lm_heads\.{_INDEX}()\.(weight|bias)")),
)


def parse_name(name: str) -> Slot | None:
    """The slot of a foreign tensor name; None for a name that belongs to no head (a backbone's, or a stranger's)."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    bare = name[len(prefix) :]
    if bare == TOKEN_MAP:
        return Slot("vllm", "token_map")
    for layout, kind, pattern in _PATTERNS:
        if found := pattern.fullmatch(bare):
            layer = int(found[2]) if found[2] else -1
            return Slot(
                PREFIXES[prefix] if prefix and layout != "vllm" else layout, kind, int(found[1]), layer, found[3]
            )
    return None


@dataclass(frozen=True)
class ExportFormat:
    """What one program can hold, and how.

    Attributes:
        program: whom it is for.
        naming: tensor names; weights_file: the one file the heads go to (None: `hf-full` adds a shard to the model).
        shared: whether `shared` heads of so many layers stay shared; elsewhere they are expanded to `own`, losslessly.
        lm_head_copy: shared heads travel with one copy of the base's lm_head.
        reduced: why `reduced` heads cannot be held, and what to do, or None where they can.
        repeats_one_block: its loader builds `[block] * layers`, one block under several names.
        projection_bias: whether the projections may carry a bias.
        tree_file: name under which the tree goes along, or None.
        max_rank, max_depth, max_nodes: limits on that tree, or None.
    """

    name: str
    program: str
    naming: Naming
    weights_file: str | None
    shared: Callable[[int], bool]
    lm_head_copy: bool = False
    reduced: str | None = "train `own` heads (heads.contract: own), or `shared` ones, for this program"
    repeats_one_block: bool = False
    projection_bias: bool = False
    tree_file: str | None = None
    max_rank: int | None = None
    max_depth: int | None = None
    max_nodes: int | None = None


FORMATS: dict[str, ExportFormat] = {
    form.name: form
    for form in (
        ExportFormat("medusa", "medusa-train itself", OURS, None, lambda _: True, reduced=None, projection_bias=True),
        # One folder serves both: vLLM remaps FasterDecoding's names from 0.25.0 on, TGI knows only those.
        ExportFormat(
            "vllm", "vLLM 0.25 - 0.32", FASTERDECODING, HEADS_SAFETENSORS, lambda layers: layers == 1, lm_head_copy=True
        ),
        ExportFormat(
            "tgi",
            "Text Generation Inference",
            FASTERDECODING,
            HEADS_SAFETENSORS,
            lambda layers: layers == 1,
            lm_head_copy=True,
        ),
        ExportFormat(
            "trtllm",
            "TensorRT-LLM up to 1.2.1",
            FASTERDECODING,
            HEADS_SAFETENSORS,
            lambda _: False,
            tree_file="medusa_choices.json",
            max_rank=15,
            max_depth=16,
            max_nodes=63,
        ),
        ExportFormat(
            "fasterdecoding",
            "FasterDecoding/Medusa",
            FASTERDECODING,
            HEADS_SAFETENSORS,
            lambda _: True,
            repeats_one_block=True,
            tree_file="medusa_choices.json",
        ),
        ExportFormat("hf-full", "Medusa-2 model folders", MEDUSA_2, None, lambda _: False),
    )
}


def config_for(
    form: ExportFormat, *, heads: int, layers: int, hidden_size: int, vocab_size: int, shared: bool, base: str
) -> dict[str, Any]:
    """The `config.json` of a heads folder, exactly the keys its readers want.

    vLLM: without `medusa_fc_bias` every bias is dropped in silence, `hidden_size` and `vocab_size` have wrong defaults,
    and any further key with "num" and "heads" or "layers" in it would overwrite a count. TGI: an `architectures` key
    switches the heads off. So nothing is added here "for completeness".
    """
    config: dict[str, Any] = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": base}
    if form.name != "fasterdecoding":
        config = {
            "model_type": "medusa",
            "medusa_num_heads": heads,
            "medusa_num_layers": layers,
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "medusa_fc_bias": True,
            "base_model_name_or_path": base,
        }
        if shared:
            config["original_lm_head"] = True
    if shared:
        config["version"] = "2"  # FasterDecoding's word for a shared projection, not for Medusa-2
    return config


def counts_claimed(config: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """What a foreign config says of the heads: config key -> (which of "heads", "layers", "hidden", "vocab"; value).

    Where the config is a whole model's, only the Medusa keys count: its own head and layer counts mean attention.
    """
    claims: dict[str, tuple[str, Any]] = {}
    for where, part in (
        ("", config),
        ("medusa.", config.get("medusa")),
        ("medusa_config.", config.get("medusa_config")),
    ):
        if isinstance(part, dict):
            for key, quantity in (("medusa_num_heads", "heads"), ("medusa_num_layers", "layers")):
                if key in part:
                    claims[where + key] = (quantity, part[key])
    if config.get("model_type") == "medusa":
        keys = {"num_heads": "heads", "num_hidden_layers": "layers", "hidden_size": "hidden", "vocab_size": "vocab"}
        claims |= {key: (quantity, config[key]) for key, quantity in keys.items() if key in config}
    return {key: claim for key, claim in claims.items() if type(claim[1]) is int}


def check_tree_limits(form: ExportFormat, paths: list[list[int]], problems: Problems) -> None:
    """Notes where a tree is beyond what the program takes (its defaults at build time)."""
    if form.tree_file is None:
        return
    fix = "search a smaller tree (`medusa-train tree --nodes N`), or export with --no-tree"
    if form.max_nodes is not None and len(paths) > form.max_nodes:
        problems.add("tree", "tree.json", f"{len(paths)} nodes, {form.program} takes {form.max_nodes}", fix)
    for path in paths:
        if form.max_depth is not None and len(path) > form.max_depth:
            problems.add(
                "tree", "tree.json", f"path {path} is {len(path)} deep, {form.program} takes {form.max_depth}", fix
            )
        if form.max_rank is not None and max(path) > form.max_rank:
            problems.add(
                "tree", "tree.json", f"path {path} has rank {max(path)}, {form.program} takes 0..{form.max_rank}", fix
            )
