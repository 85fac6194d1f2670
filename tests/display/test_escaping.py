import pytest

from optimum_neuronal.display.escaping import escaped


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain, Grüße, 日本語 {}\\", "plain, Grüße, 日本語 {}\\"),
        ("x\n\nVerified\r\t", r"x\n\nVerified\r\t"),
        ("\x1b[2J\x00\x7f\x9b", r"\x1b[2J\x00\x7f\x9b"),
        ("a\u202eb\u2028c\ufeff", r"a\u202eb\u2028c\ufeff"),
        ("\udc80\U000e0041", r"\udc80\U000e0041"),
        (7, "7"),
    ],
)
def test_what_is_not_printable_is_escaped(text, shown):
    assert escaped(text) == shown and escaped(text).isprintable()


def test_long_text_is_cut():
    assert escaped("abcdef\n", 3) == "abc... (7 characters)"
    assert escaped("abc", 3) == "abc"
