"""report.json, report.txt and report.html say the same numbers, and the page needs nothing but itself."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from medusa_train.evaluation.figures import write
from medusa_train.evaluation.output import write_report, write_trace
from medusa_train.evaluation.records import PromptRecord
from medusa_train.evaluation.schema import AcceptanceReport
from medusa_train.evaluation.summarise import summarise
from tests.evaluation.made_up import arm_info, group_info, options, random_records, suite_of

# kind -> (what one unit on the page is in the JSON, decimals on the page); human-readable bytes are checked apart
SCALES = {
    "count": (1, 0),
    "ratio": (1, 3),
    "times": (1, 2),
    "percent": (0.01, 1),
    "ms": (1, 2),
    "seconds": (1, 2),
    "rate": (1, 1),
    "logit": (1, 4),
}


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    """(parsed JSON, text, HTML) of one report with three arms."""
    info = group_info(arm_info(), arm_info("b, typical", "typical"), arm_info("c, sample", "sample"))
    records = random_records(18, info, seed=4)
    report = summarise(
        [(info, records)],
        suite_of(records),
        options(),
        settings_hash="abc",
        peak_memory=(1_300_000_000, "made up"),
        command="made up",
    )
    folder = tmp_path_factory.mktemp("report")
    paths = write_report(report, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json", "report.txt"]
    return (
        json.loads(paths["json"].read_text(encoding="utf-8")),
        paths["txt"].read_text(encoding="utf-8"),
        paths["html"].read_text(encoding="utf-8"),
    )


class _Fields(HTMLParser):
    """Collects (path, kind, text) of every figure, and every tag's attributes."""

    def __init__(self):
        super().__init__()
        self.fields, self.attributes, self._open = [], [], None

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.attributes.append((tag, attrs))
        if "data-field" in attrs:
            self._open = [attrs["data-field"], attrs["data-kind"], ""]

    def handle_data(self, data):
        if self._open is not None:
            self._open[2] += data

    def handle_endtag(self, tag):
        if tag == "span" and self._open is not None:
            self.fields.append(tuple(self._open))
            self._open = None


def parsed(html: str) -> _Fields:
    parser = _Fields()
    parser.feed(html)
    return parser


def look_up(data, path):
    for part in path.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part]
    return data


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"-?\d[\d,]*\.?\d*", text)]


def test_every_figure_of_the_page_is_the_number_in_the_json(views):
    data, _, html = views
    fields = parsed(html).fields
    checked = 0
    for path, kind, shown in fields:
        value = look_up(data, path)
        if kind in ("text", "bytes") or value is None:
            continue
        unit, decimals = SCALES[kind]
        wanted = [value["value"], value["low"], value["high"]] if isinstance(value, dict) else [value]
        wanted = [number for number in wanted if number is not None]
        assert len(numbers(shown)) == len(wanted), (path, shown)
        for number, exact in zip(numbers(shown), wanted, strict=True):
            assert number == pytest.approx(exact / unit, abs=0.5001 * 10**-decimals), (path, shown)
            checked += 1
    assert checked > 300


def test_nothing_measured_is_a_dash_and_never_a_number(views):
    data, _, html = views
    for path, kind, shown in parsed(html).fields:
        if look_up(data, path) is None:
            assert shown == "–", (path, kind)


def test_the_text_says_the_numbers_of_the_json(views):
    data, text, _ = views
    flat = " ".join(text.split())
    for arm in data["arms"]:
        assert f"{arm['tokens_per_round']['value']:.3f}" in flat
        assert f"{arm['speed']['measured_speedup']['value']:.2f}x" in flat
        assert f"{arm['speed']['predicted_speedup']['value']:.2f}x" in flat
        assert f"{arm['speed']['overhead_c']['value']:.3f}" in flat
        assert f"{arm['rounds']:,} rounds, {arm['tokens']:,} tokens, {arm['num_accepted']:,} accepted guesses" in flat
        for count, level in zip(arm["accepted_histogram"][1:], arm["survival"], strict=True):
            assert f"{level['depth']} {count} {100 * level['share']:.1f} %" in flat
        for head in arm["head_accuracy"]:
            row = " ".join(f"{100 * share:.1f}" for share in head["accuracy"])
            assert f"{head['head']} (token t+{head['offset']}), % {row} {head['count']}" in flat
        for head in arm["tree"]["calibration"]:
            row = " ".join(f"{100 * share:.1f}" for share in head["accuracy"])
            assert f"(token t+{head['offset']}{'' if head['head'] < 2 else ', not in the tree'}), % {row}" in flat
        for stage in ("propose", "tree_forward", "accept", "commit", "total"):
            assert f"{arm['times'][stage]['median_ms']:.2f} ms" in flat
        for row in arm["categories"]:
            assert f"{row['category']} {row['prompts']} {row['tokens']} {row['tokens_per_round']['value']:.3f}" in flat
    exact = data["arms"][0]["exactness"]
    assert f"{exact['identical']} of {exact['prompts']} answers identical, {exact['near_ties']} near-ties" in flat


