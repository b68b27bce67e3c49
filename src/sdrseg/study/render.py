"""Tables for the terminal, as Markdown, CSV and LaTeX (booktabs)."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from sdrseg.errors import quantity
from sdrseg.study.tables import Block, Table, Value

STYLES = {0: "", 1: "bold", 2: "underline"}
WIDEST = 30
"""The most columns of a table in LaTeX; the largest of the paper has 28."""


def to_markdown(table: Table) -> str:
    parts = [f"**{table.title}**" if table.title else ""]
    for block in table.blocks:
        headers, rows = _rows(block, _marked_in_markdown)
        rule = ["---", *("---:" for _ in headers[1:])]
        lines = [f"| {' | '.join(cells)} |" for cells in (headers, rule, *rows)]
        parts.append(f"{block.title}\n\n" + "\n".join(lines))
    return "\n\n".join(filter(None, [*parts, *_notes(table)])) + "\n"


def to_dict(table: Table) -> dict[str, Any]:
    """The table for `--json`: one entry per number."""
    numbers = []
    for block in table.blocks:
        for line in block.lines:
            for name, value in zip(block.values, line.values, strict=True):
                ours = vars(value.ours) if value.ours else {"mean": None, "std": None, "count": 0}
                place = {"scenario": block.title, "row": line.name, "value": name}
                facts = {"mean": ours["mean"], "std": ours["std"], "seeds": ours["count"], "paper": value.paper}
                numbers.append({**place, **facts, "misprint": value.misprint, "difference": value.difference})
    return {"table": table.name, "numbers": numbers, "notes": table.notes, "missing": table.missing}


def to_csv(table: Table) -> str:
    """One line per number, for other programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "scenario", "row", "value", "mean", "std", "seeds", "paper", "misprint", "difference"])
    for number in to_dict(table)["numbers"]:
        texts = {key: "" if number[key] is None else f"{number[key]:.4f}" for key in ("mean", "std", "difference")}
        facts = {**number, **texts, "misprint": "yes" if number["misprint"] else ""}
        writer.writerow([table.name, *facts.values()])
    return out.getvalue()


def to_latex(table: Table) -> str:
    """Tables with booktabs: scenarios side by side, or one below the other if they are wide; the paper's numbers and
    differences are below ours."""
    together = sum(len(block.values) for block in table.blocks) <= WIDEST
    parts = [table.blocks] if together and table.blocks else [(block,) for block in table.blocks]
    tabulars = [_tabular(blocks) for blocks in parts]
    notes = [f"% {_tex(note)}" for note in _notes(table)]
    return "\n".join([r"% needs \usepackage{booktabs}", "\n\n".join(tabulars), *notes]) + "\n"


def _tabular(blocks: Sequence[Block]) -> str:
    names = list(dict.fromkeys(line.name for block in blocks for line in block.lines))
    width = [len(block.values) for block in blocks]
    lines = [r"\begin{tabular}{l" + "".join(" " + "r" * w for w in width) + "}", r"\toprule"]
    headers = " & ".join(rf"\multicolumn{{{w}}}{{c}}{{{_tex(b.title)}}}" for w, b in zip(width, blocks, strict=True))
    lines.append(f" & {headers} \\\\")
    first = 2
    rules = []
    for w in width:
        rules.append(rf"\cmidrule(lr){{{first}-{first + w - 1}}}")
        first += w
    lines.append(" ".join(rules))
    lines.append(" & ".join([blocks[0].header, *(_tex(value) for block in blocks for value in block.values)]) + r" \\")
    lines.append(r"\midrule")
    for name in names:
        ours, paper = [], []
        for block in blocks:
            values = next((line.values for line in block.lines if line.name == name), (Value(),) * len(block.values))
            ours += [_marked_in_latex(value) for value in values]
            paper += [_printed_in_latex(value) for value in values]
        lines.append(f"{_tex(name)} & {' & '.join(ours)} \\\\")
        if any(paper):
            lines.append(rf"\quad\textit{{paper}} & {' & '.join(paper)} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def to_terminal(table: Table) -> RenderableType:
    parts: list[RenderableType] = [Text(table.title, style="bold")] if table.title else []
    for block in table.blocks:
        headers, _ = _rows(block, lambda value: "")
        shown = RichTable(title=Text(block.title), title_justify="left", header_style="bold")
        for number, header in enumerate(headers):
            shown.add_column(header, justify="right" if number else "left")
        for line in block.lines:
            cells = [Text(line.name)]
            for value in line.values:
                text = value.ours.text() if value.ours else "–"
                cells.append(Text(text, style=STYLES[value.rank]))
                if _has_paper(block):
                    cells += [Text(part) for part in _paper_cells(value)]
            shown.add_row(*cells)
        parts.append(shown)
    return Group(*parts, *(Text(note) for note in _notes(table)))


def _rows(block: Block, marked: Callable[[Value], str]) -> tuple[list[str], list[list[str]]]:
    headers, paper = [""], _has_paper(block)
    for name in block.values:
        headers += [name, "paper", "difference"] if paper else [name]
    rows = []
    for line in block.lines:
        row = [_plain(line.name).replace("|", "\\|")]
        for value in line.values:
            row += [marked(value), *_paper_cells(value)] if paper else [marked(value)]
        rows.append(row)
    return headers, rows


def _has_paper(block: Block) -> bool:
    return any(value.paper is not None for line in block.lines for value in line.values)


def _paper_cells(value: Value) -> list[str]:
    paper = "–" if value.paper is None else f"{value.paper:.1f}" + ("!" if value.misprint else "")
    return [paper, "–" if value.difference is None else f"{value.difference:+.1f}"]


def _marked_in_markdown(value: Value) -> str:
    if value.ours is None:
        return "–"
    text = value.ours.text()
    return {0: text, 1: f"**{text}**", 2: f"<u>{text}</u>"}[value.rank]


def _marked_in_latex(value: Value) -> str:
    if value.ours is None:
        return "--"
    mean, spread = (
        f"{value.ours.mean:.1f}".replace("-", "$-$"),
        "" if value.ours.std is None else rf"\,{{\scriptsize$\pm${value.ours.std:.1f}}}",
    )
    return {0: mean, 1: rf"\textbf{{{mean}}}", 2: rf"\underline{{{mean}}}"}[value.rank] + spread


def _printed_in_latex(value: Value) -> str:
    if value.paper is None:
        return ""
    gap = "" if value.difference is None else rf"\,{{\scriptsize({value.difference:+.1f})}}".replace("-", "$-$")
    return rf"\textit{{{value.paper:.1f}}}" + ("!" if value.misprint else "") + gap


def _tex(text: str) -> str:
    known = {"%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "†": r"\dag{}"}
    known |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "−": "--"}
    return "".join(known.get(c, c) for c in _plain(text))


def _plain(text: str) -> str:
    """A name on one line, with question marks for characters that are not printable."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _notes(table: Table) -> list[str]:
    """The lines below a table."""
    notes = list(table.notes)
    if table.missing:
        some = "; ".join(table.missing[:5]) + ("; …" if len(table.missing) > 5 else "")
        notes.append(f"Missing: {quantity(len(table.missing), 'run')} ({some}).")
    return notes
