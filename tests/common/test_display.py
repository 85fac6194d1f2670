from optimum_neuronal.common import display
from optimum_neuronal.common.display import escaped, format_bytes, format_duration


def test_what_is_not_printable_is_escaped_and_long_text_is_cut():
    for text, shown in (
        ("plain, Grüße, 日本語 {}\\", "plain, Grüße, 日本語 {}\\"),
        ("x\n\nVerified\r\t", r"x\n\nVerified\r\t"),
        ("\x1b[2J\x00\x7f\x9b", r"\x1b[2J\x00\x7f\x9b"),
        ("a\u202eb\u2028c\ufeff", r"a\u202eb\u2028c\ufeff"),
        ("\udc80\U000e0041", r"\udc80\U000e0041"),
        (7, "7"),
    ):
        assert escaped(text) == shown and escaped(text).isprintable()
    assert (escaped("abcdef\n", 3), escaped("abc", 3)) == ("abc... (7 characters)", "abc")


def test_columns_are_aligned_numbers_to_the_right():
    rows = [["wanda", 39.08, "60.00%", "0.1 / 0.12", "5.23.0"], ["sparsegpt, long", "1,234", "-", "-0.5", "5.23"]]
    assert display.format_table(["method", "a perplexity", "sparsity", "lambda", "version"], rows).split("\n") == [
        "method             a perplexity    sparsity  lambda      version",
        "---------------  --------------  ----------  ----------  ---------",
        "wanda                     39.08      60.00%  0.1 / 0.12  5.23.0",
        "sparsegpt, long           1,234           -  -0.5        5.23",
    ]


def test_markdown():
    rows = [["wanda | ria", "39.08", "-"], ["<b>", "1,234", "60.00%"]]
    assert display.format_markdown(["method", "perplexity", "sparsity"], rows, bold={(0, 1)}).split("\n")[1:] == [
        "|:-------------|-------------:|-----------:|",
        "| wanda \\| ria |    **39.08** |          - |",
        "| <b>          |        1,234 |     60.00% |",
    ]


def test_latex():
    rows = [["wanda & ria", "39.08 ± 0.10"], ["a_b", "1.5e+05"]]
    table = " ".join(display.format_latex(["method", "perplexity"], rows, bold={(0, 1)}).split())
    assert table.startswith(r"\begin{tabular}{lr} \toprule method & perplexity \\ \midrule")
    assert r"wanda \& ria & \textbf{39.08 $\pm$ 0.10} \\ a\_b & 1.5e+05 \\ \bottomrule" in table


def test_equal_rows_are_one():
    rows = [["0", "60%"], ["1", "60%"], ["2", "61%"], ["3", "60%"]]
    assert display.fold_rows(rows) == [["0 to 1", "60%"], ["2", "61%"], ["3", "60%"]]


def test_quantities():
    for size, text in ((999, "999 bytes"), (12_345, "12.35 kB"), (7_000_000_000, "7.00 GB"), (2 * 10**12, "2.00 TB")):
        assert format_bytes(size) == text
    for seconds, text in ((0.34, "0.34 seconds"), (59.6, "60 seconds"), (90, "1.5 minutes"), (7200, "2.0 hours")):
        assert format_duration(seconds) == text
