"""Where a response states its final answer. Text in, text out, linear in the response, whatever a model wrote.

In order: the last `Final Answer:` line (or `Answer:`, `####`, `<answer>`), the last balanced `\\boxed{}`, the last
sentence `the answer is ...`, and for a response of one statement that statement. All of it outside `<think>` spans. A
number that merely occurs is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from parallel_r1.reward.normalize import matching
from parallel_r1.structure.grammar import TAGS

MAX_RESPONSE = 1_000_000
TAIL = 60_000
MAX_ANSWER = 2_000
MAX_BOXES = 40


@dataclass(frozen=True)
class Extraction:
    """answers: readings of ONE statement (the sentence, the formula in it), best first, () where there is none.

    where: what it was found by, for people.
    """

    answers: tuple[str, ...] = ()
    where: str = "no final answer"


def extract(response: str, alone: bool = True) -> Extraction:
    """The final answer of a response. Only the last `TAIL` characters outside thoughts are read.

    alone: whether a response that is nothing but its answer states it.
    """
    text = visible(response)
    for find in (_by_marker, _by_box, _by_sentence, *([_by_itself] if alone else [])):
        if (found := find(text)) is not None:
            answers = tuple(dict.fromkeys(a for answer in found.answers if 0 < len(a := answer.strip()) <= MAX_ANSWER))
            return Extraction(answers, found.where if answers else f"{found.where}: empty or too long")
    return Extraction()


_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_NOISE = re.compile("|".join(map(re.escape, TAGS)) + r"|<\|[^|<>\n]{1,40}\|>|</?s>|\x00")


def visible(response: str) -> str:
    """The end of a response without its thoughts, tags and special tokens.

    A thought that is not closed runs to the end; one that is closed but never opened (the prompt opened it) runs from
    the start.
    """
    text = response[-MAX_RESPONSE:]
    if "think" in text or "THINK" in text:
        parts, at, depth = [], 0, 0
        for match in _THINK.finditer(text):
            if not match[1]:
                if depth == 0:
                    parts.append(text[at : match.start()])
                depth += 1
            elif depth == 0:
                parts = []
            else:
                depth -= 1
            at = match.end()
        if depth == 0:
            parts.append(text[at:])
        text = "\n".join(parts)
    text = text[-TAIL:]
    return _NOISE.sub("\n", text) if "<" in text or "\x00" in text else text


# -- a line that says so

# Every repetition is bounded: these two run over whole responses.
_MARKER = re.compile(
    r"(?:^|(?<=[.!?;] ))[ \t>#*_|\-]{0,16}(?:\\(?:text|text(?:bf|it)|mathbf|bf)\{)?"
    r"(?:(?:so|thus|therefore|hence),? )?(?:the |my |our )?(?:(?:final|correct) )?(?:answers?|ans)\b\.?"
    r"[ \t]{0,8}[*_}]{0,6}[ \t]{0,8}(?:(?:[:=：→]|->)[*_}]{0,6}|(?=\\\[|\\\(|\$|\\boxed)|-(?= )|[ \t*_#]{0,8}$)"
    # spelt like this it is no prose, wherever it stands
    r"|(?<=\s)[*_]{0,3}Final Answer[*_]{0,3}:[*_]{0,3}"
    r"|^[ \t>#*_]{0,16}final answer[ \t]{1,8}(?=-?\d)|^[ \t*]{0,8}####(?!#)|<answer>",
    re.IGNORECASE | re.MULTILINE,
)


def _by_marker(text: str) -> Extraction | None:
    last = None
    for match in _MARKER.finditer(text):
        last = match
    if last is None:
        return None
    where = "the last answer line"
    line = _line_after(text, last.end())
    if not re.search(r"\w|\\", line):
        return None
    if r"\boxed" in line:
        found = _by_box(text[last.end() :])
        return found and Extraction(found.answers, where)
    answers = _readings(line)
    # A headline over an explanation is no answer: a later box says more than twenty words.
    if len(line.split()) > 20 and "$" not in line and r"\boxed" in text[last.end() :]:
        return None
    return Extraction(answers, where)


_DISPLAY = {r"\[": r"\]", "$$": "$$", r"\begin": r"\end"}


def _line_after(text: str, at: int) -> str:
    """The rest of the line at `at`, or the next line that is not blank; all the lines of a displayed formula."""
    rest = text[at : at + 2 * MAX_ANSWER]
    rest = re.sub(r"</answer>.*", "", rest, flags=re.DOTALL | re.IGNORECASE).lstrip(" \t*_:}\r\n")
    line = rest.split("\n", 1)[0]
    for opening, closing in _DISPLAY.items():
        if line.startswith(opening) and closing not in line[len(opening) :]:
            end = rest.find(closing, len(opening))
            if end >= 0:
                line = rest[: end + len(closing)] + rest[end + len(closing) :].split("\n", 1)[0]
            break
    return line


_MATH = re.compile(r"\$\$?([^$]+)\$\$?|\\\(((?:[^\\]|\\(?!\)))*)\\\)|\\\[((?:[^\\]|\\(?!\]))*)\\\]", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-−–+]?(?:\\?[$€£¥]\s?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?%?")
_DOUBT = re.compile(
    r"\b(?:or|not|n't|no|least|most|more|less|than|over|under|between|maybe|perhaps|possibly|either|cannot|can't|don't|isn't|"
    r"unknown|if|about|approximately|except|neither|before|after)\b",
    re.IGNORECASE,
)


_AFTERTHOUGHT = re.compile(r",? (?:which|because|since|as required|where)\b.*|\s*\([^()\d]*\)$", re.DOTALL)


def _readings(line: str) -> tuple[str, ...]:
    """The readings of one statement: its first sentence, that without an afterthought, its one formula or number."""
    line = re.sub(r"\bI hope\b.*", "", line, flags=re.DOTALL).strip()
    line = re.split(r"(?<=[^\s.])\.(?:\*\*)?\s+(?=[A-Z])", line, maxsplit=1)[0].strip().rstrip(".")
    readings = [line]
    if (kept := _AFTERTHOUGHT.sub("", line)) != line and not _DOUBT.search(line[len(kept) :]):
        readings.append(kept)
    if match := re.match(r"(yes|no|true|false)\b[,;]", line, re.IGNORECASE):
        readings.append(match[1])
    formulas = list(_MATH.finditer(line))
    outside = _MATH.sub(" ", line)
    doubt = _DOUBT.search(outside)
    if len(formulas) == 1 and not doubt and not re.search(r"\d", outside):
        readings.append(next(group for group in formulas[0].groups() if group is not None))
    elif (
        len(formulas) > 1
        and not doubt
        and (match := re.search(r"\b(?:is|are|equals)\b\s*:?\s*(\$[^$]+\$)[^$]*$", line))
    ):
        readings.append(match[1])  # The value of $x$ is $5$
    numbers = _NUMBER.findall(line)
    if not formulas and not doubt and "\\" not in line.replace("\\$", "") and len(numbers) == 1:
        start = line.index(numbers[0])
        if re.fullmatch(r"[A-Za-z ,:'*-]*", line[:start]) and re.fullmatch(
            r"[A-Za-z ,'*%°-]*", line[start + len(numbers[0]) :]
        ):
            readings.append(line[start:])
    return tuple(readings)


# -- a box

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{|\\boxed\s*(-?\d+(?:\.\d+)?)(?![\w{^/!])")
_GLUE = re.compile(
    r"(?:\s|[,;&$.:()]|\\[()\[\],;]|\\quad|\\text|\{|\}|\b(?:or|and|also|both|respectively)\b|[a-zA-Z]\s*=)*",
    re.IGNORECASE,
)
_HEDGE = re.compile(r"\b(?:or|maybe|perhaps|possibly|might|could|alternatively|either)\b", re.IGNORECASE)
_TURN = re.compile(
    r"\b(?:wait|actually|wrong|mistake|error|instead|sorry|incorrect|correct(?:ed|ion)?|not|recheck\w*|check\w*)\b",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"[.!?\n]|=|\b(?:so|thus|therefore|hence|then|final|answer|which|giv\w+|yield\w*|gets?|obtain\w*|equals?|mak\w+|means|simplif\w*)\b",
    re.IGNORECASE,
)


def _by_box(text: str) -> Extraction | None:
    boxes = _boxes(text)
    if not boxes:
        return None
    group = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _same_statement(text[box[1] : group[0][0]]):
            break
        group.insert(0, box)
    contents = list(dict.fromkeys(content.strip() for _, _, content in group))
    where = r"the last \boxed" if len(contents) == 1 else rf"{len(contents)} \boxed answers side by side"
    return Extraction((", ".join(contents),), where)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of the last balanced boxes, in order; a box inside another is part of it."""
    found: list[tuple[int, int, str]] = []
    for match in list(_BOX.finditer(text))[-MAX_BOXES:]:
        start, brace = match.start(), match.end() - 1
        if found and start < found[-1][1]:
            continue
        if match[1]:  # \boxed 9, which TeX allows
            found.append((start, match.end(), match[1]))
            continue
        end = matching(text[brace : brace + MAX_ANSWER + 2], 0)
        if end > 0:
            found.append((start, brace + end + 1, text[brace + 1 : brace + end]))
    return found


