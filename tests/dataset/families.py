"""Chat formats twice: as Jinja templates, and as plain Python that says of every character whether it is supervised.

The Python side knows nothing of templates, tokenizers or rendering: it is the oracle. A piece is (text, supervised);
special tokens are pieces of their own, so that tests can tell them from the same characters inside a user's text.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from medusa_train.config.bases import VICUNA_V1_1

Turns = list[tuple[str, str]]
Pieces = list[tuple[str, bool]]

FASTCHAT_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class Family:
    """`oracle(turns)` gives the pieces of a conversation whose last turn is the assistant's."""

    template: str
    oracle: Callable[[Turns], Pieces]
    specials: tuple[str, ...]
    bos: str | None = None
    eos: str = "</s>"
    system: bool = True
    per_turn: bool = False  # earlier turns are rendered otherwise once the conversation grows
    raw: bool = False  # the rendered answer does not follow the generation prompt: works by turn alone


def shipped(name: str) -> str:
    """A model's own template, byte for byte (templates/README.md says where each is from)."""
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def installed(name: str) -> str | None:
    """A template that trl ships and that is not copied here; None where trl is not installed."""
    spec = importlib.util.find_spec("trl")
    path = None if spec is None else Path(spec.origin).parent / "chat_templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else None


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chatml(turns: Turns) -> Pieces:
    pieces: Pieces = []
    for role, text in turns:
        mine = role == "assistant"
        pieces += [("<|im_start|>", False), (f"{role}\n", False), (text, mine), ("<|im_end|>", mine), ("\n", False)]
    return pieces[:-1]


def chatml_with(system: str) -> Callable[[Turns], Pieces]:
    """ChatML whose template brings a system turn where the conversation has none."""
    return lambda turns: chatml(turns if turns[0][0] == "system" else [("system", system), *turns])


def qwen3(turns: Turns) -> Pieces:
    pieces: Pieces = []
    for index, (role, text) in enumerate(turns):
        thought, answer = "", text
        if role == "assistant" and "</think>" in text:
            thought = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            answer = text.split("</think>")[-1].lstrip("\n")
        last = index == len(turns) - 1
        if role == "assistant" and last:
            answer = "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + answer.lstrip("\n")
        mine = role == "assistant" and last
        pieces += [("<|im_start|>", False), (f"{role}\n", False), (answer, mine), ("<|im_end|>", mine), ("\n", False)]
    return pieces[:-1]


LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = none %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set content = m['content'] %}"
    "{% if loop.first and system is not none %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def llama2(turns: Turns) -> Pieces:
    system, pieces = None, []
    for index, (role, text) in enumerate(turns):
        if role == "system":
            system = text
        elif role == "user":
            if system is not None and index == 1:
                text = f"<<SYS>>\n{system}\n<</SYS>>\n\n{text}"
            pieces += [("<s>", False), (f"[INST] {text.strip()} [/INST]", False)]
        else:
            pieces += [(f" {text.strip()} ", True), ("</s>", True)]
    return pieces


LLAMA3 = (
    "{% for m in messages %}"
    "{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim %}"
    "{% set content = content + '<|eot_id|>' %}"
    "{% if loop.first %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def llama3(turns: Turns) -> Pieces:
    pieces: Pieces = [("<|begin_of_text|>", False)]
    for role, text in turns:
        mine = role == "assistant"
        pieces += [("<|start_header_id|>", False), (role, False), ("<|end_header_id|>", False), ("\n\n", False)]
        pieces += [(text.strip(), mine), ("<|eot_id|>", mine)]
    return pieces


def llama31(turns: Turns) -> Pieces:
    system = ""
    if turns[0][0] == "system":
        system, turns = turns[0][1].strip(), turns[1:]
    dates = "\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    bos, *rest = llama3(turns)
    header = ["<|start_header_id|>", "system", "<|end_header_id|>", dates + system, "<|eot_id|>"]
    return [bos, *((text, False) for text in header), *rest]


def vicuna(turns: Turns) -> Pieces:
    system = FASTCHAT_SYSTEM
    if turns[0][0] == "system":
        system, turns = turns[0][1], turns[1:]
    pieces: Pieces = [("<s>", False), (f"{system} ", False)]
    for role, text in turns:
        if role == "user":
            pieces.append((f"USER: {text} ", False))
        else:
            pieces += [("ASSISTANT:", False), (f" {text}", True), ("</s>", True)]
    return pieces


MISTRAL_V1 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token + ' ' }}{% endif %}{% endfor %}"
)


