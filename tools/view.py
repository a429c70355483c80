"""A page of a run and of its responses: one HTML file that opens offline.

    python tools/view.py runs/quickstart                         a run: curves, behaviour, tests, responses
    python tools/view.py runs/quickstart/stages/hard/rollouts    the responses of a stage (or one .jsonl[.gz] file)
    python tools/view.py runs/quickstart/test/all                what `test` found

Exit status: 0, or 2 for a path that holds nothing to show.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from parallel_r1.evaluation.page import MOST_ROWS, write_page
from parallel_r1.evaluation.page_report import report_facts, report_sections
from parallel_r1.evaluation.run_page import find, rows_of, run_sections


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = out.add_argument
    add("paths", metavar="PATH", nargs="+", type=Path, help="run folders, folders of `test`, folders or files of rows")
    add("--out", metavar="FILE", type=Path, help="the page (default: report.html in the first folder)")
    add("--title", help="default: the first path")
    add("--most", type=int, default=MOST_ROWS, help="responses in the page, evenly spread (default: %(default)s)")
    return out


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.most < 1:
        parser().error(f"--most {options.most}: give 1 or more")
    first = options.paths[0]
    out = options.out or (first if first.is_dir() else first.parent) / "report.html"
    try:
        sources = [find(path) for path in options.paths]
        sections = [section for s in sources if s.run for section in run_sections(s.run)]
        reports = [report for s in sources for report in s.reports.values()]
        sections += [part for report in reports for part in report_sections(report)]
        about = report_facts(reports[0]) if len(reports) == 1 else {}
        rows = list(rows_of(sources))
        if not rows and not sections:
            raise FileNotFoundError(f"{first}: holds no rollouts, no test and no curves; run fit or test first")
        title = options.title or str(first)
        write_page(out, title=title, about=about, sections=sections, rows=rows, most=options.most)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(rows)} responses: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
