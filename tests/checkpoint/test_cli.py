"""The commands `export` and `import` as a person runs them; the hub is a small server that speaks its protocol."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from medusa_train.checkpoint import load_checkpoint
from medusa_train.checkpoint.card import render_card
from medusa_train.cli.app import main
from tests.checkpoint.support import save_toy

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """The program in this process: the same `main`, without paying for torch's import each time."""

    def call(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["medusa-train", *words])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        return Done(int(stopped.value.code or 0), *capsys.readouterr())

    return call


def run_apart(*words: str, **environment: str) -> subprocess.CompletedProcess:
    """The program in a process of its own: the hub's address is read when its client is imported."""
    command = [sys.executable, "-m", "medusa_train", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)


REPORT = {
    "kind": "medusa-train.acceptance",
    "suite": {"name": "heldout", "used": 24},
    "setup": {"max_new_tokens": 96, "dtype": "bfloat16", "device": "cpu", "base_fingerprint": "f" * 64},
    "arms": [
        {
            "name": "tree",
            "mode": "greedy",
            "tree": {"nodes": 15},
            "tokens_per_round": {"value": 1.8125, "low": 1.7, "high": 1.9},
            "speed": {"measured_speedup": {"value": 1.3, "low": 1.2, "high": 1.4}},
            "exactness": {"checked": True, "identical": 23, "prompts": 24},
            "head_accuracy": [{"head": 0, "offset": 2, "accuracy": [0.51, 0.1, None]}],
        }
    ],
}


def test_import_then_export_then_card(tmp_path: Path, run) -> None:
    folder = save_toy(tmp_path / "heads")
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    done = run(
        "export",
        str(folder),
        "--format",
        "vllm",
        "--out",
        str(tmp_path / "out"),
        "--report",
        str(tmp_path / "report.json"),
    )
    assert done.returncode == 0, done.stderr
    assert "medusa_lm_head.safetensors" in done.stdout
    card = (tmp_path / "out" / "README.md").read_text()
    assert "1.81 (1.70 - 1.90)" in card and "1.30x (1.20 - 1.40)" in card and "23 of 24" in card and "51.0 %" in card
    assert (
        '"num_speculative_tokens": 2' in card
        and "toy/base" in card
        and "d" * 64 in card
        and "medusa_num_heads: 2" in card
    )
    front = card.split("---")[1]
    assert "base_model: toy/base" in front and "library_name: medusa-train" in front


