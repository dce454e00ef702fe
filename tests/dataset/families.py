"""Chat formats twice: as Jinja templates, and as plain Python that says of every character whether it is supervised.

The Python side knows nothing of templates, tokenizers or rendering: it is the oracle. A piece is (text, supervised);
special tokens are pieces of their own, so that tests can tell them from the same characters inside a user's text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


QWEN25 = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
    "You are a helpful assistant.<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def qwen25(turns: Turns) -> Pieces:
    if turns[0][0] != "system":
        turns = [("system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."), *turns]
    return chatml(turns)


QWEN3 = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- else %}"
    "{%- set content = m.content %}{%- set reasoning = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)


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


MISTRAL_V3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)


def mistral_v3(turns: Turns) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    for role, text in turns:
        if role == "user":
            pieces += [("[INST]", False), (f" {text}", False), ("[/INST]", False)]
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


PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


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


# The reasoning model's: the generation prompt opens a thought that the rendered answer has lost.
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + eos_token }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

_IM = ("<|im_start|>", "<|im_end|>")
FAMILIES: dict[str, Family] = {
    "chatml": Family(CHATML, chatml, _IM, eos="<|im_end|>"),
    "qwen2.5": Family(QWEN25, qwen25, _IM, eos="<|im_end|>"),
    "qwen3": Family(QWEN3, qwen3, _IM, eos="<|im_end|>", per_turn=True),
    "llama-2": Family(LLAMA2, llama2, ("<s>", "</s>"), bos="<s>"),
    "llama-3": Family(
        LLAMA3,
        llama3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "vicuna-v1.1": Family(VICUNA_V1_1, vicuna, ("<s>", "</s>"), bos="<s>"),
    "mistral-v1": Family(MISTRAL_V1, mistral_v1, ("<s>", "</s>"), bos="<s>", system=False),
    "mistral-v3": Family(MISTRAL_V3, mistral_v3, ("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>", system=False),
    "zephyr": Family(ZEPHYR, zephyr, ("<s>", "</s>"), bos="<s>"),
    "gemma": Family(
        GEMMA, gemma, ("<bos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>", eos="<end_of_turn>", system=False
    ),
    "phi-3": Family(
        PHI3,
        phi3,
        ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"),
        eos="<|endoftext|>",
    ),
    "deepseek-llm": Family(DEEPSEEK_LLM, deepseek_llm, (DS_BOS, DS_EOS), bos=DS_BOS, eos=DS_EOS),
}
