"""Faults that users met, each with the test that failed before its mend."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from medusa_train.dataset import load_rows
from medusa_train.dataset.backend_server import _parsed
from medusa_train.dataset.distill import DistillSettings
from medusa_train.dataset.job import LocalOptions, SynthesizeOptions, distill
from medusa_train.dataset.run_server import request_body
from medusa_train.dataset.server_styles import Dialect
from medusa_train.errors import UserError
from medusa_train.modeling.base import load_base
from tests.dataset.test_reading import write
from tests.tiny import save_tiny_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory):
    return load_base(str(save_tiny_base(tmp_path_factory.mktemp("base"), max_position_embeddings=256)), device="cpu")


def go(base, prompts: Path, out: Path, **options):
    options.setdefault("settings", DistillSettings(max_new_tokens=6))
    return distill(base=base, prompts=[str(prompts)], out=str(out), local=LocalOptions(max_rows=5), **options)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "p.jsonl", *({"id": f"p{n}", "prompt": f"Write {n} things."} for n in range(8)))


def test_a_journals_file_is_read_by_its_ids_like_its_folder(base, prompts: Path, tmp_path: Path) -> None:
    go(base, prompts, tmp_path / "out")
    folder, file = load_rows(tmp_path / "out", base), load_rows(tmp_path / "out" / "rows.jsonl", base)
    assert [row.input_ids.tolist() for row in file.rows] == [row.input_ids.tolist() for row in folder.rows]
    assert file.manifest_hash == folder.manifest_hash


def test_a_users_category_named_synthesized_is_sharded_like_any_other(base, tmp_path: Path) -> None:
    rows = [{"id": f"p{n}", "category": "synthesized", "prompt": f"Write {n} things."} for n in range(8)]
    path = write(tmp_path / "p.jsonl", *rows)
    kept = [go(base, path, tmp_path / str(n), shard=(n, 2)).counts.rows for n in (1, 2)]
    assert sum(kept) == 8


def test_every_sampling_parameter_is_sent_also_neutral_ones() -> None:
    # vLLM fills in what is absent from the model's generation_config.
    body = request_body({"max_new_tokens": 9, "temperature": 0.0, "top_p": 1.0, "top_k": 0}, seed=1)
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert body | neutral == body


def test_a_neutral_parameter_that_a_server_refuses_is_left_out_and_another_is_not() -> None:
    body = request_body({"max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 0}, seed=1)
    simpler = Dialect().simpler(body, "unknown field top_k")
    assert simpler is not None and "top_k" not in simpler.fields(body) and simpler.fields(body)["top_p"] == 0.9
    strict = {"top_k", "min_p", "repetition_penalty", "return_token_ids"}
    plain = Dialect().simpler(body, "extra inputs are not permitted")
    assert plain is not None and not strict & set(plain.fields(body)) and plain.fields(body)["top_p"] == 0.9


def test_an_answer_cut_in_mid_thought_is_counted_and_not_tried_again() -> None:
    data = {"choices": [{"message": {"content": None, "reasoning": "hm"}, "finish_reason": "length"}]}
    assert "length" in (_parsed(httpx.Response(200, json=data)).refusal or "")


def test_other_settings_of_made_up_prompts_are_another_job(base, prompts: Path, tmp_path: Path) -> None:
    go(base, prompts, tmp_path / "out", synthesize=SynthesizeOptions(2, 1.0, 24))
    with pytest.raises(UserError, match=r"synthesize_temperature 1\.0 there, 0\.2 now"):
        go(base, prompts, tmp_path / "out", synthesize=SynthesizeOptions(2, 0.2, 24))


def test_a_job_whose_every_prompt_is_skipped_fails(base, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *({"id": f"p{n}", "prompt": "word " * (400 + n)} for n in range(3)))
    with pytest.raises(UserError, match="no prompt was answered") as error:
        go(base, path, tmp_path / "out")
    assert str(error.value).count("longer than the context") == 1  # one reason, whatever the lengths
