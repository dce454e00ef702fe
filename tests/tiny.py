"""Tiny random models of several families, and tokenizers, made on the spot: no download, milliseconds each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. A user asks and the assistant answers.",
    "Write a list of three things: apples, pears and plums. user assistant system",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3",
    "Explain why the sky is blue in two sentences, please. Räksmörgås 日本 🙂",
]

_SMALL = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)

# family -> (model_type, config arguments); head_dim differs from hidden/heads where the family allows it.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", dict(_SMALL, tie_word_embeddings=False)),
    "llama-tied": ("llama", dict(_SMALL, tie_word_embeddings=True)),
    "mistral": ("mistral", dict(_SMALL, sliding_window=24, head_dim=8)),
    "qwen2": (
        "qwen2",
        dict(_SMALL, use_sliding_window=True, sliding_window=24, max_window_layers=1, layer_types=None),
    ),
    "qwen3": ("qwen3", dict(_SMALL, head_dim=16, tie_word_embeddings=True)),
    "gemma2": (
        "gemma2",
        dict(_SMALL, head_dim=16, sliding_window=24, final_logit_softcapping=30.0, attn_logit_softcapping=50.0),
    ),
    "gemma3": ("gemma3_text", dict(_SMALL, head_dim=16, sliding_window=24, sliding_window_pattern=2)),
    "phi3": ("phi3", dict(_SMALL)),
    "phi": ("phi", dict(_SMALL)),
    "gpt_neox": ("gpt_neox", {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}),
    "gpt2": ("gpt2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=512)),
    "mixtral": ("mixtral", dict(_SMALL, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": (
        "qwen3_moe",
        dict(_SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    ),
    "granite": ("granite", dict(_SMALL, logits_scaling=2.0)),
}


def tiny_model(
    family: str = "llama",
    vocab_size: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Any:
    """A random causal language model of `family` in eval mode, its weights large enough for varied argmaxes."""
    model_type, arguments = FAMILIES[family]
    arguments = {
        **dict(vocab_size=vocab_size, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.4),
        **arguments,
        **overrides,
    }
    config = AutoConfig.for_model(model_type, **arguments)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager" if family == "gemma2" else "sdpa"
    )
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model.eval()


def tiny_tokenizer(vocab_size: int = 400, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML's special tokens, trained on a few sentences; pad is eos, as often."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny_base(
    folder: Path, family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """A whole base on disk (model, tokenizer with chat template); returns its folder."""
    tokenizer = tiny_tokenizer()
    vocab_size = overrides.pop("vocab_size", len(tokenizer))
    model = tiny_model(family, vocab_size=vocab_size, seed=seed, dtype=dtype, **overrides)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
