"""The documentation's table of families, made from the coverage matrix.

python tests/family_table.py            # writes it into docs/families.md; a test compares the two
"""

from pathlib import Path

from families import FAMILIES


PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- families: made by tests/family_table.py -->\n", "<!-- end of families -->\n"


def table() -> str:
    """Markdown: families with the same projections share a line."""
    rows: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        rows.setdefault(_projections(family.projections), []).append(f"{family.title} (`{name}`)")
    lines = [f"| {', '.join(titles)} | {projections} |" for projections, titles in rows.items()]
    return "\n".join(["| family (`model_type`) | what is pruned in each block |", "| --- | --- |", *lines, ""])


def _projections(names: str | tuple[str, ...]) -> str:
    """Names of all blocks by the module that holds them: `self_attn`: q_proj k_proj, ..."""
    parts: dict[str, list[str]] = {}
    for name in (names if isinstance(names, str) else " ".join(names)).split():
        parent, _, last = name.rpartition(".")
        known = parts.setdefault(parent.removesuffix(".*"), [])
        if last not in known:
            known.append(last)
    return "; ".join(f"{f'`{parent}`: ' if parent else ''}{' '.join(lasts)}" for parent, lasts in parts.items())


def in_page(text: str) -> str:
    """The table that the page's text holds."""
    return text.partition(BEGIN)[2].partition(END)[0]


def main():
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(BEGIN + in_page(text), BEGIN + table()), encoding="utf-8")


if __name__ == "__main__":
    main()
