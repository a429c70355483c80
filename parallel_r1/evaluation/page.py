"""The report as one HTML file that opens offline: tables, charts, and a viewer of responses.

Everything shown is data that models and data sets wrote: the template escapes it, the viewer's script puts it into text
nodes only, and a content security policy lets nothing run but that script and nothing be loaded at all.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel_r1.evaluation.charts import Section, Table
from parallel_r1.evaluation.page_rows import chosen, groups_of, script_json, viewer_data
from parallel_r1.evaluation.page_text import cell, shown

TEMPLATES = Path(__file__).parent / "templates"
MOST_ROWS = 1000
"""Responses that a page holds unless told otherwise."""


def write_page(
    path: Path,
    *,
    title: str,
    report: Mapping[str, Any] | None = None,
    rows: Iterable[Mapping[str, Any]] = (),
    about: Mapping[str, Any] | None = None,
    sections: Sequence[Section] = (),
    most: int = MOST_ROWS,
) -> None:
    """Write the page to a file, whole or not at all.

    report: what `test` found, shown first. rows: responses as `evaluation.records` describes them, in any order. about:
    facts under the title. most: responses in the page, whole groups evenly spread over all.
    """
    from parallel_r1.evaluation.page_report import report_facts, report_sections

    about = {**(report_facts(report) if report else {}), **(about or {})}
    found = [*(report_sections(report) if report else []), *sections]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".partial")
    draft.write_text(render(title, about, found, rows, most), encoding="utf-8", errors="replace")
    os.replace(draft, path)


def render(
    title: str,
    about: Mapping[str, Any],
    sections: Sequence[Section],
    rows: Iterable[Mapping[str, Any]],
    most: int = MOST_ROWS,
) -> str:
    """The page as HTML; arguments as in `write_page`."""
    from jinja2 import Environment, FileSystemLoader

    groups = groups_of(rows)
    kept = chosen(groups, most)
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"shown": shown, "cell": cell, "is_number_column": _is_number_column}
    return environment.get_template("page.html").render(
        title=title,
        about=about,
        sections=sections,
        groups=script_json(viewer_data(kept)) if kept else "",
        rows_note=_rows_note(sum(map(len, kept)), sum(map(len, groups))),
        css=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=f"sha256-{digest}",
    )


def _rows_note(kept: int, all_of_them: int) -> str:
    if kept == all_of_them:
        return f"All {kept:,} responses of the files."
    return f"{kept:,} of the files' {all_of_them:,} responses, whole groups spread evenly over all."


def _is_number_column(table: Table, column: int) -> bool:
    return any(len(row) > column and not isinstance(row[column], str | None) for row in table.rows)
