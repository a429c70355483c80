"""Right answers are right and wrong ones wrong: a table of many kinds, whole responses, the golds of the corpora."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest
from answer_cases import BOXED, PAIRS, RESPONSES

from parallel_r1.reward.answers import Undecided, extract, judge, require_gold, stated_value, undecided, verify
from parallel_r1.reward.extraction import MAX_ANSWER, Extraction
from parallel_r1.reward.grading import grade

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def refuse(gold: str, answer: str) -> bool:
    raise AssertionError(f"asked for algebra on {gold!r} and {answer!r}")


def wrong_verdicts(rows: list[tuple[str, str, bool]]) -> list[tuple[str, str, bool, str]]:
    verdicts = grade([(gold, response) for gold, response, _ in rows])
    return [
        (*row, verdict.reason) for row, verdict in zip(rows, verdicts, strict=True) if verdict.correct is not row[2]
    ]


@pytest.mark.parametrize("kind", BOXED)
def test_boxed_answers_of_each_kind(kind: str):
    rows = [
        (gold, rf"So the answer is \boxed{{{answer}}}.", right)
        for gold, answers in BOXED[kind].items()
        for right, column in zip((True, False), answers, strict=True)
        for answer in column
    ]
    assert wrong_verdicts(rows) == []


def test_more_boxed_answers():
    assert wrong_verdicts([(gold, rf"\boxed{{{answer}}}", right) for gold, answer, right in PAIRS]) == []


def test_whole_responses():
    assert wrong_verdicts(RESPONSES) == []


def test_the_table_holds_many_cases_of_both_kinds():
    right = sum(len(a) for golds in BOXED.values() for a, _ in golds.values()) + sum(r for *_, r in RESPONSES)
    wrong = sum(len(b) for golds in BOXED.values() for _, b in golds.values()) + sum(not r for *_, r in RESPONSES)
    assert right >= 300
    assert wrong >= 300


# -- extraction


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{a\\{b}}", r"a\\{b}"),
        ("Final Answer: **$7$**.\nThank you.", "$7$**"),
        ("#### 7", "7"),
    ],
)
def test_extraction_finds_the_text_of_the_answer(response: str, answer: str):
    assert extract(response).answers[0] == answer


@pytest.mark.parametrize("response", ["", " ", r"\boxed{", r"\boxed{}", "<think>", "Final Answer:", "x" * 100])
def test_where_nothing_is_stated_nothing_is_found(response: str):
    assert extract(response).answers == ()


def test_an_answer_of_unreasonable_length_is_none():
    assert extract(r"\boxed{" + "1" * (MAX_ANSWER + 1) + "}").answers == ()
    assert extract("Final Answer: " + "1" * (MAX_ANSWER + 1)).answers == ()


def test_only_the_end_of_a_long_response_is_read():
    assert extract("word " * 200_000 + r"\boxed{7}").answers == ("7",)
    assert extract(r"\boxed{7}" + "word " * 200_000).answers == ()


# -- judging


def test_plain_answers_need_no_algebra():
    for gold, answer in [
        ("42", "42"),
        ("42", "41"),
        ("0.5", r"\frac{1}{2}"),
        ("1,2", "2,1"),
        ("Yes", "no"),
        ("7:3", "7:4"),
    ]:
        judge(gold, Extraction((answer,)), refuse)


def test_algebra_is_declined_in_the_trainers_process():
    with pytest.raises(Undecided):
        judge("x+1", Extraction(("1+x",)), undecided)


def test_verify_says_where_it_looked():
    assert verify("5", r"\boxed{6}", refuse).reason == r"the last \boxed: 6"
    assert verify("5", "I give up", refuse).reason == "no final answer"
    assert verify("", r"\boxed{6}", refuse).reason == "the gold answer is empty"


def test_an_empty_gold_answer_is_refused_with_its_row():
    assert require_gold(" 5 ", "train.jsonl:3") == "5"
    with pytest.raises(ValueError, match=r"train\.jsonl:3: the gold answer is empty"):
        require_gold(" \n", "train.jsonl:3")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 3 and then 4.", Fraction(4)),
        ("it is -2", Fraction(-2)),
        ("it is 1,234.5 m", Fraction(2469, 2)),
        ("it is 3/4", Fraction(3, 4)),
        ("3/0", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_value_a_text_ends_on(text: str, value: Fraction | None):
    assert stated_value(text) == value


# -- the corpora


def _golds(name: str) -> list[tuple[str, str]]:
    """(row, gold) of a corpus, every gold as its source states it."""
    if name == "dapo":
        parquet = pytest.importorskip("pyarrow.parquet")
        path = SHARED / "data/dapo_math_17k/train.parquet"
        if not path.exists():
            pytest.skip(f"{path.relative_to(SHARED)} is not beside the repository")
        rows = parquet.read_table(path, columns=["reward_model"]).to_pylist()
        return [(f"dapo:{i}", row["reward_model"]["ground_truth"]) for i, row in enumerate(rows)]
    paths = [SHARED / f"data/{name}/{split}.jsonl" for split in ("train", "test")]
    if not all(path.exists() for path in paths):
        pytest.skip(f"data/{name} is not beside the repository")
    lines = [(f"{path.stem}:{i}", json.loads(line)) for path in paths for i, line in enumerate(path.open())]
    return [(row, line["answer"].split("####")[-1].strip()) for row, line in lines]


def _readable(gold: str) -> bool:
    """MATH holds golds that were cut at a closing brace: `\\frac{2\\sqrt{35`. Nothing can state them in a box."""
    return gold.replace(r"\{", "").count("{") == gold.replace(r"\}", "").count("}")


@pytest.mark.parametrize(("name", "every"), [("dapo", 10), ("gsm8k", 10), ("math", 20)])
def test_golds_of_the_corpora_equal_themselves_and_no_other(name: str, every: int):
    golds = [(row, gold) for row, gold in _golds(name) if _readable(gold)]
    sample = golds[::every]
    verdicts = grade([(gold, rf"\boxed{{{gold}}}") for _, gold in sample])
    assert [row for row, verdict in zip(sample, verdicts, strict=True) if not verdict.correct] == []

    # Of two golds that are plain numbers we know without the grader whether they are the same.
    numbers = [(row, gold) for row, gold in golds if gold.lstrip("-").isdigit()]
    rng = random.Random(0)
    pairs = [
        (a, b) for a in sample for b in [rng.choice(numbers)] if a[1].lstrip("-").isdigit() and int(a[1]) != int(b[1])
    ]
    assert len(pairs) > 200
    verdicts = grade([(a, rf"\boxed{{{b}}}") for (_, a), (_, b) in pairs])
    assert [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict.correct] == []
