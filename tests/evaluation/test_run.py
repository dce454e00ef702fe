"""The whole run on a real tiny model: real decoder, real checkpoint, real files."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from medusa_train.cli.app import build_app
from medusa_train.errors import UserError
from medusa_train.evaluation.arms import ArmRequest, open_groups
from medusa_train.evaluation.groups import RunOptions
from medusa_train.evaluation.run import run_acceptance
from medusa_train.evaluation.schema import AcceptanceReport
from medusa_train.evaluation.suites import load_suite
from tests.evaluation.conftest import PROMPTS

OPTIONS = RunOptions(max_new_tokens=24, bootstrap_resamples=100)


def run(checkpoint, prompt_file, out, *, options=OPTIONS, groups=None, **request):
    request = ArmRequest((str(checkpoint),), dtype="float32", device="cpu", **request)
    return run_acceptance(groups or open_groups(request, options), load_suite(str(prompt_file)), options, out)


@pytest.fixture(scope="module")
def measured(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    path = folder / "prompts.jsonl"
    lines = [json.dumps({"id": name, "category": kind, "prompt": text}) for name, kind, text in PROMPTS]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    request = {"trees": ("stored", "chain", "2,2"), "modes": ("greedy", "typical", "sample"), "generate": True}
    return run(tiny_checkpoint, path, folder, **request)


def test_greedy_arms_equal_plain_decoding_and_generate_in_float32(measured):
    report, _ = measured
    greedy = [arm for arm in report.arms if arm.mode == "greedy"]
    assert len(greedy) == 3
    for arm in greedy:
        assert (arm.exactness.identical, arm.exactness.passed) == (len(PROMPTS), True)
    assert report.generate[0].identical == len(PROMPTS)
    assert report.passed


def test_arms_are_named_and_compared_with_their_own_law(measured):
    report, _ = measured
    assert [arm.name for arm in report.arms][:4] == [
        "stored tree, 5 nodes, greedy",
        "stored tree, 5 nodes, typical",
        "stored tree, 5 nodes, sample",
        "chain tree, 2 nodes, greedy",
    ]
    assert [report.plain[arm.plain].name for arm in report.arms][:3] == [
        "plain greedy decoding",
        "plain greedy decoding",
        "plain sampling",
    ]


def test_heads_guess_right_now_and_then_so_that_the_figures_mean_something(measured):
    report, _ = measured
    arm = report.arms[0]
    assert arm.num_accepted > 0
    assert arm.accepted_histogram[0] > 0
    assert arm.tokens_per_round.value == arm.tokens / arm.rounds
    assert [node.expected for node in arm.tree.node_list] == [0.5, 0.1, 0.2, 0.06, 0.04]
    assert arm.tree.method == "joint"
    assert [(head.hits[0], head.count) for head in arm.tree.calibration] == [(50, 100), (25, 99)]


def test_rounds_equal_those_of_a_replay_along_the_greedy_text(measured, tiny_checkpoint):
    """An oracle that decodes nothing: ranks of the true tokens, one forward per text, and a walk through the tree."""
    import torch

    from medusa_train.checkpoint import load_with_base
    from medusa_train.dataset import Message, render_prompt
    from medusa_train.modeling.backbone import hidden_states, output_projection

    base, checkpoint = load_with_base(tiny_checkpoint, dtype="float32", device="cpu")
    projection = output_projection(base.model)
    report, [(_, records)] = measured
    numbers = [n for n, arm in enumerate(report.arms) if arm.mode == "greedy"]
    for record, (_, _, text) in zip(records, PROMPTS, strict=True):
        prompt_ids = render_prompt(base, [Message("user", text)])
        answer = record.turns[0].plain["greedy"].token_ids
        with torch.no_grad():
            hidden_TD = hidden_states(base.model, torch.tensor([[*prompt_ids, *answer]]))[0]
            orders = [checkpoint.heads.logits(hidden_TD, j, projection).argsort(-1, descending=True) for j in range(2)]
        for number in numbers:
            paths = {tuple(node.path) for node in report.arms[number].tree.node_list}
            expected, at = [], 0
            while at < len(answer):
                path: tuple[int, ...] = ()
                for depth in range(2):
                    place = at + 1 + depth
                    if place >= len(answer):
                        break
                    # The head reads the position before the root.
                    ranked = orders[depth][len(prompt_ids) + at - 1].tolist()
                    longer = (*path, ranked.index(answer[place]))
                    if longer not in paths:
                        break
                    path = longer
                expected.append(path)
                at += 1 + len(path)
            assert [r.path for r in record.turns[0].arms[number].rounds] == expected


def test_sampling_is_the_same_with_the_same_seed_and_another_with_another(tiny_checkpoint, prompt_file, tmp_path):
    def texts(seed, folder):
        options = dataclasses.replace(OPTIONS, seed=seed)
        _, [(_, records)] = run(tiny_checkpoint, prompt_file, folder, options=options, modes=("sample",))
        return [record.turns[0].arms[0].token_ids for record in records]

    first = texts(0, tmp_path / "a")
    assert first == texts(0, tmp_path / "b")
    assert first != texts(1, tmp_path / "c")


def test_an_interrupted_run_continues_and_measures_nothing_twice(tiny_checkpoint, prompt_file, tmp_path):
    request = ArmRequest((str(tiny_checkpoint),), dtype="float32", device="cpu")
    calls = []

    def counted(stop_after):
        for group in open_groups(request, OPTIONS):
            real = group.arms[0]

            def arm(prompt_ids, limit, seed, on_tokens, real=real):
                if limit == OPTIONS.max_new_tokens:  # the warm-up asks for fewer tokens
                    if len(calls) == stop_after:
                        raise KeyboardInterrupt
                    calls.append(tuple(prompt_ids))
                return real(prompt_ids, limit, seed, on_tokens)

            yield dataclasses.replace(group, arms=(arm,))

    with pytest.raises(KeyboardInterrupt):
        run(tiny_checkpoint, prompt_file, tmp_path, groups=counted(3))
    assert len(calls) == 3
    report, [(_, records)] = run(tiny_checkpoint, prompt_file, tmp_path, groups=counted(99))
    assert len(calls) == len(set(calls)) == len(PROMPTS)
    whole, [(_, again)] = run(tiny_checkpoint, prompt_file, tmp_path / "other")
    assert [r.turns[0].arms[0].token_ids for r in records] == [r.turns[0].arms[0].token_ids for r in again]
    assert report.setup.settings_hash == whole.setup.settings_hash
    # A third time nothing is decoded at all.
    run(tiny_checkpoint, prompt_file, tmp_path, groups=counted(5))
    assert len(calls) == len(PROMPTS)


def test_more_prompts_reuse_those_measured_and_other_settings_do_not(tiny_checkpoint, prompt_file, tmp_path):
    suite = load_suite(str(prompt_file))
    request = ArmRequest((str(tiny_checkpoint),), dtype="float32", device="cpu")
    some, _ = run_acceptance(open_groups(request, OPTIONS), suite.take(2), OPTIONS, tmp_path)
    assert len(list(tmp_path.glob("journal-*.jsonl"))) == 1
    every, _ = run_acceptance(open_groups(request, OPTIONS), suite, OPTIONS, tmp_path)
    assert (some.suite.used, every.suite.used) == (2, 5)
    assert some.arms[0].prompt_rows[0] in every.arms[0].prompt_rows
    shorter = dataclasses.replace(OPTIONS, max_new_tokens=5)
    run_acceptance(open_groups(request, shorter), suite, shorter, tmp_path)
    assert len(list(tmp_path.glob("journal-*.jsonl"))) == 2


def test_a_moved_checkpoint_and_a_renamed_tree_continue_the_same_journal(tiny_checkpoint, prompt_file, tmp_path):
    import shutil

    run(tiny_checkpoint, prompt_file, tmp_path / "out")
    moved = shutil.copytree(tiny_checkpoint, tmp_path / "moved")
    tree = tmp_path / "same.json"
    tree.write_text(json.dumps([[0], [1], [0, 0], [0, 1], [1, 0]]), encoding="utf-8")
    report, _ = run(moved, prompt_file, tmp_path / "out", trees=(str(tree),))
    assert report.arms[0].name == "tree same.json, 5 nodes, greedy"
    assert len(list((tmp_path / "out").glob("journal-*.jsonl"))) == 1


def test_all_turns_follow_the_models_own_answers(tiny_checkpoint, tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text(
        '{"question_id": 1, "category": "writing", "turns": ["The quick fox", "Again"]}\n', encoding="utf-8"
    )
    seen = []
    options = dataclasses.replace(OPTIONS, all_turns=True)

    def spied():
        for group in open_groups(ArmRequest((str(tiny_checkpoint),), dtype="float32", device="cpu"), options):
            render = group.render
            yield dataclasses.replace(
                group, render=lambda messages, render=render: seen.append(messages[:]) or render(messages)
            )

    report, [(_, records)] = run(tiny_checkpoint, path, tmp_path, options=options, groups=spied())
    assert [row.turn for row in report.arms[0].prompt_rows] == [0, 1]
    assert [role for role, _ in seen[-1]] == ["user", "assistant", "user"]
    assert seen[-1][2] == ("user", "Again")
    assert report.suite.turns == "all"
    assert records[0].turns[1].prompt_tokens > records[0].turns[0].prompt_tokens


def test_a_prompt_that_does_not_fit_is_left_out_by_name(tiny_checkpoint, prompt_file, tmp_path):
    def narrow():
        for group in open_groups(ArmRequest((str(tiny_checkpoint),), dtype="float32", device="cpu"), OPTIONS):
            lengths = sorted(len(group.render([("user", text)])) for *_, text in PROMPTS)
            yield dataclasses.replace(group, context_length=lengths[-1])

    report, _ = run(tiny_checkpoint, prompt_file, tmp_path, groups=narrow())
    assert report.arms[0].prompts == len(PROMPTS) - 1
    assert any("1 prompts were left out" in note for note in report.notes)
    # Prompts that no arm answered are not said to have been used.
    assert report.suite.used == len(PROMPTS) - 1


def test_a_prompt_across_a_rope_border_is_left_out_by_name(tiny_checkpoint, prompt_file, tmp_path):
    from medusa_train.decoding.stopping import RopeSwitch

    def bordered():
        for group in open_groups(ArmRequest((str(tiny_checkpoint),), dtype="float32", device="cpu"), OPTIONS):
            longest = max(len(group.render([("user", text)])) for *_, text in PROMPTS)
            # The stored tree is two deep: the longest prompt passes the border by one, every other one fits.
            switch = RopeSwitch("dynamic", longest + OPTIONS.max_new_tokens + 2 - 1)

            def arm(prompt_ids, limit, seed, on_tokens, real=group.arms[0], switch=switch):
                switch.check(len(prompt_ids), limit, 2)
                return real(prompt_ids, limit, seed, on_tokens)

            yield dataclasses.replace(group, arms=(arm,), rope_switch=switch)

    report, _ = run(tiny_checkpoint, prompt_file, tmp_path, groups=bordered())
    assert report.arms[0].prompts == report.suite.used == len(PROMPTS) - 1
    assert any("dynamic positions change" in note for note in report.notes)


def test_a_changed_medusa_train_measures_again(tiny_checkpoint, prompt_file, tmp_path, monkeypatch):
    run(tiny_checkpoint, prompt_file, tmp_path)
    run(tiny_checkpoint, prompt_file, tmp_path)
    assert len(list(tmp_path.glob("journal-*.jsonl"))) == 1
    monkeypatch.setattr("medusa_train.evaluation.run.source_hash", lambda: "another program")
    run(tiny_checkpoint, prompt_file, tmp_path)
    assert len(list(tmp_path.glob("journal-*.jsonl"))) == 2


def test_two_checkpoints_of_one_base_stand_side_by_side(tiny_checkpoint, prompt_file, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint, other)
    request = ArmRequest((str(tiny_checkpoint), str(other)), dtype="float32", device="cpu")
    report, measured = run_acceptance(
        open_groups(request, OPTIONS), load_suite(str(prompt_file)).take(2), OPTIONS, tmp_path / "out"
    )
    assert [arm.checkpoint for arm in report.arms] == ["heads", "other"]
    assert (len(measured), len(report.plain)) == (1, 1)  # one backbone, loaded once, one baseline
    assert report.arms[0].tokens_per_round == report.arms[1].tokens_per_round


def test_second_opinions_compute_the_same_logits_in_other_pieces(tiny_checkpoint):
    import torch

    request = ArmRequest((str(tiny_checkpoint),), dtype="float32", device="cpu")
    group = next(iter(open_groups(request, OPTIONS)))
    ids = group.render([("user", "The quick brown fox jumps over the lazy dog")])
    whole = torch.tensor(group.next_logits(ids))
    for rows in (1, 3, len(ids), 512):
        torch.testing.assert_close(torch.tensor(group.next_logits(ids, rows)), whole, rtol=1e-4, atol=1e-4)


def test_rows_that_pad_the_vocabulary_are_never_proposed(tmp_path, prompt_file):
    """Here such rows have the largest logits of all; the text is still plain decoding's, and guesses are tokens."""
    import torch

    from medusa_train.checkpoint import save_checkpoint
    from medusa_train.modeling.backbone import output_projection
    from medusa_train.modeling.base import load_base
    from medusa_train.modeling.heads import HeadsConfig, new_heads
    from tests.tiny import save_tiny_base, tiny_tokenizer

    words = len(tiny_tokenizer())
    folder = save_tiny_base(tmp_path / "base", "llama", seed=3, vocab_size=words + 8)
    base = load_base(str(folder), dtype="float32", device="cpu")
    heads = new_heads(HeadsConfig("own", 2, 1, 32, words + 8, projection_bias=False), output_projection(base.model))
    with torch.no_grad():
        for linear in heads.projections:
            linear.weight[words:] = 100 * linear.weight[:8]
            linear.weight[words::2] *= -1
    tree = {"format": 1, "paths": [[0], [1], [0, 0]]}
    how = {"recipe": {}, "policy": "heads_only", "data_manifest_hash": None, "training": {}, "tree": tree}
    checkpoint = save_checkpoint(tmp_path / "heads", heads, base, **how)
    trace = tmp_path / "trace.jsonl"
    report, _ = run(checkpoint, prompt_file, tmp_path / "out")
    assert report.passed
    result = cli(checkpoint, "--suite", prompt_file, "--max-new-tokens", 8, "--out", tmp_path / "o", "--trace", trace)
    assert result.exit_code == 0, result.output
    proposed = [token for line in trace.read_text().splitlines() for token in json.loads(line)["proposed"]]
    assert proposed and max(proposed) < words


