"""Which prompts a suite gives, and what is said when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from medusa_train.errors import UserError
from medusa_train.evaluation import suites
from medusa_train.evaluation.suites import MT_BENCH_CATEGORIES, Suite, SuitePrompt, load_suite

# The prompts of Spec-Bench are used from outside the repository and never copied into it.
SPEC_BENCH = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "spec_bench" / "question.jsonl"
needs_spec_bench = pytest.mark.skipif(not SPEC_BENCH.is_file(), reason=f"SPEC-BENCH IS NOT THERE: {SPEC_BENCH}")


def bench_file(folder: Path, rows: list[dict]) -> Path:
    path = folder / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(*categories: str) -> list[dict]:
    return [
        {"question_id": n, "category": name, "turns": [f"first {n}", f"second {n}"]}
        for n, name in enumerate(categories)
    ]


def test_heldout_prompts_of_the_repository():
    suite = load_suite("heldout")
    assert len(suite.prompts) >= 64
    assert len({prompt.category for prompt in suite.prompts}) >= 8
    assert len({prompt.id for prompt in suite.prompts}) == len(suite.prompts)


def test_heldout_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(load_suite("heldout").prompts) == 64


def test_mt_bench_keeps_its_eight_categories(tmp_path):
    path = bench_file(tmp_path, rows("writing", "translation", "stem", "qa"))
    suite = load_suite("mt-bench", suite_file=path)
    assert [prompt.category for prompt in suite.prompts] == ["writing", "stem"]
    assert suite.prompts[0].turns == ("first 0", "second 0")
    whole = load_suite("spec-bench", suite_file=path)
    assert [prompt.category for prompt in whole.prompts] == ["mt-bench", "translation", "mt-bench", "qa"]
    with pytest.raises(UserError, match="no MT-bench question"):
        load_suite("mt-bench", suite_file=bench_file(tmp_path, rows("qa")))


@needs_spec_bench
def test_spec_bench_as_published():
    whole = load_suite("spec-bench", suite_file=SPEC_BENCH)
    assert (len(whole.prompts), whole.sha256) == (480, suites.SPEC_BENCH_SHA256)
    categories = {"mt-bench", "translation", "summarization", "qa", "math_reasoning", "rag"}
    assert {prompt.category for prompt in whole.prompts} == categories
    assert {prompt.category for prompt in whole.take(24).prompts} == categories
    bench = load_suite("mt-bench", suite_file=SPEC_BENCH)
    assert len(bench.prompts) == 80
    assert {prompt.category for prompt in bench.prompts} == set(MT_BENCH_CATEGORIES)
    assert all(len(prompt.turns) == 2 for prompt in bench.prompts)


def test_any_file_that_distill_reads(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "Name a river.", "category": "lists", "id": "river"}\n', encoding="utf-8")
    suite = load_suite(str(path))
    assert (suite.name, suite.source) == ("mine.jsonl", str(path))
    assert suite.prompts == (SuitePrompt("river", "lists", (), ("Name a river.",)),)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    path.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    (prompt,) = load_suite(str(path)).prompts
    assert (prompt.context, prompt.turns) == ((("system", "Be brief."),), ("Hello",))


def test_a_repeated_id_does_not_make_two_prompts_one(tmp_path):
    twice = rows("qa", "qa")
    twice[1]["question_id"] = 0
    suite = load_suite("spec-bench", suite_file=bench_file(tmp_path, twice))
    assert [prompt.id for prompt in suite.prompts] == ["0", "0#2"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("no-such-suite", None, "no suite and no file is called 'no-such-suite'"),
        ("mtbench", None, "did you mean 'mt-bench'"),
        ("FILE", "", "no prompt"),
        ("FILE", '{"turns": []}\n', "`turns` must be non-empty user texts"),
        ("FILE", '{"turns": ["a"]}\n{"text": 1}\n', "a row without a list `turns`"),
    ],
)
def test_wrong_input_is_named(tmp_path, name, content, said):
    path = tmp_path / "file.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        load_suite(str(path) if name == "FILE" else name)


def test_line_numbers_are_those_of_the_file(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text('\n{"turns": ["a"]}\n\n{"turns": [3]}\n', encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_suite(str(path))
    assert f"{path}:4" in str(caught.value)


def test_taking_some_prompts_spreads_over_the_categories():
    prompts = tuple(SuitePrompt(str(n), "abc"[n // 4], (), ("?",)) for n in range(12))
    suite = Suite("s", "s", "0", prompts)
    assert [p.id for p in suite.take(5).prompts] == ["0", "1", "4", "5", "8"]  # two, two, one: in the file's order
    assert suite.take(None).prompts == suite.take(99).prompts == prompts


class _Reply:
    def __init__(self, content: bytes):
        self.content = content

    def raise_for_status(self):
        pass


def test_download_is_checked_and_kept(tmp_path, monkeypatch):
    content = bench_file(tmp_path, rows("writing", "qa")).read_bytes()
    monkeypatch.setenv("MEDUSA_TRAIN_CACHE", str(tmp_path / "cache"))
    asked = []
    monkeypatch.setattr(httpx, "get", lambda url, **_: asked.append(url) or _Reply(content))
    with pytest.raises(UserError, match="not the Spec-Bench file that this program knows") as caught:
        load_suite("spec-bench")
    assert "--suite-file" in str(caught.value)
    monkeypatch.setattr(suites, "SPEC_BENCH_SHA256", suites.sha256_bytes(content))
    assert len(load_suite("spec-bench").prompts) == 2
    assert len(load_suite("mt-bench").prompts) == 1
    assert len(asked) == 2  # the third reading came from the cache


def test_no_network_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_TRAIN_CACHE", str(tmp_path))

    def fail(url, **_):
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(httpx, "get", fail)
    with pytest.raises(UserError, match="could not be downloaded") as caught:
        load_suite("mt-bench")
    assert "--suite mt-bench --suite-file PATH" in str(caught.value)
    assert list(tmp_path.rglob("*.jsonl")) == []
