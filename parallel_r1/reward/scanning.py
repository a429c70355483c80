"""Where an answer may be cut: tokens outside all brackets, names, texts. Strings only, linear in their length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_TOKEN = re.compile(
    r"\\begin\{[a-z*]+\}|\\end\{[a-z*]+\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|[()\[\]{}]|<=|>=|:=|[=<>,;:&/ ]|[a-zA-Z]+",
    re.DOTALL,
)
OPENING, CLOSING = {"(", "[", "{", r"\{", r"\langle"}, {")", "]", "}", r"\}", r"\rangle"}


def top_level(text: str) -> Iterator[tuple[str, int, int]]:
    """(token, start, end) for the tokens that stand outside all brackets. A half-open interval is a bracket, too."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in OPENING or token.startswith(r"\begin"):
            depth += 1
        elif token in CLOSING or token.startswith(r"\end"):
            depth = max(depth - 1, 0)
        elif depth == 0:
            yield token, match.start(), match.end()


def split_at(text: str, wanted: Callable[[str, int, int], bool]) -> tuple[list[str], list[str]]:
    """(pieces, separators) of a text cut at the wanted top-level tokens."""
    pieces, separators, at = [], [], 0
    for token, start, end in top_level(text):
        if start >= at and wanted(token, start, end):
            pieces.append(text[at:start])
            separators.append(token)
            at = end
    return [*pieces, text[at:]], separators


def bracket_end(text: str) -> int:
    """Index after the bracket that closes the first one, -1 where none does."""
    depth = 0
    for match in _TOKEN.finditer(text):
        depth += (match[0] in OPENING) - (match[0] in CLOSING)
        if depth == 0 and match[0] in CLOSING:
            return match.end()
    return -1


def plain(text: str) -> str:
    """The text with every `\\text{...}` opened and white space collapsed."""
    return re.sub(r"\s+", " ", re.sub(r"\\text\{([^{}]*)\}", r"\1", text)).strip()


_NAME = re.compile(
    r"\\?[a-zA-Z]+'*(?:_(?:\{[^{}]*\}|\w))?(?:\([a-zA-Z](?:,\s*[a-zA-Z])*\))?|\\text\{[^{}]*\}(?:_(?:\{[^{}]*\}|\w))?"
    r"|\\(?:angle|triangle|overline|widehat|vec|hat|bar|mathbf)\s*\{?[ A-Za-z]+\}?|m?\\angle [A-Za-z]+|[A-Za-z ]+"
    r"|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\)|\[[A-Z]+\]|\|[A-Z]+\||[A-Za-z]\([^()]*\)|f\^\{?-1\}?\([a-z]\)"
)


def is_name(text: str) -> bool:
    """Whether the left side of an equation only names what the right side is."""
    return bool(_NAME.fullmatch(text.strip())) and text.strip() not in (r"\pi", "e", "i")


_IS = re.compile(
    r"(?:\\text\{)?(?:[A-Za-z][A-Za-z'-]*(?:, | |\} *)){1,12}?"
    r"(?:is|are|equals?|equal to|gives|yields)(?![A-Za-z]):?\s*\}?\s*"
    r"(?=\S)"
)
_COLON = re.compile(
    r"(?:\\text\{\s*[A-Za-z][A-Za-z' -]+:\s*\}|[A-Za-z][A-Za-z'-]+(?: [A-Za-z'-]+){0,4}\s?:(?!=))\s*(?=\S)"
)
_ABOUT = re.compile(
    r"(?:\\text\{\s*)?(?:approximately|about|exactly|roughly|around|only|an? total of|in total|total"
    r"|therefore|thus|hence|so|the (?:point|set|interval|ordered (?:pair|triple)|vector|number|value|equation)(?: of)?)"
    r"(?![A-Za-z]),?\s*\}?\s*(?=[^\s}])",
    re.IGNORECASE,
)


def without_label(text: str) -> str:
    for pattern in (_ABOUT, _IS, _COLON):
        if match := pattern.match(text):
            return text[match.end() :]
    return re.sub(r"^\\(?:approx|sim)(?![a-zA-Z])", "", text)