def cli(*arguments):
    return CliRunner().invoke(build_app(), ["eval-acceptance", *map(str, arguments)])


def test_command_line_from_checkpoint_to_report(tiny_checkpoint, prompt_file, tmp_path):
    out, trace = tmp_path / "report", tmp_path / "trace.jsonl"
    arguments = [
        tiny_checkpoint,
        "--suite",
        prompt_file,
        "--max-new-tokens",
        12,
        "--resamples",
        100,
        "--dtype",
        "float32",
    ]
    result = cli(*arguments, "--out", out, "--trace", trace, "--device", "cpu")
    assert result.exit_code == 0, result.output
    report = AcceptanceReport.model_validate_json((out / "report.json").read_text(encoding="utf-8"))
    assert report.suite.used == len(PROMPTS)
    assert len(trace.read_text(encoding="utf-8").splitlines()) == report.arms[0].rounds
    assert f"{report.arms[0].tokens_per_round.value:.3f}" in result.output
    assert (out / "report.txt").read_text(encoding="utf-8") in result.output
    first = json.loads(trace.read_text(encoding="utf-8").splitlines()[0])
    assert (len(first["proposed"]), len(first["targets"]), first["position"]) == (5, 6, 0)
    assert set(first["ms"]) == {"total", "propose", "forward", "accept", "commit"}


