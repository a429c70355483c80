"""Rows as the page's viewer takes them: in groups, bounded, as JSON that is safe inside a `<script>` element."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parallel_r1.evaluation.row_files import finite

MAX_TEXT = 200_000
"""Characters of a response that a page holds; the file the page was made from has the rest."""
MAX_TOKEN_BYTES = 24_000_000
"""Bytes of a page that token columns may take; later responses are shown as text alone."""

# columns of a row that are a group's, or that have a place of their own in the viewer
_OF_GROUP = ("id", "tier", "question", "answer", "stage", "iteration")
_PLACED = (
    *_OF_GROUP,
    *("group", "sample", "mode", "response", "finished", "correct", "final_answer", "parallel", "valid"),
    *("total_tokens", "critical_tokens", "reward", "advantage", "terms", "tokens", "logprobs"),
    *("path_agreement", "parallel_positions", "block_labels"),
)


def groups_of(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Rows that answer one problem in one place: a training iteration, or an evaluation with all its modes.

    In the order of their first rows.
    """
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(str(row.get(name)) for name in ("stage", "iteration", "group", "tier", "id"))
        found.setdefault(key, []).append(row)
    return list(found.values())


def chosen(groups: Sequence[list[Mapping[str, Any]]], most: int) -> list[list[Mapping[str, Any]]]:
    """Whole groups of at most `most` rows in all (but one group at least), spread evenly over all that there are."""
    total = sum(map(len, groups))
    if total <= most:
        return list(groups)
    kept: list[list[Mapping[str, Any]]] = []
    left = most
    wanted = max(1, len(groups) * most // total)
    for n in range(wanted):
        group = groups[n * len(groups) // wanted]
        if kept and len(group) > left:
            break
        kept.append(group)
        left -= len(group)
    return kept


def viewer_data(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One JSON object a group, with the rows of the group under `rows`."""
    budget = MAX_TOKEN_BYTES
    out = []
    for group in groups:
        rows = []
        for row in group:
            shown, size = _row(row, budget)
            budget -= size
            rows.append(shown)
        head = {name: group[0][name] for name in _OF_GROUP if group[0].get(name) is not None}
        out.append({**head, "rows": rows})
    return out


def _row(row: Mapping[str, Any], budget: int) -> tuple[dict[str, Any], int]:
    """A row for the viewer, and what its token columns weigh."""
    text = row.get("response")
    text = text if isinstance(text, str) else ""
    verdict = "cut" if not row.get("finished", True) else "right" if row.get("correct") else "wrong"
    out: dict[str, Any] = {"verdict": verdict}
    agreement = row.get("path_agreement")
    if isinstance(agreement, int | float):
        out["agreement"] = agreement
    for name in ("sample", "mode", "final_answer", "parallel", "valid", "total_tokens", "critical_tokens", "reward"):
        if row.get(name) is not None:
            out[name] = row[name]
    for name in ("advantage", "terms", "parallel_positions", "block_labels"):
        if row.get(name) is not None:
            out[name] = row[name]
    more = {name: value for name, value in row.items() if name not in _PLACED and isinstance(value, int | float | str)}
    if more:
        out["more"] = more
    tokens = aligned(text, row.get("tokens"), row.get("logprobs")) if len(text) <= MAX_TEXT else None
    if tokens is not None:
        size = len(json.dumps(tokens))
        if size <= budget:
            return out | tokens, size
    out["response"] = text[:MAX_TEXT]
    if len(text) > MAX_TEXT:
        out["left_out"] = len(text) - MAX_TEXT
    return out, 0


def aligned(text: str, tokens: Any, logprobs: Any) -> dict[str, Any] | None:
    """Token columns whose pieces are slices of the text: `tokens`, `logprobs`, and `extra`, how many at the end are not
    in the text (such as end-of-sequence).

    A character that spans several tokens makes one piece of them; its log-probability is their sum. None where there
    are no columns, or where the pieces are not those of the text.
    """
    if not isinstance(tokens, list) or not isinstance(logprobs, list) or len(tokens) != len(logprobs):
        return None
    pieces: list[str] = []
    values: list[float | None] = []
    at, i = 0, 0
    while i < len(tokens) and at < len(text):
        piece, value = tokens[i], logprobs[i]
        i += 1
        if not text.startswith(piece, at) or not piece:
            # bytes of one character: they end where the next piece that is whole is found
            while i < len(tokens) and "\ufffd" in tokens[i]:
                value = _sum(value, logprobs[i])
                i += 1
            end = text.find(tokens[i], at) if i < len(tokens) and tokens[i] else len(text)
            if end < 0 or end - at > 16 or "\ufffd" not in piece:
                return None
            piece = text[at:end]
        at += len(piece)
        pieces.append(piece)
        values.append(value)
    if at < len(text):
        return None
    extra = len(tokens) - i
    return {"tokens": pieces + tokens[i:], "logprobs": values + logprobs[i:], "extra": extra}


def _sum(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else round(a + b, 4)


def script_json(value: Any) -> str:
    """JSON for inside `<script type="application/json">`: no text in it can end the element or open a comment."""
    text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # halves of surrogate pairs have no UTF-8
    return "".join(text).encode("utf-8", errors="replace").decode("utf-8")
