"""Every shape, every kind of file, every drop by its name; and a wrong shape is said with file:line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.dataset import read_conversations, read_prompts
from medusa_train.dataset.files import records, sources_of
from medusa_train.errors import UserError

PAIR = [("user", "hi"), ("assistant", "hello")]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, **options) -> tuple[list[list[tuple[str, str]]], object]:
    stream = read_conversations(path, quiet=True, **options)
    found = [[(message.role, message.content) for message in conversation.messages] for conversation in stream]
    return found, stream.counts


def messages(*turns: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


SHAPES = {
    "messages": messages(*PAIR),
    "messages with parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
        ]
    },
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    "sharegpt, other names": {"conversations": [{"from": "user", "value": "hi"}, {"from": "model", "value": "hello"}]},
    "conversations with roles": {
        "conversations": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "hello"}]
    },
    "alpaca": {"instruction": "hi", "input": "", "output": "hello"},
    "prompt": {"prompt": "hi", "response": "hello"},
    "prompt and completion": {"prompt": "hi", "completion": "hello"},
    "prompt as messages": {
        "prompt": [{"role": "user", "content": "hi"}],
        "completion": [{"role": "assistant", "content": "hello"}],
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(tmp_path: Path, name: str) -> None:
    found, counts = read(write(tmp_path / "rows.jsonl", SHAPES[name]))
    assert found == [PAIR]
    assert (counts.rows_in, counts.kept, counts.dropped) == (1, 1, 0)


def test_alpaca_input_follows_the_instruction(tmp_path: Path) -> None:
    found, _ = read(write(tmp_path / "a.jsonl", {"instruction": "Add.", "input": "1 2", "output": "3"}))
    assert found == [[("user", "Add.\n\n1 2"), ("assistant", "3")]]


def test_system_comes_from_a_turn_or_a_field(tmp_path: Path) -> None:
    row = {**messages(*PAIR), "system": "Be brief."}
    other = {
        "conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
        ]
    }
    assert read(write(tmp_path / "a.jsonl", row))[0] == [[("system", "Be brief."), *PAIR]]
    assert read(write(tmp_path / "b.jsonl", other))[0] == [[("system", "S"), ("user", "a"), ("assistant", "b")]]


def test_files_of_every_kind_hold_the_same(tmp_path: Path) -> None:
    rows = [messages(("user", f"hi {n}\n— å"), ("assistant", "hello")) for n in range(5)]
    import pyarrow
    import pyarrow.parquet

    write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=2), encoding="utf-8-sig")
    (tmp_path / "d.json").write_text("\n".join(json.dumps(row, indent=1) for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "e.parquet")
    expected, _ = read(tmp_path / "a.jsonl")
    assert len(expected) == 5
    for name in ("b.jsonl.gz", "c.json", "d.json", "e.parquet"):
        assert read(tmp_path / name)[0] == expected, name
    found, counts = read(tmp_path)
    assert found == expected and counts.rows_in == 25 and counts.drops == {"exact duplicate": 20}
    assert read(tmp_path, keep_duplicates=True)[1].kept == 25


def test_large_json_arrays_are_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_train.dataset.files._CHUNK", 7)
    rows = [{"prompt": 'a "quoted" \\ [text], ' + "x" * n} for n in range(20)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    found = list(records(str(tmp_path / "a.json")))
    assert [record for _, record in found] == rows
    assert [int(where.rpartition(":")[2]) for where, _ in found] == [2 + 3 * n for n in range(20)]


DROPS = {
    "broken unicode": messages(("user", "half a \ud83d pair"), ("assistant", "y")),
    "assistant speaks first": messages(("assistant", "x"), ("user", "y")),
    "two turns of one role in a row": messages(("user", "x"), ("user", "y"), ("assistant", "z")),
    "empty turn": messages(("user", "x"), ("assistant", " \n")),
    "no turns": {"messages": []},
    "no assistant turn": messages(("user", "x")),
    "system turn inside the conversation": messages(("user", "x"), ("system", "y"), ("assistant", "z")),
    "tool turn": messages(("user", "x"), ("assistant", "y"), ("tool", "z")),
    "unknown role 'narrator'": messages(("narrator", "x"), ("assistant", "y")),
    "content part of type 'image_url'": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
            {"role": "assistant", "content": "y"},
        ]
    },
}


@pytest.mark.parametrize("reason", DROPS)
def test_drops_have_names_and_add_up(tmp_path: Path, reason: str) -> None:
    found, counts = read(write(tmp_path / "a.jsonl", messages(*PAIR), DROPS[reason]))
    assert found == [PAIR]
    assert counts.drops == {reason: 1}
    assert counts.rows_in == counts.kept + counts.dropped == 2


def test_tool_calls_are_dropped_by_name(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]}
    assert read(write(tmp_path / "a.jsonl", row))[1].drops == {"tool turn": 1}


def test_too_many_drops_stop_and_show_three(tmp_path: Path) -> None:
    rows = [messages(*PAIR)] + [messages(("user", f"question {n}")) for n in range(4)]
    stream = read_conversations(write(tmp_path / "a.jsonl", *rows), quiet=True)
    list(stream)
    with pytest.raises(UserError) as caught:
        stream.counts.check()
    text = str(caught.value)
    assert "4 of 5 rows were dropped (no assistant turn 4)" in text and "at most 5%" in text
    assert [f"a.jsonl:{line}: no assistant turn" in text for line in (2, 3, 4, 5)] == [True, True, True, False]
    stream.counts.check(max_drop_fraction=0.8)


def test_wrong_shape_names_line_keys_and_shapes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "hi", "label": 1})
    with pytest.raises(UserError) as caught:
        read(path)
    text = str(caught.value)
    assert "a.jsonl:1: no known shape of conversation: keys text, label" in text
    for shape in (
        "messages: [{role, content}]",
        "conversations: [{from, value}]",
        "instruction, input, output",
        "turns: [",
    ):
        assert shape in text


def test_another_shape_inside_a_file_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", messages(*PAIR), {"prompt": "x", "response": "y"})
    with pytest.raises(UserError, match=r"a\.jsonl:2: not of the shape its file began with.*: keys prompt, response"):
        read(path)


@pytest.mark.parametrize(
    ("content", "where"), [('{"prompt": "a"}\n{"prompt": \n', ":2: not valid JSON"), ("[1, 2\n, {]\n", ":")]
)
def test_broken_json_names_the_line(tmp_path: Path, content: str, where: str) -> None:
    path = tmp_path / ("a.jsonl" if content.startswith("{") else "a.json")
    path.write_text(content)
    with pytest.raises(UserError, match=where):
        read(path)


def test_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no data files in the folder"):
        read_conversations(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="unknown kind of file"):
        sources_of(tmp_path / "a.txt")
    stream = read_prompts(write(tmp_path / "e.jsonl"), quiet=True)
    assert list(stream) == []
    with pytest.raises(UserError, match="the data is empty"):
        stream.counts.check()


def test_broken_gzip_and_parquet_are_user_errors(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 999)[:-20])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    for name in ("a.jsonl.gz", "b.parquet"):
        with pytest.raises(UserError, match=name):
            read(tmp_path / name)


def test_prompts_keep_system_and_user_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
    )
    (prompt,) = read_prompts(path, quiet=True)
    assert [(m.role, m.content) for m in prompt.messages] == [("user", "first"), ("user", "second")]
    assert (prompt.id, prompt.category, prompt.source) == ("81", "writing", f"{path}:1")
    row = messages(("system", "s"), ("user", "a"), ("assistant", "old"), ("user", "b"), ("assistant", "old"))
    (prompt,) = read_prompts(write(tmp_path / "b.jsonl", row), quiet=True)
    assert [(m.role, m.content) for m in prompt.messages] == [("system", "s"), ("user", "a"), ("user", "b")]
    assert prompt.messages[-1].role == "user"


def test_keys_go_by_content() -> None:
    from medusa_train.dataset import Conversation, Message

    one = Conversation((Message("user", "a"), Message("assistant", "b")), "x:1")
    two = Conversation((Message("user", "a"), Message("assistant", "c")), "y:2")
    assert one.key != two.key and one.prompt_key == two.prompt_key
    assert one.key == Conversation(one.messages, "elsewhere").key


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["messages", "conversations", "turns", "prompt", "response", "instruction", "output", "role",
                         "content", "from", "value", "type", "text", "system", "tool_calls"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(rows=st.lists(JSON, min_size=1, max_size=4))
def test_any_json_is_read_dropped_or_refused_with_a_place(tmp_path_factory: pytest.TempPathFactory, rows: list) -> None:
    path = write(tmp_path_factory.mktemp("any") / "a.jsonl", *rows)
    for reader in (read_conversations, read_prompts):
        stream = reader(path, quiet=True)
        try:
            kept = len(list(stream))
        except UserError as error:
            assert f"{path}:" in str(error)
        else:
            assert stream.counts.rows_in == len(rows) == kept + stream.counts.dropped


@pytest.mark.slow
def test_a_million_rows_stay_under_a_gigabyte(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = tmp_path / "big.jsonl"
    with open(path, "w") as handle:
        for n in range(1_000_000):
            handle.write(
                f'{{"messages": [{{"role": "user", "content": "question {n} {"x" * 80}"}},'
                f' {{"role": "assistant", "content": "answer {n} {"y" * 120}"}}]}}\n'
            )
    program = (
        "import sys, time, resource\n"
        "from medusa_train.dataset import read_conversations\n"
        "start = time.time(); stream = read_conversations(sys.argv[1]); count = sum(1 for _ in stream)\n"
        "seconds = time.time() - start\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20\n"
        "print(count, round(count / seconds), round(peak, 3))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, check=True)
    count, rate, peak = map(float, done.stdout.split())
    print(f"{count:.0f} rows at {rate:.0f} rows/s, peak {peak:.2f} GiB")
    assert count == 1_000_000 and peak < 1.0
