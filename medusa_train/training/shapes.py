"""The shape of a backbone, for planning before anything is downloaded.

From a local config where there is one, else from a small table of the aliases' models, else from the hub's config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from medusa_train.config.bases import BASES
from medusa_train.errors import UserError


@dataclass(frozen=True)
class BackboneShape:
    """What decides a decoder's parameters, FLOPs and memory.

    Attributes:
        hidden D, layers, heads, kv_heads, head_dim, intermediate (of a gated MLP with three products), vocab V,
        tied (lm_head is the embedding), max_positions.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    max_positions: int = 4096

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's products: q, k, v, o and the three of the MLP (norms are not counted)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Weights of the whole model, norms left out."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings

    def decoder_flops(self, tokens: int, context: int) -> int:
        """2 per multiply-add of the layers over `tokens` tokens that each see `context` others; lm_head not counted."""
        products = 2 * self.layers * self.layer_parameters
        attention = 2 * 2 * self.layers * self.heads * self.head_dim * context
        return tokens * (products + attention)


KNOWN: dict[str, BackboneShape] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": BackboneShape(576, 30, 9, 3, 64, 1536, 49152, True, 8192),
    "HuggingFaceTB/SmolLM2-360M-Instruct": BackboneShape(960, 32, 15, 5, 64, 2560, 49152, True, 8192),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": BackboneShape(2048, 24, 32, 32, 64, 8192, 49152, True, 8192),
    "lmsys/vicuna-7b-v1.3": BackboneShape(4096, 32, 32, 32, 128, 11008, 32000, False, 2048),
    "lmsys/vicuna-13b-v1.3": BackboneShape(5120, 40, 40, 40, 128, 13824, 32000, False, 2048),
    "lmsys/vicuna-33b-v1.3": BackboneShape(6656, 60, 52, 52, 128, 17920, 32000, False, 2048),
    "HuggingFaceH4/zephyr-7b-beta": BackboneShape(4096, 32, 32, 8, 128, 14336, 32000, False, 32768),
    "mistralai/Mistral-7B-Instruct-v0.3": BackboneShape(4096, 32, 32, 8, 128, 14336, 32768, False, 32768),
    "meta-llama/Llama-3.1-8B-Instruct": BackboneShape(4096, 32, 32, 8, 128, 14336, 128256, False, 131072),
    "Qwen/Qwen2.5-7B-Instruct": BackboneShape(3584, 28, 28, 4, 128, 18944, 152064, False, 32768),
    "Qwen/Qwen3-8B": BackboneShape(4096, 36, 32, 8, 128, 12288, 151936, False, 40960),
}


def shape_of(name: str, revision: str | None = None, trust_remote_code: bool = False) -> BackboneShape:
    """The shape of base `name`.

    Raises:
        UserError: no such base, or a config without the usual sizes.
    """
    alias = BASES.get(name.lower())
    repo = alias.repo_id if alias else name
    if repo in KNOWN and revision is None:
        return KNOWN[repo]
    from transformers import AutoConfig

    from medusa_train.modeling.sources import find_source

    folder = find_source(name, revision=revision, weights=False).folder
    return shape_from_config(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code), name)


def shape_from_config(config: Any, name: str = "the base") -> BackboneShape:
    """A shape from a transformers config."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    if heads is None or hidden is None:
        raise UserError(f"the config of {name} has no hidden_size or num_attention_heads", fix="it cannot be planned")
    return BackboneShape(
        hidden=hidden,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        intermediate=getattr(text, "intermediate_size", None) or 4 * hidden,
        vocab=text.vocab_size,
        tied=bool(getattr(text, "tie_word_embeddings", False) or getattr(config, "tie_word_embeddings", False)),
        max_positions=getattr(text, "max_position_embeddings", None) or 2048,
    )
