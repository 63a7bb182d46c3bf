import pytest
from hypothesis import given
from hypothesis import strategies as st

from gendurable.core.limits import (
    DEFAULT_LIMITS,
    Limits,
    check_key,
    check_name,
    check_unique_key,
    error_text,
    show,
)
from gendurable.errors import InvalidInstance

SURROGATE = "\ud800"


@pytest.mark.parametrize("name", ["a", "send mail", "größe", "a" * 255, "é" * 127])
def test_a_printable_name_of_up_to_255_bytes_is_taken(name):
    assert check_name("queue", name) == name


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "empty; give 1 to 255 bytes"),
        ("a" * 256, "has 256 bytes; give at most 255"),
        ("é" * 128, "has 256 bytes"),
        ("a\nb", r"'a\\nb' has unprintable characters; use printable text"),
        ("a\0", "unprintable"),
        (SURROGATE, "lone surrogate"),
        (None, "None is no text; give a str"),
        (b"a", "b'a' is no text"),
        pytest.param(10**5000, "an integer of 16610 bits> is no text", id="huge"),
    ],
)
def test_any_other_name_is_refused_with_field_value_and_remedy(name, complaint):
    with pytest.raises(InvalidInstance, match=f"^queue: .*{complaint}"):
        check_name("queue", name)


@pytest.mark.parametrize("key", ["k", "line\nbreak", "k" * 1024])
def test_a_key_may_hold_any_text_but_nul(key):
    assert check_key("partition_key", key) == key


@pytest.mark.parametrize("key", ["", "k" * 1025, "a\0b", SURROGATE, 7])
def test_any_other_key_is_refused(key):
    with pytest.raises(InvalidInstance, match=r"^partition_key: .*; (give|leave)"):
        check_key("partition_key", key)


@pytest.mark.parametrize(
    ("key", "stored"), [("ключ", "ключ".encode()), (b"\0\xff", b"\0\xff"), (b"k" * 1024, b"k" * 1024)]
)
def test_a_unique_key_is_bytes_and_text_becomes_utf8(key, stored):
    assert check_unique_key(key) == stored


@pytest.mark.parametrize("key", ["", b"", b"k" * 1025, "k" * 1025, "a\0", SURROGATE, bytearray(b"k"), None])
def test_any_other_unique_key_is_refused(key):
    with pytest.raises(InvalidInstance, match=r"^unique_key: "):
        check_unique_key(key)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("ValueError: no\n\tsuch thing é", "ValueError: no\n\tsuch thing é"),
        ("a\0b", r"a\x00b"),
        ("a\rb\x1b[31m\x7f\x85", r"a\rb\x1b[31m\x7f\x85"),
        ("a\ud83db", r"a\ud83db"),
        (r"a\x00b", r"a\x00b"),
    ],
)
def test_error_text_escapes_what_a_text_column_refuses(text, stored):
    assert error_text(text) == stored


def test_a_long_error_text_is_cut_with_a_mark_between_characters():
    text = error_text("é" * 10_000)
    assert text.endswith("é… (cut)")
    assert DEFAULT_LIMITS.error_bytes - 1 <= len(text.encode()) <= DEFAULT_LIMITS.error_bytes


def test_an_error_text_of_just_the_limit_stays_whole():
    text = "x" * DEFAULT_LIMITS.error_bytes
    assert error_text(text) == text
    assert error_text(text + "x").endswith("… (cut)")


# Hypothesis' own text has no surrogates; errors may.
anything = st.text(st.characters(codec=None) | st.sampled_from("\0\x1b\ud800\udfff\n"))


@given(text=anything, most=st.integers(20, 60))
def test_any_error_text_becomes_storable_and_stays_as_it_is(text, most):
    limits = Limits(error_bytes=most)
    stored = error_text(text, limits=limits)
    assert len(stored.encode()) <= most
    assert "\0" not in stored
    assert error_text(stored, limits=limits) == stored


class Hostile:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("value", ["x" * 9999, list(range(9999)), Hostile(), [10**9999], [[[[[[]]]]]]])
def test_whatever_is_shown_in_a_message_is_short(value):
    assert len(show(value)) < 120