def test_tree_out(tmp_path: Path, run) -> None:
    folder = save_toy(tmp_path / "heads")
    done = run("export", str(folder), "--tree", str(tmp_path / "choices.json"))
    assert done.returncode == 0 and json.loads((tmp_path / "choices.json").read_text()) == [[0], [1], [0, 0]]
    done = run("export", str(save_toy(tmp_path / "bare", tree=None)), "--tree", str(tmp_path / "x.json"))
    assert done.returncode == 2 and "holds no tree" in done.stderr and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "HEADS"], "nothing to write"),
        (["export", "HEADS", "--format", "vllm", "--out", "HEADS/config.json"], "a file stands there"),
        (["export", "missing", "--out", "x"], "no checkpoint there"),
        (["import", "missing", "--out", "x"], "nothing there to import"),
        (["export", "HEADS", "--out", "OUT", "--report", "HEADS/config.json"], "not an acceptance report"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(tmp_path: Path, run, words: list[str], message: str) -> None:
    folder = save_toy(tmp_path / "heads")
    done = run(*(word.replace("HEADS", str(folder)).replace("OUT", str(tmp_path / "out")) for word in words))
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    load_checkpoint(folder, verify="hashes")


def test_card_says_how_the_changed_backbone_travels(tmp_path: Path) -> None:
    """`export --backbone merged` writes a whole model; the card told of an adapter, and served the bare base."""
    manifest = load_checkpoint(save_toy(tmp_path / "heads")).manifest
    entry = manifest.backbone.model_copy(update={"changed": "adapter"})
    manifest = manifest.model_copy(update={"policy": "joint", "backbone": entry})
    told = {"report": None, "heads_bytes": 10}
    kept = render_card(manifest, form="vllm", **told)
    assert "changed by the adapter in `adapter/`" in kept and 'LLM(model="toy/base"' in kept
    merged = render_card(manifest, form="vllm", changed="merged", **told)
    assert "it lies whole in `backbone/`" in merged and "adapter in `adapter/`" not in merged
    assert 'LLM(model="FOLDER/backbone"' in merged


def test_card_hides_folders_of_the_training_machine(tmp_path: Path) -> None:
    from tests.checkpoint.support import toy_backbone

    folder = save_toy(
        tmp_path / "heads", base=toy_backbone(name="/home/someone/models/tiny"), recipe={"out": "/home/someone/runs/x"}
    )
    card = render_card(load_checkpoint(folder).manifest, form="medusa", report=None, heads_bytes=10)
    assert "/home/someone" not in card and "tiny" in card and "base_model:" not in card
    assert "Not measured yet" in card


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as an upload uses; every file goes in as a regular one."""

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: object, status: int = 200) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.seen.append((self.command, self.path))
        name = unquote(self.path.partition("/resolve/")[2].partition("/")[2].partition("?")[0])
        if not name:
            if "/tree/" in self.path:
                sizes = {name: len(content) for name, content in self.server.files.items()}
                self.answer([{"type": "file", "path": n, "size": size, "oid": "c" * 40} for n, size in sizes.items()])
                return
            siblings = [{"rfilename": name} for name in self.server.files]
            self.answer({"id": "me/heads", "sha": "a" * 40, "siblings": siblings, "name": "me"})
            return
        content = self.server.files[name]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append(("POST", self.path))
        self.server.tokens.append(self.headers.get("Authorization"))
        if self.server.refuse:
            self.answer({"error": "forbidden"}, 403)
        elif self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            self.answer({"url": f"http://127.0.0.1:{self.server.server_port}/me/heads"})
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"http://127.0.0.1:{self.server.server_port}/me/heads/commit/{'b' * 40}"
            self.answer({"commitUrl": url, "commitOid": "b" * 40, "success": True})
        else:
            self.answer({})


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.files, server.tokens, server.created, server.refuse = [], {}, [], None, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_push_to_hub(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    """What arrives at the hub, laid out in a folder, is a checkpoint with a card."""
    folder = save_toy(tmp_path / "heads")
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": "hf_secret",
        "HF_HOME": str(tmp_path / "hf"),
    }
    done = run_apart("export", str(folder), "--push-to-hub", "me/heads", "--private", **environment)
    assert done.returncode == 0, done.stderr
    assert hub.created["name"] == "heads" and (
        hub.created.get("private") is True or hub.created.get("visibility") == "private"
    )
    assert set(hub.tokens) == {"Bearer hf_secret"} and "hf_secret" not in done.stdout + done.stderr
    for name, content in hub.files.items():
        (tmp_path / "arrived" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "arrived" / name).write_bytes(content)
    loaded = load_checkpoint(tmp_path / "arrived", verify="hashes")
    assert loaded.manifest == load_checkpoint(folder).manifest
    assert 'load_with_base("me/heads")' in (tmp_path / "arrived" / "README.md").read_text()
    # And back again by its name on the hub, a pickle that somebody added left behind.
    hub.files["evil.pt"] = b"never fetched"
    done = run_apart("doctor", "me/heads", **environment)
    assert done.returncode == 0 and "healthy" in done.stdout, done.stdout + done.stderr
    assert not any("evil" in path for _, path in hub.seen)


def test_push_refused(tmp_path: Path, run, hub: ThreadingHTTPServer) -> None:
    folder = save_toy(tmp_path / "heads")
    hub.refuse = True
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": "hf_secret",
        "HF_HOME": str(tmp_path / "hf"),
    }
    done = run_apart("export", str(folder), "--push-to-hub", "me/heads", **environment)
    assert (
        done.returncode == 2
        and "403" in done.stderr
        and "Traceback" not in done.stderr
        and "hf_secret" not in done.stderr
    )
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    done = run_apart("export", str(folder), "--push-to-hub", "me/heads", **environment)
    assert done.returncode == 2 and "cannot be reached" in done.stderr and "Traceback" not in done.stderr
    done = run("export", str(folder), "--push-to-hub", "not a name")
    assert done.returncode == 2 and "no name for a repository" in done.stderr
