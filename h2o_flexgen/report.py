"""`python -m h2o_flexgen.report`: one page that shows what runs did, in a file that loads nothing.

    python -m h2o_flexgen.report record.json trace.json -o report.html
    python -m h2o_flexgen.report results/2026-11-22-offload-peers/16+128 docs/demo/quality.json -o report.html

It takes records of run, bench, search, evaluate and demo, traces, and folders of them, and says on the page what they
lack. The file's name goes to stdout. The last line of stdout is one JSON object, unless stdout is a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.cli.program import add_json, output_file, print_error, program, write_json, write_result
from h2o_flexgen.config.flags import called
from h2o_flexgen.pages.reading import read
from h2o_flexgen.pages.whole import write_page
from h2o_flexgen.units import format_bytes


@program
def main(argv: Sequence[str] | None) -> int:
    """Runs the program; returns its exit code: 2 for a file that is no record."""
    parser = Parser(
        prog=called("report"), description="Makes one page of records: a single HTML file that loads nothing."
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS", help="files of records, or folders of them")
    parser.add_argument("--output", "-o", default="report.html", metavar="FILE", help="the page (default: report.html)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing FILE")
    parser.add_argument("--title", default="", metavar="TEXT", help="title of the page (default: the models)")
    add_json(parser)
    with parser.parsed(argv) as args:
        output = output_file("--output", args.output, keep=not args.overwrite)
    material = read(args.records)
    for name, what in material.files.items():
        if what.startswith("left out"):
            print_error(f"note: {name} is {what}")
    nbytes = write_page(material, output or Path("report.html"), args.title)
    write_result(f"{output}: {format_bytes(nbytes)}, to be opened in a browser\n")
    write_json(json.dumps({"page": str(output), "bytes": nbytes, "read": material.files}), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
