"""Tables in the documentation that a script makes: they stand between two marks that name the script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def parts(page: str, script: str) -> tuple[str, str, str]:
    """What stands in a page before, between and after the marks of a script."""
    text = (DOCS / page).read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"<!-- begin: scripts/{script} -->")
    inside, end, after = rest.partition(f"<!-- end: scripts/{script} -->")
    assert begin and end, f"docs/{page}: the marks of scripts/{script} are not there"
    return before + begin + "\n\n", inside.strip("\n") + "\n", "\n" + end + after


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; columns that begin with a word stand left, numbers right."""
    rule = ["---" if cell[:1].isalpha() else "---:" for cell in rows[0]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *rows))


def print_or_write(page: str, script: str, made: str) -> None:
    """Print tables, or with --write put them into their page."""
    if sys.argv[1:] == ["--write"]:
        before, _, after = parts(page, script)
        (DOCS / page).write_text(before + made + after, encoding="utf-8")
    else:
        print(made, end="")
