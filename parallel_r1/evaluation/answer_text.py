"""A prediction as text for a terminal. Model output is untrusted: nothing in it reaches the terminal as a command."""

from __future__ import annotations

import re
import unicodedata

from parallel_r1.evaluation.records import Row

MAX_CHARS = 4_000
"""Of one path, summary or response; the file holds all of it."""


def printable(text: str) -> str:
    """The text without anything that a terminal obeys: control, formatting (bidirectional marks among them) and
    unassigned characters are written as escapes; line breaks and tabs stay. At most MAX_CHARS characters."""
    shown = re.sub(r"[^\n\t -~]", lambda match: _shown(match[0]), text[:MAX_CHARS])
    return shown if len(text) <= MAX_CHARS else f"{shown} [... {len(text) - MAX_CHARS} more characters]"


def _shown(character: str) -> str:
    # C: control, format, surrogate, private use, unassigned; Zl, Zp: line breaks that not every terminal counts
    if unicodedata.category(character)[0] == "C" or unicodedata.category(character) in ("Zl", "Zp"):
        return character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return character


def answer_text(row: Row, number: int, of: int) -> str:
    """One prediction: question, answer, how the attempts agree, then the response's blocks or its text."""
    attempts = row["attempts"]
    answer = "none" if row["final_answer"] is None else printable(row["final_answer"])
    verdict = {True: " (right)", False: f" (wrong: {printable(row['answer'])})", None: ""}[row["correct"]]
    lines = [
        f"[{number}/{of}] {printable(row['question'])}",
        f"  answer      {answer}{verdict}",
        f"  agreement   {round(row['agreement'] * len(attempts))} of {len(attempts)} attempts, "
        f"confidence {row['confidence']:.3f}, {row['tokens_of_all_attempts']} tokens",
    ]
    if len(row["votes"]) > 1:
        lines.append("  votes       " + ", ".join(f"{printable(a)}: {n}" for a, n in row["votes"].items()))
    for block, (paths, summary) in enumerate(zip(row["paths"], row["summaries"], strict=True), 1):
        head = f"  block {block}     " if len(row["paths"]) > 1 else "  "
        lines += [f"{head}path {i:<6} {_indented(path)}" for i, path in enumerate(paths, 1)]
        lines.append(f"{head}summary     {_indented(summary)}")
    if not row["paths"]:
        lines.append(f"  response    {_indented(row['response'])}")
    return "\n".join(lines)


def _indented(text: str) -> str:
    return printable(text.strip()).replace("\n", "\n              ")