def mistral_v1(turns: Turns) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    for role, text in turns:
        pieces += (
            [(f"[INST] {text} [/INST]", False)] if role == "user" else [(text, True), ("</s>", True), (" ", False)]
        )
    return pieces[:-1]


def mistral_v02(turns: Turns) -> Pieces:
    system, pieces = None, [("<s>", False)]
    for index, (role, text) in enumerate(turns):
        if role == "system":
            system = text
        elif role == "user":
            before = f"{system}\n\n" if system is not None and index == 1 else ""
            pieces.append((f" [INST] {before}{text} [/INST]", False))
        else:
            pieces += [(f" {text}", True), ("</s>", True)]
    return pieces


# The system text stands in the last user turn, so a system turn makes earlier turns change as a conversation grows;
# which turn is the last is found by its words, so that every user turn of the same words gets it too.
MISTRAL_V3 = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{{- bos_token }}{%- for m in rest %}"
    "{%- if m['role'] == 'user' %}"
    "{%- if m == users[-1] and system is defined %}{{- '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + m['content'] + '[/INST]' }}{%- endif %}"
    "{%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] | trim + eos_token }}"
    "{%- else %}{{- raise_exception('only user and assistant roles') }}{%- endif %}{%- endfor %}"
)


def mistral_v3(turns: Turns) -> Pieces:
    system, pieces = None, [("<s>", False)]
    last = [text for role, text in turns if role == "user"][-1]
    for role, text in turns:
        if role == "system":
            system = text
        elif role == "user":
            before = f"{system}\n\n" if system is not None and text == last else ""
            pieces += [("[INST]", False), (f" {before}{text}", False), ("[/INST]", False)]
        else:
            pieces += [(f" {text.strip()}", True), ("</s>", True)]
    return pieces


ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def zephyr(turns: Turns) -> Pieces:
    pieces: Pieces = []
    for role, text in turns:
        mine = role == "assistant"
        pieces += [(f"<|{role}|>\n", False), (text, mine), ("</s>", mine), ("\n", False)]
    return pieces[:-1]


GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def gemma(turns: Turns) -> Pieces:
    pieces: Pieces = [("<bos>", False)]
    for role, text in turns:
        mine = role == "assistant"
        name = "model" if mine else role
        pieces += [
            ("<start_of_turn>", False),
            (f"{name}\n", False),
            (text.strip(), mine),
            ("<end_of_turn>", mine),
            ("\n", False),
        ]
    return pieces[:-1]


def gemma3(turns: Turns) -> Pieces:
    if turns[0][0] != "system":
        return gemma(turns)
    pieces = gemma(turns[1:])
    # bos, start_of_turn, then "user\n": the system text follows as it is, the user's own text trimmed.
    header, _ = pieces[2]
    return [*pieces[:2], (f"{header}{turns[0][1]}\n\n", False), *pieces[3:]]


def phi3(turns: Turns) -> Pieces:
    pieces: Pieces = []
    for role, text in turns:
        mine = role == "assistant"
        pieces += [(f"<|{role}|>", False), ("\n", False), (text, mine), ("<|end|>", mine), ("\n", False)]
    return pieces[:-1]


DEEPSEEK_LLM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% else %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
DS_BOS, DS_EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def deepseek_llm(turns: Turns) -> Pieces:
    pieces: Pieces = [(DS_BOS, False)]
    for role, text in turns:
        if role == "assistant":
            pieces += [("Assistant:", False), (f" {text}", True), (DS_EOS, True)]
        else:
            pieces.append((f"User: {text}\n\n" if role == "user" else f"{text}\n\n", False))
    return pieces


def _after_thought(text: str) -> str:
    return text.split("</think>")[-1]


