"""stub"""
from __future__ import annotations
import re
from collections.abc import Callable
from dataclasses import dataclass

Leaf = Callable[[str, str], bool]

class Undecided(Exception):
    pass

def undecided(gold: str, answer: str) -> bool:
    raise Undecided

@dataclass(frozen=True)
class Verdict:
    correct: bool
    reason: str

@dataclass(frozen=True)
class Extraction:
    answers: tuple[str, ...]
    where: str

def extract(response: str) -> Extraction:
    m = re.findall(r"(?:Final Answer|Answer):\s*\**([^\n]*)", response[-5000:]) or re.findall(r"\\boxed\{([^{}]*)\}", response[-5000:])
    return Extraction((m[-1].strip().rstrip("."),) if m else (), "")

_NUM = re.compile(r"[-+]?\d{1,50}")
def judge(gold: str, found: Extraction, leaf: Leaf) -> Verdict:
    if not found.answers:
        return Verdict(False, "no final answer")
    a, g = found.answers[0].strip("$ *"), gold.strip()
    if a == g:
        return Verdict(True, "same text")
    if _NUM.fullmatch(a) and _NUM.fullmatch(g):
        ok = int(a) == int(g)
    else:
        ok = leaf(g, a)
    return Verdict(ok, "equal" if ok else "different")

def verify(gold: str, response: str, leaf: Leaf) -> Verdict:
    return judge(gold, extract(response), leaf)

def stated_value(text: str):
    m = re.findall(r"-?\d+", text)
    return int(m[-1]) if m else None
