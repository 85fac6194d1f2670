from optimum_neuronal.display.tables import GrowingTable, format_html, format_markdown, format_table


def test_columns_are_aligned_numbers_to_the_right():
    rows = [["wanda", 39.08, "60.00%"], ["sparsegpt, long", "1,234", "-"]]
    assert format_table(["method", "perplexity", "sparsity"], rows).split("\n") == [
        "method           perplexity  sparsity",
        "---------------  ----------  --------",
        "wanda                 39.08    60.00%",
        "sparsegpt, long       1,234  -",
    ]


def test_lines_end_without_blanks_and_a_table_may_be_empty():
    assert format_table(["a", "long name"], []) == "a  long name\n-  ---------"
    assert format_table(["", "b"], [["text", ""]]).split("\n") == ["      b", "----  -", "text"]


def test_what_begins_with_a_number_is_text():
    assert format_table(["wide column"], [["0.1 / 0.12"], ["-0.5"]]).split("\n")[2:] == ["0.1 / 0.12", "       -0.5"]


def test_versions_are_text():
    assert format_table(["wide column"], [["5.23.0"], ["5.23"]]).split("\n")[2:] == ["5.23.0", "       5.23"]


def test_a_cell_is_one_line_whatever_it_holds():
    table = format_table(["", "from\na file"], [["source", "x\n\nVerified\x1b[2J"]])
    assert table.split("\n") == [
        r"        from\na file",
        "------  --------------------",
        r"source  x\n\nVerified\x1b[2J",
    ]


def test_a_table_that_grows_looks_like_one_that_is_whole():
    rows, lines = [["60%", "Wanda", "39.08"], ["70%", "a long one", "5.1"]], []
    header = ("sparsity", "method", "perplexity")
    table = GrowingTable(header, ("60%", "a long one", "39.08"), lines.append)
    for number, row in enumerate(rows):
        assert len(lines) == 2 + number
        table.add(row)
    assert "\n".join(lines) == format_table(header, rows)


ROWS = [["wanda | ria", "39.08", "-"], ["<b>", "1,234", "60.00%"]]


def test_markdown():
    assert format_markdown(["method", "perplexity", "sparsity"], ROWS, bold={(0, 1)}).split("\n") == [
        "| method | perplexity | sparsity |",
        "| --- | ---: | ---: |",
        "| wanda \\| ria | **39.08** | - |",
        "| <b> | 1,234 | 60.00% |",
    ]
    assert format_markdown(["a"], []) == "| a |\n| --- |"


def test_html():
    left, right = 'style="text-align: left"', 'style="text-align: right"'
    page = format_html(["method", "perplexity"], [row[:2] for row in ROWS], bold={(1, 1)})
    assert f"<tr><td {left}>wanda | ria</td><td {right}>39.08</td></tr>" in page
    assert f"<tr><td {left}>&lt;b&gt;</td><td {right}><b>1,234</b></td></tr>" in page
    assert f"<thead><tr><th {left}>method</th><th {right}>perplexity</th></tr></thead>" in page
