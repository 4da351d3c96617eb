"""Tables as aligned Markdown: readable in a terminal, and where it is pasted."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose columns are padded to their widest cell; the first `left` columns are left-aligned."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if column < left else "-" * max(0, width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])