def test_no_baseline_runs_no_plain_arm(tiny_checkpoint, prompt_file, tmp_path):
    out = tmp_path / "report"
    result = cli(tiny_checkpoint, "--suite", prompt_file, "--no-baseline", "--max-new-tokens", 6, "--out", out)
    assert result.exit_code == 0, result.output
    report = AcceptanceReport.model_validate_json((out / "report.json").read_text(encoding="utf-8"))
    assert (report.plain, report.arms[0].speed) == ([], None)


def test_a_broken_promise_is_reported_and_exits_with_1(tiny_checkpoint, prompt_file, tmp_path, monkeypatch):
    from medusa_train.evaluation import arms

    real = arms._tree_decoder

    def liar(decoder, mode, options):
        honest = real(decoder, mode, options)

        def decode(prompt_ids, limit, seed, on_tokens):
            answer = honest(prompt_ids, limit, seed, on_tokens)
            wrong = (answer.token_ids[0] + 1) % 50
            rounds = (
                dataclasses.replace(answer.rounds[0], tokens=(wrong, *answer.rounds[0].tokens[1:])),
                *answer.rounds[1:],
            )
            return dataclasses.replace(answer, token_ids=(wrong, *answer.token_ids[1:]), rounds=rounds)

        return decode

    monkeypatch.setattr(arms, "_tree_decoder", liar)
    out = tmp_path / "report"
    result = cli(tiny_checkpoint, "--suite", prompt_file, "--max-new-tokens", 6, "--out", out, "--dtype", "float32")
    assert result.exit_code == 1
    report = AcceptanceReport.model_validate_json((out / "report.json").read_text(encoding="utf-8"))
    assert report.arms[0].exactness.failures == len(PROMPTS)
    assert "failure" in (out / "report.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no checkpoint was named"),
        (["CHECKPOINT", "--suite", "no-such-suite"], "no suite and no file"),
        (["/no/such/checkpoint"], "no checkpoint there"),
        (["CHECKPOINT", "--tree", "5,5,5"], "3 deep and there are 2 heads"),
        (["CHECKPOINT", "--tree", "no-such-tree.json"], "no tree"),
        (["CHECKPOINT", "CHECKPOINT"], "named twice"),
        (["CHECKPOINT", "--dtype", "float12"], "unknown dtype"),
        (["CHECKPOINT", "--top-p", "1.5", "--mode", "sample"], "top_p"),
        (["CHECKPOINT", "--top-p", "0.9"], "without mode sample"),
        (["CHECKPOINT", "--temperature", "0.5"], "changes nothing in mode greedy"),
        (["CHECKPOINT", "--full", "--max-prompts", "3"], "contradict each other"),
    ],
)
def test_wrong_input_is_one_clear_error_and_leaves_nothing(tiny_checkpoint, prompt_file, tmp_path, arguments, said):
    out = tmp_path / "report"
    named = [tiny_checkpoint if word == "CHECKPOINT" else word for word in arguments]
    extra = [] if "--suite" in named else ["--suite", prompt_file]
    result = cli(*named, *extra, "--out", out)
    assert isinstance(result.exception, UserError), result.output
    assert said in str(result.exception)
    assert not out.exists()


