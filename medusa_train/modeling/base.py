"""Loading a base: the backbone, its tokenizer, its chat template, and the hashes that heads are bound to."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_train.console import waiting
from medusa_train.errors import UserError
from medusa_train.modeling.fingerprint import fingerprint_folder
from medusa_train.modeling.sources import Source, find_source, quiet_transformers
from medusa_train.provenance import sha256_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class BaseTokenizer:
    """A base's tokenizer with its chat template; what rows and prompts are rendered with.

    Attributes:
        name: hub id or folder, aliases resolved.
        folder: where the files lie.
        chat_template: Jinja text, set on `tokenizer` too.
        template_hash: sha256 of that text.
    """

    name: str
    folder: Path
    revision: str | None
    tokenizer: PreTrainedTokenizerBase
    chat_template: str
    template_hash: str


@dataclass(frozen=True)
class Base(BaseTokenizer):
    """A loaded backbone and everything that names it."""

    model: PreTrainedModel
    quantization: str | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of config, tokenizer and weights as they lie on disk (`fingerprint_folder`)."""
        return fingerprint_folder(self.folder)


def load_tokenizer(
    name: str, *, revision: str | None = None, chat_template: str | None = None, trust_remote_code: bool = False
) -> BaseTokenizer:
    """Loads tokenizer and chat template of base `name`, no weights.

    Args:
        chat_template: Jinja text, or the path of a file with it, in place of the tokenizer's own.
    """
    source = find_source(name, revision=revision, weights=False)
    return BaseTokenizer(**_tokenizer_fields(source, chat_template, trust_remote_code))


def load_base(
    name: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    quantization: str | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Base:
    """Loads base `name` in eval mode.

    Args:
        dtype: auto (as stored), bfloat16, float16 or float32.
        device: torch device; the first accelerator by default, else the CPU.
        quantization: None, "8bit" or "4bit" (bitsandbytes).
        attn_implementation: transformers' name (sdpa, eager, flash_attention_2, ...); its default where None.

    Raises:
        UserError: unknown base, dtype or quantization; missing library; a backbone that cannot be verified on.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from medusa_train.modeling.backbone import check_supported

    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}", allowed=", ".join(DTYPES))
    source = find_source(name, revision=revision)
    fields = _tokenizer_fields(source, chat_template, trust_remote_code)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments: dict[str, Any] = {
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "trust_remote_code": trust_remote_code,
        "attn_implementation": attn_implementation or _attention_for(source.folder, trust_remote_code),
    }
    if quantization is not None:
        arguments |= {"quantization_config": _quantization_config(quantization), "device_map": {"": device}}
    with waiting(f"loading {source.name}"), quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_pretrained(source.folder, **arguments)
        except ImportError as error:  # flash attention, mostly: transformers looks for it here and not before
            raise UserError(
                f"a library is missing: {error}", where=str(source.folder), fix="install it, or take sdpa for attention"
            ) from error
        except (ValueError, OSError, KeyError) as error:
            raise UserError(f"the model cannot be loaded: {error}", where=str(source.folder)) from error
    if quantization is None:
        model = model.to(device)
    model = model.eval()
    check_supported(model)
    return Base(**fields, model=model, quantization=quantization)


def _tokenizer_fields(source: Source, chat_template: str | None, trust_remote_code: bool) -> dict[str, Any]:
    from transformers import AutoTokenizer

    with waiting(f"loading the tokenizer of {source.name}"), quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
        except (ValueError, OSError, KeyError) as error:
            raise UserError(f"the tokenizer cannot be loaded: {error}", where=str(source.folder)) from error
    template = _template_text(chat_template) or source.chat_template or tokenizer.chat_template
    if not isinstance(template, str):
        raise UserError(
            f"the tokenizer of {source.name} has {'no chat template' if not template else 'several chat templates'}",
            fix="give one with --chat-template FILE (Jinja, as transformers uses it)",
        )
    tokenizer.chat_template = template
    return {
        "name": source.name,
        "folder": source.folder,
        "revision": source.revision,
        "tokenizer": tokenizer,
        "chat_template": template,
        "template_hash": sha256_bytes(template.encode()),
    }


def _template_text(given: str | None) -> str | None:
    if given is None:
        return None
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the chat template cannot be read: {error}", where=given) from error


def _attention_for(folder: Path, trust_remote_code: bool) -> str | None:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"config.json cannot be understood: {error}", where=str(folder)) from error
    # sdpa has no soft-cap inside attention and says so only at the first forward.
    softcap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return None if softcap is None else "eager"


def _quantization_config(kind: str) -> Any:
    import importlib.util

    import torch
    from transformers import BitsAndBytesConfig

    if kind not in ("8bit", "4bit"):
        raise UserError(f"unknown quantization {kind!r}", allowed="8bit, 4bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{kind} needs bitsandbytes", fix="pip install 'medusa-train[quant]'")
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
