"""Tables, ages and JSON, as people and programs read them."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gendurable.cli import output
from gendurable.cli.failures import one_line

NOW = datetime(2031, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m0s"),
        (192, "3m12s"),
        (3600, "1h0m"),
        (7380, "2h3m"),
        (86_400, "1d0h"),
        (30 * 86_400 + 7200, "30d2h"),
    ],
)
def test_a_span_is_told_in_its_two_largest_units(seconds: float, text: str):
    assert output.span(timedelta(seconds=seconds)) == text


def test_an_instant_is_ago_or_ahead():
    assert output.ago(NOW - timedelta(seconds=5), NOW) == "5s"
    assert output.ago(NOW + timedelta(minutes=2), NOW) == "in 2m0s"
    assert output.ago(None, NOW) == ""


@given(st.text())
def test_nothing_that_is_printed_can_steer_a_terminal(text: str):
    assert output.printable(text).isprintable()
    assert one_line(text).isprintable()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_json_says_what_it_was_given_without_steering_anything(text: str):
    written = output.to_json({"x": text})
    assert json.loads(written) == {"x": text}
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in written)


def test_json_writes_times_and_keys_as_text():
    document = {"at": NOW, "text": "schlüssel".encode(), "bytes": b"\xff\x00"}
    assert json.loads(output.to_json(document)) == {
        "at": "2031-01-01T00:00:00+00:00",
        "text": "schlüssel",
        "bytes": r"\xff00",
    }


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_columns_are_aligned_and_numbers_stand_to_the_right(capsys: pytest.CaptureFixture[str]):
    output.table(["id", "name"], [(1, "a"), (100, "bc"), (20, None)], right=["id"])
    assert lines(capsys) == [" ID  NAME", "  1  a", "100  bc", " 20"]


def test_wide_and_combining_letters_take_the_room_they_take(capsys: pytest.CaptureFixture[str]):
    output.table(["name", "x"], [("出荷", 1), ("e\N{COMBINING ACUTE ACCENT}", 2), ("abcd", 3)])
    assert lines(capsys) == ["NAME  X", "出荷  1", "e\N{COMBINING ACUTE ACCENT}     2", "abcd  3"]


def test_a_table_without_rows_is_its_headings(capsys: pytest.CaptureFixture[str]):
    output.table(["id", "name"], [])
    assert lines(capsys) == ["ID  NAME"]


def test_on_a_terminal_a_column_that_is_to_be_read_goes_on_in_the_next_line(capsys, monkeypatch: pytest.MonkeyPatch):
    rows = [("a", "one two three four five six"), ("b", "seven")]
    output.table(["name", "story"], rows, wrapped=True)
    assert lines(capsys)[1] == "a     one two three four five six"
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    output.table(["name", "story"], rows, wrapped=True)
    assert lines(capsys) == ["NAME  STORY", "a     one two three", "      four five six", "b     seven"]


def test_on_a_terminal_the_widest_columns_give_way_and_some_never_do(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    output.table(["id", "status", "story"], [(1, "awaiting_children", "x" * 100)], right=["id"], whole=["status"])
    row = lines(capsys)[1]
    assert len(row) == 40
    assert "awaiting_children" in row
    assert row.endswith("x…")
    monkeypatch.setenv("COLUMNS", "5")
    output.table(["id", "status", "story"], [(1, "awaiting_children", "x" * 100)], right=["id"], whole=["status"])
    assert "awaiting_children  xxxxx…" in lines(capsys)[1]
