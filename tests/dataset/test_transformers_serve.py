"""`--backend server` against transformers' own server with a tiny model, where its extras are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from medusa_train.dataset.distill import DistillSettings
from medusa_train.dataset.job import ServerOptions, distill
from medusa_train.dataset.journal import journal_records, rows_of_record
from medusa_train.modeling.base import load_base, load_tokenizer
from tests.dataset.test_reading import write
from tests.tiny import save_tiny_base

PROGRAM = Path(sys.executable).with_name("transformers")
MISSING = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING) or not PROGRAM.exists(), reason=f"transformers serve needs {MISSING or PROGRAM}")
def test_transformers_serve(tmp_path: Path) -> None:
    """What the server says greedily is what the model says here, row for row, in text."""
    folder = save_tiny_base(tmp_path / "base")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(PROGRAM), "serve", str(folder), "--port", str(port), "--device", "cpu"]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", server, tmp_path / "log")
        rows = [{"prompt": f"Write {n} things.", "id": str(n)} for n in range(12)]
        prompts = str(write(tmp_path / "p.jsonl", *rows))
        settings = DistillSettings(max_new_tokens=12)
        options = ServerOptions([url], str(folder), concurrency=2, timeout=60.0)
        distill(
            base=load_tokenizer(str(folder)),
            prompts=[prompts],
            out=str(tmp_path / "served"),
            settings=settings,
            server=options,
        )
    finally:
        server.terminate()
        server.wait(20)
    base = load_base(str(folder), device="cpu")
    distill(base=base, prompts=[prompts], out=str(tmp_path / "here"), settings=settings)
    served, here = texts(tmp_path / "served"), texts(tmp_path / "here")
    assert served.keys() == here.keys() and len(served) == 12
    assert served == here
    for _, record in journal_records(tmp_path / "served"):
        (row,) = rows_of_record(record)
        assert row.loss_mask.any() and not record["ids_exact"]
    shutil.rmtree(folder)


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


def texts(folder: Path) -> dict[str, str]:
    return {record["prompt_id"]: record["messages"][1]["content"] for _, record in journal_records(folder)}