def test_the_plots_say_the_numbers_of_the_json(views):
    data, _, html = views
    for arm in data["arms"]:
        for accepted, rounds in enumerate(arm["accepted_histogram"]):
            assert f"{accepted} accepted: {rounds} of {arm['rounds']} rounds" in html
        for head in arm["head_accuracy"]:
            for rank, hits in enumerate(head["hits"], start=1):
                assert f"head {head['head']}, rank {rank}: {hits} of {head['count']}" in html
        for node in arm["tree"]["node_list"]:
            ranks = ", ".join(str(rank + 1) for rank in node["path"])
            assert f"ranks {ranks}: accepted in {100 * node['share']:.1f} % of rounds" in html


def test_lines_of_the_text_fit_a_terminal(views):
    assert max(len(line) for line in views[1].splitlines()) <= 110


def test_the_page_is_one_file_that_loads_nothing(views):
    html = views[2]
    for tag, attributes in parsed(html).attributes:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base"), tag
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in html
    assert "@import" not in html
    assert set(re.findall(r"https?://[^\"'\s<]+", html)) <= {"http://www.w3.org/2000/svg"}


def test_text_from_models_and_files_cannot_become_markup(tmp_path):
    evil = "</style><script>alert(1)</script>"
    info = group_info(arm_info(name=f"arm {evil}"))
    records = [
        dataclasses.replace(record, prompt_id=evil, category=f"{record.category} {evil}")
        for record in random_records(9, info, seed=1)
    ]
    report = summarise(
        [(info, records)], suite_of(records), options(), settings_hash="x", peak_memory=(1, evil), command=evil
    )
    paths = write_report(report, tmp_path)
    html = paths["html"].read_text(encoding="utf-8")
    assert "<script" not in html
    assert html.count("</style>") == 1
    assert "[bold]" not in paths["txt"].read_text(encoding="utf-8")


def test_square_brackets_of_names_stay_in_the_text(tmp_path):
    info = group_info(arm_info(name="tree [red]x[/red].json, 4 nodes, greedy"))
    records = random_records(3, info)
    report = summarise([(info, records)], suite_of(records), options(), settings_hash="x", peak_memory=(1, "m"))
    assert "[red]x[/red]" in write_report(report, tmp_path)["txt"].read_text(encoding="utf-8").replace("\n", "")


def test_a_report_without_a_baseline_or_with_skipped_prompts_has_all_views(tmp_path):
    info = group_info(
        arm_info(tree=dataclasses.replace(arm_info().tree, probability=None, expected_tokens_per_round=None))
    )
    records = []
    for record in random_records(2, info):
        turn = dataclasses.replace(record.turns[0], plain={}, generate=None, divergences=())
        records.append(dataclasses.replace(record, turns=(turn,)))
    records.append(PromptRecord("long", "qa", (), "too long"))
    report = summarise([(info, records)], suite_of(records), options(), settings_hash="x", peak_memory=(1, "m"))
    paths = write_report(report, tmp_path)
    assert "too long" in paths["txt"].read_text(encoding="utf-8")
    assert "too long" in paths["html"].read_text(encoding="utf-8")
    assert AcceptanceReport.model_validate_json(paths["json"].read_text(encoding="utf-8")).plain == []


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        ({"value": 1.79, "low": 1.7, "high": 1.881}, "ratio", "1.790 (1.700 to 1.881)"),
        ({"value": 1.314, "low": 1.2, "high": 1.4}, "times", "1.31x (1.20 to 1.40)"),
        ({"value": 31.06, "low": 30.0, "high": 32.0}, "rate", "31.1 tokens/s (30.0 to 32.0)"),
        ({"value": 1.5, "low": None, "high": None}, "ratio", "1.500"),
        ({"value": None, "low": None, "high": None}, "ratio", "–"),
        (0.4514, "percent", "45.1 %"),
        (12345, "count", "12,345"),
        (None, "ms", "–"),
        (True, "text", "yes"),
        ("stop", "text", "stop"),
        (1536, "bytes", "1.5 KiB"),
    ],
)
def test_how_figures_are_written(value, kind, shown):
    assert write(value, kind) == shown


def test_trace_has_one_line_per_round(tmp_path):
    info = group_info(arm_info(), arm_info("b", "typical"))
    records = random_records(3, info)
    count = write_trace(tmp_path / "trace.jsonl", [(info, records)])
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == count == sum(len(arm.rounds) for r in records for arm in r.turns[0].arms)
    for line in lines:
        assert line["num_accepted"] == len(line["accepted"]) == len(line["path"])
        assert line["ms"]["total"] == pytest.approx(sum(v for k, v in line["ms"].items() if k != "total"), rel=1e-3)
    # The published tokens of one answer, put together again.
    text = []
    for line in lines:
        if (line["arm"], line["prompt_id"]) == (info.arms[0].name, "prompt-000"):
            assert line["position"] == len(text)
            text += [line["root"], *line["accepted"]]
    assert tuple(text) == records[0].turns[0].arms[0].token_ids
