"""Runs inside vLLM's own environment (never inside ours): generates greedily, with or without exported heads.

Usage: python vllm_program.py JOB.json OUT.json   where JOB holds base, heads (folder or null), num_heads, prompts
(token ids), max_tokens, dtype, hidden (safetensors with `hidden` [M, D], or null). OUT gets token ids, vLLM's own
counters, and with heads: which parameters of the loaded module differ from the file, and its logits, in
OUT.json.safetensors.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the module must be within reach
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams


def engine(job: dict) -> LLM:
    arguments = {
        "model": job["base"],
        "dtype": job["dtype"],
        "enforce_eager": True,
        "max_model_len": job["max_model_len"],
        "max_num_seqs": job.get("max_num_seqs", 1),
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if job["heads"]:
        arguments["speculative_config"] = {
            "method": "medusa",
            "model": job["heads"],
            "num_speculative_tokens": job["num_heads"],
        }
    return LLM(**arguments)


def look_inside(worker: object, job: dict) -> dict:
    """Compares the loaded module with the file, tensor by tensor, and runs it on the given hidden rows."""
    model = worker.model_runner.drafter.model
    file = load_file(os.path.join(job["heads"], "medusa_lm_head.safetensors"))
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    consumed, different = set(), []
    for original, tensor in file.items():
        name = model._remap_old_checkpoint_key(original)
        if name not in parameters and name == "lm_heads.0.weight":
            name = "lm_head.weight"
        if name not in parameters:
            continue
        consumed.add(original)
        rows = parameters.pop(name)[: tensor.shape[0]].cpu().float()  # vLLM pads the vocabulary
        if not torch.equal(rows, tensor.to(rows.dtype).float()):
            different.append(original)
    found = {"unused": sorted(set(file) - consumed), "unfilled": sorted(parameters), "different": different}
    if job["hidden"]:
        hidden = load_file(job["hidden"])["hidden"].to(next(model.parameters()).dtype)
        with torch.inference_mode():
            found["logits"] = torch.stack(model.compute_logits(model(hidden))).float().cpu()
    return found


def main() -> None:
    with open(sys.argv[1]) as handle:
        job = json.load(handle)
    llm = engine(job)
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], detokenize=False)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    result = {"ids": [list(answer.outputs[0].token_ids) for answer in answers], "counters": {}}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            result["counters"][metric.name] = getattr(metric, "values", None) or getattr(metric, "value", None)
    if job["heads"]:
        inside = llm.collective_rpc(look_inside, args=(job,))[0]
        logits = inside.pop("logits", None)
        result |= inside
        if logits is not None:
            save_file({"logits": logits.contiguous()}, sys.argv[2] + ".safetensors")
    with open(sys.argv[2], "w") as handle:
        json.dump(result, handle)


if __name__ == "__main__":
    main()