def _same_statement(between: str) -> bool:
    """Whether two boxes are one answer (`2 or 3`) and not a step, or a mistake, and what followed from it."""
    if len(between) > 80 or _TURN.search(between):
        return False
    return bool(_GLUE.fullmatch(between) or _HEDGE.search(between) or not _STEP.search(between))


# -- a sentence

_SENTENCE = re.compile(
    r"\b(?:answer|solution|correct (?:option|choice))s?(?: to [^.:\n]{0,80})?\s{0,4}[*_]{0,4}\s{0,4}"
    r"(?:is|are|must be|should be|would be|comes to)\b:?",
    re.IGNORECASE,
)


def _by_sentence(text: str) -> Extraction | None:
    last = None
    for match in _SENTENCE.finditer(text):
        last = match
    if last is None:
        return None
    line = _line_after(text, last.end())
    # No box was balanced, or this would not have been asked: what stands in this one was cut.
    return Extraction(_readings(line), "the answer sentence") if r"\boxed" not in line else None


_RESTATED = re.compile(
    r"\b(?:problem|question|given|says?|said|states?|know|suppose|assume|let|if|need|first)\b", re.IGNORECASE
)
_AMOUNT = re.compile(r"[$\\€£]{0,2}[\d.,/]{1,40}[$\s%]{0,3}(?:[A-Za-z]{1,20}[ .]?){0,3}")
_MONEY = re.compile(r"(?:\\?\$|[€£¥])\s?\d|\d\s?(?:dollars?|cents?|euros?)\b", re.IGNORECASE)


def _by_itself(text: str) -> Extraction | None:
    """A response that is nothing but its answer, or ends in a complete sentence about one sum of money."""
    text = text.strip()
    if not text or len(text) > 2_000 or r"\boxed" in text:
        return None
    sentences = [part for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part]
    last = sentences[-1].strip()
    if len(sentences) == 1 and _AMOUNT.fullmatch(last) and not _DOUBT.search(last):
        return Extraction((last,), "the whole response")
    if len(sentences) == 1 and len(last) <= 200 and not re.search(r"[a-zA-Z]{2,}", re.sub(r"\\[a-zA-Z]+", "", last)):
        return Extraction((last,), "the whole response")
    complete = len(sentences) == 1 or last.endswith((".", "!"))
    last = _MATH.sub(" ", last)
    numbers = _NUMBER.findall(last)
    if not complete or len(numbers) != 1 or not _MONEY.search(last) or _RESTATED.search(last) or _DOUBT.search(last):
        return None
    return Extraction((last[last.index(numbers[0]) :],), "the last sentence")
