"""Small tokenizers of the three kinds that chat models have, and each token's bytes read from the vocabulary."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.dataset.families import FAMILIES, Family

KINDS = ("byte-level", "byte-level-straddling", "sentencepiece-legacy", "sentencepiece-first")

CORPUS = [
    "[INST] hello [/INST] hello there </s> USER: how are you ASSISTANT: fine, thanks",
    "user\nhello\nassistant\nhello there, how are you? system\nYou are helpful. model\n",
    "User: hi\n\nAssistant: hi there\n\nThe sky is blue. The sky is blue because of light.",
    "] hello] the]the: hello: the:the\nhello\nthe <think>\n\n</think>\n\n the answer",
] * 4


# How Llama-3 and Qwen cut text before merging.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bytes_to_unicode() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {byte: chr(byte) for byte in printable}, 0
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


BYTE_OF = {character: byte for byte, character in _bytes_to_unicode().items()}


def _byte_level(straddling: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Without the word pattern merges run across spaces, brackets and line ends: borders get straddled.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if not straddling:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(WORDS), "isolated"), tokenizer.pre_tokenizer]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentencepiece(first_only: bool) -> Tokenizer:
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=["<unk>", *alphabet], show_progress=False)
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)|\n"), "isolated")
    learner.train_from_iterator(CORPUS, trainer)
    import json

    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learned["merges"]]
    model = models.BPE(vocab=learned["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    if first_only:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@functools.cache
def made_base(family_name: str, kind: str) -> SimpleNamespace:
    """What rows are rendered with: tokenizer, chat_template, name. Its special tokens are the family's."""
    return base_for(FAMILIES[family_name], family_name, kind)


def base_for(family: Family, name: str, kind: str) -> SimpleNamespace:
    raw = _byte_level("straddling" in kind) if kind.startswith("byte") else _sentencepiece(kind.endswith("first"))
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=family.bos, eos_token=family.eos)
    tokenizer.chat_template = family.template
    return SimpleNamespace(
        tokenizer=tokenizer, chat_template=family.template, name=name, template_hash=name, folder=None, revision=None
    )


def token_bytes(base: SimpleNamespace, kind: str, token_id: int) -> tuple[bytes, bool]:
    """A token's bytes, and whether it is a special token, from the vocabulary alone."""
    token = base.tokenizer.convert_ids_to_tokens(int(token_id))
    added = base.tokenizer.added_tokens_decoder
    if int(token_id) in added and added[int(token_id)].special and not token.startswith("<0x"):
        return token.encode(), True
    if kind.startswith("byte"):
        return bytes(BYTE_OF[character] for character in token), False
    if token.startswith("<0x") and token.endswith(">") and len(token) == 6:
        return bytes([int(token[3:5], 16)]), False
    return token.replace("▁", " ").encode(), False