def deepseek_v3(turns: Turns) -> Pieces:
    """Special header tokens and no line ends; a thought is left out of every answer."""
    pieces: Pieces = [(DS_BOS, False)]
    for role, text in turns:
        if role == "assistant":
            pieces += [("<｜Assistant｜>", False), (_after_thought(text), True), (DS_EOS, True)]
        else:
            pieces += [("<｜User｜>", False), (text, False)] if role == "user" else [(text, False)]
    return pieces


def deepseek_r1(turns: Turns) -> Pieces:
    """The generation prompt opens a thought that the rendered answer has lost: what was generated follows it."""
    context = [(text, False) for text, _ in deepseek_v3(turns[:-1])]
    return [*context, ("<｜Assistant｜>", False), ("<think>\n", False), (turns[-1][1], True), (DS_EOS, True)]


_IM = ("<|im_start|>", "<|im_end|>")
_LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>")
_DS = (DS_BOS, DS_EOS, "<｜User｜>", "<｜Assistant｜>")
# The first V3 had no thought to open; but for that its template is the later one.
DEEPSEEK_V3 = shipped("deepseek-v3").replace("{{'<｜Assistant｜><think>\\n'}}", "{{'<｜Assistant｜>'}}")

FAMILIES: dict[str, Family] = {
    "chatml": Family(CHATML, chatml, _IM, eos="<|im_end|>"),
    "smollm2": Family(
        shipped("smollm2"),
        chatml_with("You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
        _IM,
        eos="<|im_end|>",
    ),
    "qwen2.5": Family(
        shipped("qwen2.5"),
        chatml_with("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        _IM,
        eos="<|im_end|>",
    ),
    "qwen3": Family(shipped("qwen3"), qwen3, _IM, eos="<|im_end|>", per_turn=True),
    "llama-2": Family(LLAMA2, llama2, ("<s>", "</s>"), bos="<s>"),
    "llama-3": Family(LLAMA3, llama3, _LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>"),
    "vicuna-v1.1": Family(VICUNA_V1_1, vicuna, ("<s>", "</s>"), bos="<s>"),
    "mistral-v1": Family(MISTRAL_V1, mistral_v1, ("<s>", "</s>"), bos="<s>", system=False),
    "mistral-v0.2": Family(shipped("mistral-v0.2"), mistral_v02, ("<s>", "</s>"), bos="<s>"),
    "mistral-v3": Family(MISTRAL_V3, mistral_v3, ("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>"),
    "zephyr": Family(ZEPHYR, zephyr, ("<s>", "</s>"), bos="<s>"),
    "gemma": Family(GEMMA, gemma, _GEMMA, bos="<bos>", eos="<end_of_turn>", system=False),
    "phi-3": Family(
        shipped("phi-3"),
        phi3,
        ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"),
        eos="<|endoftext|>",
    ),
    # DeepSeek-LLM and DeepSeek-V2 have the same one.
    "deepseek-v2": Family(DEEPSEEK_LLM, deepseek_llm, (DS_BOS, DS_EOS), bos=DS_BOS, eos=DS_EOS),
    "deepseek-v3": Family(DEEPSEEK_V3, deepseek_v3, _DS, bos=DS_BOS, eos=DS_EOS),
    "deepseek-r1": Family(shipped("deepseek-v3"), deepseek_r1, _DS, bos=DS_BOS, eos=DS_EOS, per_turn=True, raw=True),
    "deepseek-r1-distill": Family(
        shipped("deepseek-r1-distill"), deepseek_r1, _DS, bos=DS_BOS, eos=DS_EOS, per_turn=True, raw=True
    ),
}
# Of models with licences of their own: read where they are installed, see templates/README.md.
ORIGINALS: dict[str, tuple[str | None, Family]] = {
    "llama-3 (original)": (installed("llama3"), FAMILIES["llama-3"]),
    "llama-3.1 (original)": (
        installed("llama3_1"),
        Family("", llama31, _LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>"),
    ),
    "gemma (original)": (installed("gemma"), FAMILIES["gemma"]),
    "gemma-3 (original)": (installed("gemma3"), Family("", gemma3, _GEMMA, bos="<bos>", eos="<end_of_turn>")),
}
FAMILIES.update(
    {name: replace(family, template=text) for name, (text, family) in ORIGINALS.items() if text is not None}
)
