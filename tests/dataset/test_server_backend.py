"""`--backend server` against a server that fails on purpose: nothing is lost, nothing is answered twice, nothing is
invented."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import pytest

from medusa_train.dataset.backend_server import Reply, ServerPool
from medusa_train.dataset.distill import DistillSettings
from medusa_train.dataset.job import ServerOptions, distill
from medusa_train.dataset.journal import journal_records, rows_of_record
from medusa_train.dataset.render import render_prompt
from medusa_train.dataset.run_server import with_stop_token
from medusa_train.errors import UserError
from medusa_train.modeling.base import load_tokenizer
from tests.dataset.loopback import LoopbackServer, answer_to
from tests.dataset.test_reading import write
from tests.tiny import save_tiny_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory):
    return load_tokenizer(str(save_tiny_base(tmp_path_factory.mktemp("base"))))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [{"id": f"p{n}", "category": "c", "turns": [f"question {n}", "and then?"][: 1 + n % 2]} for n in range(40)]
    return str(write(tmp_path / "prompts.jsonl", *rows))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_train.dataset.backend_server.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("medusa_train.dataset.backend_server.LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr("medusa_train.dataset.backend_server.ASIDE_S", 0.2)


def go(base, prompts: str, out: Path, urls: list[str], **options):
    options = {"timeout": 2.0, "retries": 30, "concurrency": 8, **options}
    settings = options.pop("settings", DistillSettings(max_new_tokens=16))
    return distill(base=base, prompts=[prompts], out=str(out), settings=settings, server=ServerOptions(urls, **options))


def check_texts(out: Path, count: int = 40) -> list[dict]:
    """Each conversation is there once, and each answer is what the server says to exactly those turns."""
    records = [record for _, record in journal_records(out)]
    assert len(records) == count == len((out / "rows.jsonl").read_text().splitlines())
    assert {record["prompt_id"] for record in records} == {f"p{n}" for n in range(count)}
    for record in records:
        turns = record["messages"]
        assert len(turns) == 2 * (1 + int(record["prompt_id"][1:]) % 2)
        for index, turn in enumerate(turns):
            if turn["role"] == "assistant":
                assert turn["content"] == answer_to(turns[:index])
    return records


FAULTS = ["429", "500", "503", "drop", "truncated", "null", "slow"]


def test_nothing_is_lost_with_faults_of_every_kind(base, prompts: str, tmp_path: Path) -> None:
    chance = random.Random(1)
    kinds = [chance.choice(FAULTS) if chance.random() < 0.45 else None for _ in range(4000)]
    kinds[5] = "timeout"
    with LoopbackServer(lambda n: kinds[n], delay=0.15) as server:
        job = go(base, prompts, tmp_path / "out", [server.url])
        assert {*FAULTS, "timeout", "none"} <= set(server.seen)
        assert server.most_at_once <= 8 + server.seen["timeout"]
    check_texts(tmp_path / "out")
    assert job.counts.rows == 40 and job.counts.retokenized == 40
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["complete"] and manifest["backend"] == "server" and manifest["counts"]["retokenized"] == 40


@pytest.mark.parametrize("style, trim", [("vllm", False), ("sglang", False), ("llamacpp", False), ("sglang", True)])
def test_ids_of_the_server_are_kept(base, prompts: str, tmp_path: Path, style: str, trim: bool) -> None:
    """Each server is asked in its own way, found out from what it says of itself; a stop token that it cuts off is put
    back."""
    how = {"tokenizer": base.tokenizer, "render": lambda m: render_prompt(base, m), "style": style, "trim_stop": trim}
    with LoopbackServer(**how) as server:
        go(base, prompts, tmp_path / "out", [server.url])
        for record in check_texts(tmp_path / "out"):
            assert record["ids_exact"]
            rows, answers = (
                rows_of_record(record),
                [m["content"] for m in record["messages"] if m["role"] == "assistant"],
            )
            kept = [row.input_ids[row.loss_mask == 1].tolist() for row in rows]
            # One id per character: the second turn's prompt is tokenized as text, so each turn has a row of its own.
            assert kept == [[*server.ids_of(text), base.tokenizer.eos_token_id] for text in answers]


def test_a_stop_token_that_is_missing_and_could_be_any_is_not_made_up() -> None:
    def reply(ids: list[int], reason: str) -> Reply:
        return Reply("x", reason, ids)

    assert with_stop_token(reply([5, 2], "stop"), [2, 7]) == [5, 2]
    assert with_stop_token(reply([5], "stop"), [2]) == [5, 2]
    assert with_stop_token(reply([5], "length"), [2]) == [5]
    assert with_stop_token(reply([5], "stop"), [2, 7]) is None


def test_text_answers_are_tokenized_as_the_template_renders_them(base, prompts: str, tmp_path: Path) -> None:
    with LoopbackServer() as server:
        go(base, prompts, tmp_path / "out", [server.url])
    for record in check_texts(tmp_path / "out"):
        assert not record["ids_exact"]
        (row,) = rows_of_record(record)
        texts = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
        assert base.tokenizer.decode(row.input_ids[row.loss_mask == 1]) == "".join(f"{t}<|im_end|>" for t in texts)


def test_a_cut_answer_gets_no_end(base, prompts: str, tmp_path: Path) -> None:
    with LoopbackServer(cut_after=2) as server:
        job = go(base, prompts, tmp_path / "out", [server.url])
    for _, record in journal_records(tmp_path / "out"):
        for row in rows_of_record(record):
            assert base.tokenizer.eos_token_id not in row.input_ids[row.loss_mask == 1]
        assert record["finish_reason"] == "length"
    assert job.counts.finish == {"length": 60}


def test_a_server_that_knows_only_openais_fields(base, prompts: str, tmp_path: Path) -> None:
    with LoopbackServer(strict=True) as server:
        go(base, prompts, tmp_path / "out", [server.url], settings=DistillSettings(16, temperature=0.7))
        assert sum("return_token_ids" in request for request in server.requests) <= 8  # the first of each place
    check_texts(tmp_path / "out")
    with LoopbackServer(strict=True) as server, pytest.raises(UserError, match=r"every request is refused.*top_k"):
        go(base, prompts, tmp_path / "out2", [server.url], settings=DistillSettings(16, temperature=0.7, top_k=5))


@pytest.mark.parametrize("style", ["tgi", "sglang before 0.5.13", "transformers"])
def test_a_server_that_returns_no_ids_is_asked_and_marked(base, prompts: str, tmp_path: Path, style: str) -> None:
    with LoopbackServer(tokenizer=base.tokenizer, render=lambda m: render_prompt(base, m), style=style) as server:
        go(base, prompts, tmp_path / "out", [server.url])
    assert not any(record["ids_exact"] for record in check_texts(tmp_path / "out"))


def test_an_old_sglang_is_not_made_to_send_log_probs_for_nothing(base, prompts: str, tmp_path: Path) -> None:
    with LoopbackServer(style="sglang") as server:  # no ids, whatever is asked
        go(base, prompts, tmp_path / "out", [server.url])
        asked = [request for request in server.requests if "logprobs" in request]
        assert 1 <= len(asked) <= 8  # the first of each place
    check_texts(tmp_path / "out")


def one_at_a_time(*names: str):
    """422 as pydantic words it, for the first of the fields alone."""

    def refuse(request: dict):
        for name in names:
            if name in request:
                detail = [{"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs are not permitted"}]
                return 422, {"detail": detail}
        return None

    return refuse


def old_length_field(request: dict):
    if "max_tokens" in request:
        message = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
        return 400, {"error": {"message": message, "param": "max_tokens"}}
    return None


@pytest.mark.parametrize(
    ("style", "refuse", "gone"),
    [
        ("mistral", one_at_a_time("return_token_ids", "seed"), {"return_token_ids", "seed"}),
        ("sglang", one_at_a_time("return_meta_info"), {"return_meta_info"}),
        ("llamacpp", one_at_a_time("return_tokens"), {"return_tokens"}),
        ("openai", old_length_field, {"max_tokens"}),
        ("vllm", lambda r: (400, {"error": "bad request"}) if "return_token_ids" in r else None, {"return_token_ids"}),
    ],
)  # fmt: skip
def test_fields_that_a_server_refuses_are_left_out(
    base, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture, style: str, refuse, gone: set[str]
) -> None:
    with LoopbackServer(style=style, refuse=refuse) as server:
        go(base, prompts, tmp_path / "out", [server.url], settings=DistillSettings(16, temperature=0.7, top_p=0.9))
        asked_in_vain = [request for request in server.requests if gone & request.keys()]
        last = [request for request in server.requests if not gone & request.keys()]
    assert len(asked_in_vain) <= 8 * len(gone)  # the first of each place, a field at a time
    assert len(last) == 60
    limits = {request.get("max_tokens") or request.get("max_completion_tokens") for request in last}
    assert limits == {16} and {request["top_p"] for request in last} == {0.9}
    assert all(("seed" in request) == ("seed" not in gone) for request in last)
    assert ("takes no seed" in capsys.readouterr().err) == ("seed" in gone)
    check_texts(tmp_path / "out")


def test_what_changes_the_answers_is_never_left_out(base, prompts: str, tmp_path: Path) -> None:
    settings = DistillSettings(16, temperature=0.7, top_p=0.9)
    with (
        LoopbackServer(refuse=one_at_a_time("top_p")) as server,
        pytest.raises(UserError, match=r"every request is refused.*HTTP 422.*top_p"),
    ):
        go(base, prompts, tmp_path / "out", [server.url], settings=settings)


def test_load_is_shared_and_a_dead_server_set_aside(base, prompts: str, tmp_path: Path) -> None:
    with LoopbackServer() as one, LoopbackServer() as two, LoopbackServer(lambda n: "500") as dead:
        go(base, prompts, tmp_path / "out", [one.url, two.url, dead.url, "http://127.0.0.1:9"])
        assert one.seen["none"] + two.seen["none"] == 60
        assert min(one.seen["none"], two.seen["none"]) >= 15
        assert dead.seen["500"] <= 40
    check_texts(tmp_path / "out")


def test_refused_prompts_are_counted_and_the_rest_goes_on(base, prompts: str, tmp_path: Path) -> None:
    with LoopbackServer(lambda n: "refuse" if n < 3 else None) as server:
        job = go(base, prompts, tmp_path / "out", [server.url], concurrency=1)
    assert sum(job.counts.skipped.values()) >= 1
    assert job.counts.rows + sum(job.counts.skipped.values()) == 40


def test_a_server_that_stays_down_stops_with_all_answers_kept(base, prompts: str, tmp_path: Path) -> None:
    with (
        LoopbackServer(lambda n: None if n < 20 else "500") as server,
        pytest.raises(UserError, match=r"no answer after 3 tries.*HTTP 500"),
    ):
        go(base, prompts, tmp_path / "out", [server.url], retries=2)
    kept = len(list(journal_records(tmp_path / "out")))
    assert 5 <= kept <= 20
    with LoopbackServer() as server:
        go(base, prompts, tmp_path / "out", [server.url])
        assert sum(server.answered.values()) < 60
    check_texts(tmp_path / "out")


def test_no_server_is_a_clear_error(base, prompts: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no server answers"):
        go(base, prompts, tmp_path / "out", ["http://127.0.0.1:9"])
    with pytest.raises(UserError, match="no server is named"):
        go(base, prompts, tmp_path / "out2", [])
    with pytest.raises(UserError, match="not an address"):
        go(base, prompts, tmp_path / "out3", ["localhost:8000"])
    with LoopbackServer() as server, pytest.raises(UserError, match="no model 'other'"):
        go(base, prompts, tmp_path / "out4", [server.url], model="other")


def test_retry_after_is_obeyed_and_pauses_grow() -> None:
    async def run(server: LoopbackServer) -> float:
        async with ServerPool([server.url], retries=5, first_pause=0.05, timeout=5.0) as pool:
            await pool.connect()
            started = time.monotonic()
            await pool.chat([{"role": "user", "content": "x"}], {"max_tokens": 3})
            return time.monotonic() - started

    with LoopbackServer(lambda n: "500" if n < 2 else None) as server:
        assert asyncio.run(run(server)) >= 0.05 * 0.5 + 0.05 * 0.5  # two pauses, the longest allowed one is 0.05 here
    with LoopbackServer(lambda n: "429" if n < 2 else None) as server:
        assert asyncio.run(run(server)) < 5


def test_the_api_key_is_sent_and_never_shown(
    base, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", "secret-123")
    with LoopbackServer() as server:
        go(base, prompts, tmp_path / "out", [server.url], api_key_env="MY_KEY")
    everything = capsys.readouterr()
    texts = [everything.out, everything.err, *(path.read_text() for path in (tmp_path / "out").glob("*.json*"))]
    assert not any("secret-123" in text for text in texts)
