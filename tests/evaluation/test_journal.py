"""Interrupted runs continue; other settings never mix."""

from __future__ import annotations

import pytest

from medusa_train.errors import UserError
from medusa_train.evaluation.journal import Journal, settings_hash, source_hash
from tests.evaluation.made_up import arm_info, group_info, random_records

SETTINGS = {"base": "b", "tokens": 8}


def records(count=3):
    return random_records(count, group_info(arm_info()), tokens=12)


def test_what_was_appended_is_read_back_equal(tmp_path):
    journal = Journal(tmp_path, SETTINGS)
    for record in records():
        journal.append(record)
    assert Journal(tmp_path, SETTINGS).records == {record.prompt_id: record for record in records()}


def test_other_settings_use_another_file(tmp_path):
    Journal(tmp_path, SETTINGS).append(records()[0])
    other = Journal(tmp_path, {**SETTINGS, "tokens": 9})
    assert other.records == {}
    assert settings_hash(SETTINGS) != settings_hash({**SETTINGS, "tokens": 9})
    assert settings_hash(SETTINGS) == settings_hash(dict(reversed(SETTINGS.items())))


@pytest.mark.parametrize("keep", range(1, 60, 7))
def test_a_line_torn_by_an_interruption_is_dropped_and_written_again(tmp_path, keep):
    first, second, third = records()
    journal = Journal(tmp_path, SETTINGS)
    journal.append(first)
    whole = journal.path.read_bytes()
    journal.append(second)
    journal.path.write_bytes(journal.path.read_bytes()[: len(whole) + keep])
    again = Journal(tmp_path, SETTINGS)
    assert list(again.records) == [first.prompt_id]
    again.append(third)
    assert list(Journal(tmp_path, SETTINGS).records) == [first.prompt_id, third.prompt_id]


def test_a_torn_first_line_starts_over(tmp_path):
    journal = Journal(tmp_path, SETTINGS)
    journal.append(records()[0])
    journal.path.write_bytes(journal.path.read_bytes()[:10])
    again = Journal(tmp_path, SETTINGS)
    assert again.records == {}
    again.append(records()[1])
    assert len(Journal(tmp_path, SETTINGS).records) == 1


@pytest.mark.parametrize("line", ["not json", "[]", '{"prompt_id": "x"}'])
def test_a_damaged_line_is_named(tmp_path, line):
    journal = Journal(tmp_path, SETTINGS)
    journal.append(records()[0])
    with open(journal.path, "a", encoding="utf-8") as handle:
        handle.write(line + "\n")
    with pytest.raises(UserError) as caught:
        Journal(tmp_path, SETTINGS)
    assert f"{journal.path}:3" in str(caught.value)


def test_the_source_hash_follows_every_module(tmp_path):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "a.py").write_text("x = 1\n")
    first = source_hash(package)
    (package / "notes.txt").write_text("not a module")
    assert source_hash(package) == first
    (package / "inner" / "a.py").write_text("x = 2\n")
    second = source_hash(package)
    (package / "b.py").write_text("")
    assert len({first, second, source_hash(package)}) == 3
