"""Names that people type, and that other people's files hold: no path, no device, nothing that a terminal obeys."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vitrine.engine.errors import VitrineError, printable, refuse
from vitrine.engine.io.file_names import LONGEST, as_name, safe_name
from vitrine.engine.io.files import named

GOOD = (
    "portrait-t50",
    "a b",
    "Zoë",
    "人",
    "person.v2",
    "a" * LONGEST,
    "می‌خواهم",
    "👩‍🎨",
    "con artist",
    "console",
    "-x",
    "a+b=1",
)
BAD = (
    "", " ", ".hidden", "..", "a/b", "a\\b", "C:x", "x:stream", "*", "a?b", "<a>", "a|b", 'a"b', "a\nb", "a\x1b[2Jb",
    "a\u202eb", "a\u2028b", "a\u200fb", "a\udce9", "a.", "a ", " a", "~x", "CON", "con.txt", "Aux", "COM1", "lpt9.a.b", 
    "a\0b", "NUL .x", "com\u00b9", "a" * (LONGEST + 1), "人" * 100, None, 3,
)  # fmt: skip


def test_names():
    for name in GOOD:
        assert safe_name(name) == name == as_name(name)
    for name in BAD:
        with pytest.raises(VitrineError) as error:
            safe_name(name)
        assert str(error.value).isprintable()


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_becomes_a_name_or_an_error(text):
    try:
        name = as_name(text)
    except VitrineError:
        return
    assert safe_name(name) == name
    assert as_name("anna/../last") == "anna-..-last"


def test_errors_do_not_obey_what_they_quote(tmp_path):
    assert printable("a\x1b[31m\u202eb\n") == r"a\x1b[31m\u202eb\n"
    assert "\x1b" not in str(refuse("name", "\x1b[2J", "x", "y")) and "a\nb" in str(refuse("lines", "a\nb", "x", "y"))
    for parts in (("\x1b[2J", "x", "y", "z"), ("x", "y", "\x1b[2J", "z"), ("x", "y", "z", "delete \x1b[2J\u202e")):
        assert str(refuse(*parts)).isprintable(), "nor what they ask for"
    with pytest.raises(VitrineError, match="line") as error, named(tmp_path / "x\x1b\ny", "file", "line", "r"):
        raise ValueError("\x1b[2J")
    assert str(error.value).isprintable()
