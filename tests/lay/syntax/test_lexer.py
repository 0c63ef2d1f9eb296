"""Tokens, quoted texts, positions and the picture of an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import UsageError
from ckptd.lay.syntax import lexer
from ckptd.lay.syntax.lexer import Scanner, quote
from ckptd.lay.syntax.tree import Position


def tokens(text: str) -> list[tuple[str, str]]:
    s = Scanner(text, "t.lay")
    out: list[tuple[str, str]] = []
    while (token := s.take()).kind != "end":
        out.append((token.kind, token.text))
    return out


def test_kinds_of_tokens() -> None:
    assert tokens('kv@tp:ceil/40e6 "a # b" ... -> // 4GiB') == [
        ("word", "kv"),
        ("mark", "@"),
        ("word", "tp"),
        ("mark", ":"),
        ("word", "ceil"),
        ("mark", "/"),
        ("number", "40e6"),
        ("string", '"a # b"'),
        ("mark", "..."),
        ("mark", "->"),
        ("mark", "//"),
        ("number", "4GiB"),
    ]


def test_comments_and_blanks_are_skipped_and_kept() -> None:
    s = Scanner("\ufeff a # one\r\n\tb#two", "t.lay")
    assert [s.take().text for _ in range(4)] == ["a", "\n", "b", ""]
    assert list(s.comments.values()) == ["# one\r", "#two"]


def test_line_ends_are_blanks_within_brackets() -> None:
    s = Scanner("[\n a\n]\n", "t.lay")
    s.open("[")
    assert s.word("a word") == "a"
    s.close("]")
    assert s.peek().kind == "newline"


@given(st.text(max_size=20))
def test_quoted_texts_read_back(text: str) -> None:
    quoted = quote(text)
    assert "\n" not in quoted
    s = Scanner(quoted, "t.lay")
    assert s.string("a text") == text
    assert s.peek().kind == "end"


@pytest.mark.parametrize("text", [r'"\q"', r'"\u12"', r'"\ud800"', r'"\uzzzz"'])
def test_unknown_escapes(text: str) -> None:
    with pytest.raises(UsageError, match="escapes") as caught:
        Scanner(text, "t.lay").string("a text")
    assert caught.value.where == "t.lay:1:2"


def test_positions_count_from_one() -> None:
    s = Scanner("a\n  bcd e", "t.lay")
    s.take(), s.take()
    token = s.take()
    assert s.position(token.start) == Position("t.lay", 2, 3, 3)


def test_an_error_shows_the_line_with_a_caret() -> None:
    s = Scanner("first\n\tb = 'x", "t.lay")
    s.take(), s.take(), s.take(), s.take()
    error = s.fail("a dimension", hint="none")
    assert error.kind == "lay-syntax"
    assert str(error) == (
        "Lay syntax error:\n"
        "  2 |  b = 'x\n"
        "    |      ^\n"
        "  where:  t.lay:2:6\n"
        "  wanted: a dimension\n"
        "  found:  '''\n"
        "  hint:   none"
    )


def test_of_a_long_line_only_what_is_near_is_shown() -> None:
    s = Scanner("x" * 1000 + " " + "y" * 1000, "t.lay")
    s.take()
    shown = str(s.fail("nothing")).splitlines()
    assert len(shown[1]) < 120
    assert shown[1][shown[2].index("^")] == "y"
    assert shown[1][shown[2].index("^") - 1] == " "


def test_an_error_names_the_bracket_that_is_open() -> None:
    s = Scanner("[ a\nb = c", "t.lay")
    s.open("[")
    s.take(), s.take()
    assert s.fail("']'").hint == "'[' in line 1 is not closed"


def test_too_long_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexer, "MAX_TEXT", 10)
    Scanner("x" * 10, "t.lay")
    with pytest.raises(UsageError, match="too long"):
        Scanner("x" * 11, "t.lay")