def test_a_checkpoint_without_a_tree_says_how_to_get_one(tiny_checkpoint, prompt_file, tmp_path):
    import shutil

    from medusa_train.checkpoint import store_tree

    bare = tmp_path / "bare"
    shutil.copytree(tiny_checkpoint, bare)
    store_tree(bare, None)
    result = cli(bare, "--suite", prompt_file, "--out", tmp_path / "report")
    assert isinstance(result.exception, UserError)
    assert f"medusa-train tree {bare}" in str(result.exception)


def test_schema_is_printed(capsys):
    result = cli("--schema")
    assert result.exit_code == 0
    assert json.loads(result.output)["title"] == "AcceptanceReport"


def test_help_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from typer.testing import CliRunner; from medusa_train.cli.app import build_app;"
        "r = CliRunner().invoke(build_app(), ['eval-acceptance', '--help']); assert r.exit_code == 0, r.output;"
        "assert 'spec-bench' in r.output; assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_checkpoint_with_an_adapter_is_compared_with_its_own_backbone(tiny_checkpoint, prompt_file, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    from medusa_train.checkpoint import load_with_base, save_checkpoint

    base, plain = load_with_base(tiny_checkpoint, dtype="float32", device="cpu")
    torch.manual_seed(0)
    adapted = get_peft_model(base.model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    save_checkpoint(
        tmp_path / "adapted",
        plain.heads,
        base,
        recipe={},
        policy="self_distill",
        data_manifest_hash=None,
        training={},
        adapter=adapted,
        tree=plain.tree,
    )
    request = ArmRequest((str(tiny_checkpoint), str(tmp_path / "adapted")), dtype="float32", device="cpu")
    report, measured = run_acceptance(
        open_groups(request, OPTIONS), load_suite(str(prompt_file)), OPTIONS, tmp_path / "out"
    )
    assert [arm.plain for arm in report.arms] == [0, 1]
    assert [arm.exactness.identical for arm in report.arms] == [len(PROMPTS)] * 2
    texts = [[record.turns[0].plain["greedy"].token_ids for record in records] for _, records in measured]
    assert texts[0] != texts[1]
    assert len(list((tmp_path / "out").glob("journal-*.jsonl"))) == 2
