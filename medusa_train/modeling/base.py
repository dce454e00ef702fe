"""Loading a base: the backbone, its tokenizer, its chat template, and the hashes that heads are bound to."""

from __future__ import annotations

import functools
import pickle
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
        UserError: unknown base, dtype, device or quantization; missing library; weights that are missing, damaged,
            of another shape or not finite; a backbone that cannot be verified on.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from medusa_train.modeling.backbone import check_supported

    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}", allowed=", ".join(DTYPES))
    device = _checked_device(device)
    source = find_source(name, revision=revision)
    fields = _tokenizer_fields(source, chat_template, trust_remote_code)
    arguments: dict[str, Any] = {
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "trust_remote_code": trust_remote_code,
        "attn_implementation": attn_implementation or _attention_for(source.folder, trust_remote_code),
    }
    if quantization is not None:
        arguments |= {"quantization_config": _quantization_config(quantization)}
    if quantization is not None or torch.device(device).type != "cpu":
        # Shards go straight to the device: ranks of one machine must not each hold a whole copy in its memory first.
        arguments |= {"device_map": {"": device}}
    with waiting(f"loading {source.name}"), quiet_transformers():
        model = load_weights(AutoModelForCausalLM, source.folder, arguments)
    check_finite(model, str(source.folder))
    model = model.eval()
    check_supported(model)
    return Base(**fields, model=model, quantization=quantization)


def _checked_device(device: str | None) -> str:
    """The device asked for, or the first accelerator, else the CPU; said before anything is loaded."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"unknown device {device!r}", allowed="cpu, cuda, cuda:0, ...") from error
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"there is no device {device!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices",
            fix="use --device cpu, or install a driver and a torch build for CUDA",
        )
    return device


def load_weights(auto_class: Any, folder: Path, arguments: dict[str, Any]) -> PreTrainedModel:
    """The model of `folder`; transformers would fill in tensors that no file holds with random numbers.

    Raises:
        UserError: weights missing, damaged or of another shape.
    """
    from safetensors import SafetensorError

    damaged = "download or copy the weights again (a Git LFS pointer instead of a file: `git lfs pull`)"
    try:
        model, info = auto_class.from_pretrained(folder, output_loading_info=True, **arguments)
    except ImportError as error:  # flash attention, mostly: transformers looks for it here and not before
        raise UserError(
            f"a library is missing: {error}", where=str(folder), fix="install it, or take sdpa for attention"
        ) from error
    except SafetensorError as error:
        raise UserError(
            f"the weights are damaged{_damaged_files(folder)}: {error}", where=str(folder), fix=damaged
        ) from error
    except pickle.UnpicklingError as error:
        raise UserError(f"the weights are no torch file: {_one_line(error)}", where=str(folder), fix=damaged) from error
    except RuntimeError as error:
        import torch

        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise UserError(
            f"the weights do not fit config.json: {_one_line(error)}", where=str(folder), fix=damaged
        ) from error
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"the model cannot be loaded: {error}", where=str(folder)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{len(missing)} tensors of the model are in none of its weight files: {_some(missing)}",
            where=str(folder),
            fix=damaged,
        )
    return model


def _damaged_files(folder: Path) -> str:
    """Names the safetensors files that cannot be opened, as " (a, b)"; "" where each of them opens."""
    from safetensors import SafetensorError, safe_open

    bad = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError):
            bad.append(path.name)
    return f" ({', '.join(bad)})" if bad else ""


def check_finite(model: Any, where: str) -> None:
    """Refuses a model with NaN or infinite weights, naming the tensors.

    Raises:
        UserError: at least one tensor holds a number that is not finite.
    """
    # The extremes show any NaN and any infinity, in one pass and with no copy.
    bad = [
        name
        for name, tensor in model.named_parameters()
        if tensor.is_floating_point()
        and tensor.itemsize > 1  # fp8 has no extremes
        and tensor.numel()
        and not tensor.is_meta
        and not all(bool(extreme.isfinite()) for extreme in tensor.detach().aminmax())
    ]
    if bad:
        raise UserError(
            f"{len(bad)} tensors of the model hold NaN or infinite numbers: {_some(bad)}",
            where=where,
            fix="download or copy the weights again, or use the base before it was damaged",
        )


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


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
