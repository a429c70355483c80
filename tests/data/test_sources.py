"""Adapters and the account of rows, on rows written by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.data import sources
from parallel_r1.data.reading import Row
from parallel_r1.structure.grammar import render_block
from parallel_r1.types import Problem


def row(**values: object) -> Row:
    return Row("f.jsonl", 3, values)


def test_identity_ignores_white_space_and_composition_only() -> None:
    same = sources.problem_id("Let  é be\n$x$.")
    assert sources.problem_id(" Let e\u0301 be $x$. ") == same
    for other in ("Let é be $X$.", "Let é be $x$", "Let é be$x$."):
        assert sources.problem_id(other) != same
    assert sources.problem_id("x²") != sources.problem_id("x2")


def test_the_same_problem_has_one_id_in_every_source() -> None:
    text = "What is $1+1$?"
    problems = [
        sources.gsm8k(row(question=text, answer="so\n#### 2")),
        sources.math(row(problem=text + " ", level="Level 1", type="Algebra", solution=r"\boxed{2}")),
        sources.dapo(row(prompt=[{"role": "user", "content": text}], reward_model={"ground_truth": "2"})),
        sources.benchmark(row(problem=text, answer="2")),
        sources.parallel_gsm8k(row(problem=text, text="2. Final Answer: 2", ground_truth="2")),
        sources.columns("q", "a")(row(q=text, a=2)),
    ]
    assert len({problem.id for problem in problems}) == 1
    assert {(problem.question, problem.answer) for problem in problems} == {(text, "2")}


@pytest.mark.parametrize(("end", "gold"), [("18", "18"), ("1,080", "1080"), ("-5", "-5"), ("$2,520,000 ", "2520000")])
def test_gsm8k_gold(end: str, gold: str) -> None:
    assert sources.gsm8k(row(question="?", answer=f"text #### in it\n#### {end}")).answer == gold


def test_math_gold_is_the_last_box_else_the_answer_column() -> None:
    common = {"problem": "?", "level": "Level 5", "type": "Algebra"}
    solution = r"First \boxed{1}, then \boxed{\frac{\sqrt{2}}{3}}."
    for answer in ({"answer": r"\frac{\sqrt{2"}, {"answer": None}, {}):
        problem = sources.math(row(**common, solution=solution, **answer))
        assert problem.answer == r"\frac{\sqrt{2}}{3}"
    assert sources.math(row(**common, solution="no box", answer="7")).answer == "7"
    assert sources.math(row(**common, solution=r"\boxed{}", answer="$1")).answer == sources.UNKNOWN
    assert problem.meta == {"level": 5, "subject": "Algebra"}
    assert sources.math(row(problem="?", level=3, subject="Geometry", answer="1")).meta["level"] == 3
    assert sources.math(row(problem="?", level="Level ?", type="Geometry", answer="1")).meta["level"] is None


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{a{b}c} and more", "a{b}c"),
        (r"\fbox{ 3 }", "3"),
        (r"\boxed{1} \boxed{2", None),
        ("no box", None),
        (r"so $x = \boxed 3$.", "3"),
        (r"\boxed{1} \boxed", "1"),
        (r"\boxed{}", ""),
    ],
)
def test_last_boxed(text: str, box: str | None) -> None:
    assert sources.last_boxed(text) == box


PUBLIC_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
PUBLIC_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'
CHINESE_TAIL = (
    " 让我们一步一步地思考。请以“Answer: \\boxed{<final_answer>}”的格式输出最终答案。如果是选择题，"
    "请按顺序输出正确的选项，不带任何标点或空格。对于其他类型的问题，请只输出最终答案的数值。"
)


def test_dapo_instructions_are_stripped() -> None:
    for prompt in ("Find $x$.\n\nIt is even.", f"{PUBLIC_HEAD}Find $x$.\n\nIt is even.{PUBLIC_TAIL}"):
        problem = sources.dapo(row(prompt=[{"content": prompt, "role": "user"}], reward_model={"ground_truth": "34"}))
        assert problem.question == "Find $x$.\n\nIt is even."
        assert problem.answer == "34"
    assert sources.strip_instruction("求 x 的值" + CHINESE_TAIL) == "求 x 的值"
    assert sources.strip_instruction("The Answer: to it all") == "The Answer: to it all"
    assert sources.dapo(row(prompt="as text", reward_model={"ground_truth": 4})).question == "as text"


@pytest.mark.parametrize(
    ("adapter", "values", "cause"),
    [
        (sources.gsm8k, {"problem": "?"}, "no column 'answer'"),
        (sources.gsm8k, {"question": "?", "answer": "18"}, "'answer' holds no '#### '"),
        (sources.gsm8k, {"question": "?", "answer": "x #### "}, "'answer after ####' is empty"),
        (sources.math, {"problem": "?", "type": "A", "answer": "1"}, "no column 'level'"),
        (sources.math, {"problem": "?", "level": 1, "answer": "1"}, "no column 'type' or 'subject'"),
        (
            sources.math,
            {"problem": "?", "level": 1, "type": "A", "solution": "1"},
            r"'solution' holds no \\boxed\{\} answer",
        ),
        (sources.math, {"problem": "?", "level": 1, "type": "A", "answer": " "}, "'answer' is empty"),
        (sources.dapo, {"prompt": [], "reward_model": {"ground_truth": "1"}}, "'prompt' holds 0 messages"),
        (sources.dapo, {"prompt": "?", "reward_model": "1"}, "'reward_model' holds str"),
        (sources.dapo, {"prompt": "?", "reward_model": {}}, "'reward_model.ground_truth' is empty"),
        (sources.dapo, {"prompt": {}, "reward_model": {}}, "'prompt' holds dict where text"),
        (
            sources.dapo,
            {"prompt": CHINESE_TAIL, "reward_model": {"ground_truth": "1"}},
            "'prompt without its instruction' is empty",
        ),
        (sources.benchmark, {"text": "?", "answer": "1"}, "no column 'problem' or 'question'"),
        (sources.benchmark, {"problem": "?"}, "no column 'answer'"),
        (sources.benchmark, {"problem": "?", "solution": "1"}, "'boxed answer of solution' is empty"),
        (
            sources.parallel_gsm8k,
            {"problem": "p", "text": "p", "ground_truth": "1"},
            "'text after the problem' is empty",
        ),
        (sources.columns("q", "a"), {"question": "?"}, "no column 'q'"),
    ],
)
def test_a_row_that_cannot_be_used_says_where_and_why(adapter: sources.Adapter, values: dict, cause: str) -> None:
    with pytest.raises(ValueError, match=rf"^f\.jsonl, row 3: {cause}.*\(columns found: {', '.join(values)}\); "):
        adapter(row(**values))


def test_a_benchmark_answer_that_was_cut_is_read_from_the_solution() -> None:
    values = {"problem": "?", "solution": r"\boxed{\sqrt{3}}"}
    assert sources.benchmark(row(**values, answer=r"\sqrt{3")).answer == r"\sqrt{3}"
    assert sources.benchmark(row(**values, answer="7")).answer == "7"


def test_questions_without_answers_are_marked() -> None:
    assert sources.columns("q", None)(row(q="?")).answer == sources.UNKNOWN


BLOCK = render_block(["a", "b"], "c")


def test_a_trace_loses_the_problem_it_repeats() -> None:
    for text in (f"How?\n\nSo {BLOCK} Final Answer: 5", f"So {BLOCK} Final Answer: 5"):
        problem = sources.parallel_gsm8k(row(problem="How?", text=text, ground_truth="5"))
        assert problem.demonstration == f"So {BLOCK} Final Answer: 5"


@pytest.mark.parametrize(
    ("demonstration", "fault"),
    [
        (f"So {BLOCK} Final Answer: 1,234", None),
        ("Sequential. Final Answer: $1234.", None),
        ("Final Answer: 3\nFinal Answer: 1234.0", None),
        ("Final Answer: twelve hundred", None),  # not for us to judge
        (f"So {BLOCK} Final Answer: 1235", "wrong final answer"),
        (f"So {BLOCK}", "no final answer"),
        ("Final Answer: ", "no final answer"),
        ("<Path>a</Path> Final Answer: 1234", "not well formed: <Path> outside a block"),
    ],
)
def test_trace_faults(demonstration: str, fault: str | None) -> None:
    assert sources.trace_fault(Problem("i", "q", "1234", "t", demonstration)) == fault


def collect_pairs(pairs: list[tuple[str, str]], **kwargs: object) -> tuple[list[Problem], sources.Report]:
    rows = [Row("f", i, {"q": question, "a": answer}) for i, (question, answer) in enumerate(pairs, start=1)]
    return sources.collect("f", rows, sources.columns("q", "a"), "t", **kwargs)


def test_collect_merges_drops_and_counts() -> None:
    pairs = [
        ("one", "1"),
        ("two", "2"),
        ("one ", "1"),
        ("o ne", "1"),
        ("o  ne", "1.0"),  # the same problem, and the same number
        ("two", "3"),  # disagrees: nobody knows which is right
        ("two", "2"),
        ("far too long", "1"),
        ("out", "1"),
    ]
    problems, report = collect_pairs(pairs, reject=lambda p: "unwanted" if p.question == "out" else None, max_chars=10)
    assert [(p.question, p.answer, p.tier) for p in problems] == [("one", "1", "t"), ("o ne", "1", "t")]
    assert report == sources.Report("f", 9, 6, 2, 2, 1, 3, 1, {"unwanted": 1})
    assert str(report) == (
        "f: 2 problems from 9 rows, 6 distinct texts, 2 duplicates merged, 1 problems with contradictory answers "
        "dropped, 1 too long, 1 left out (unwanted)"
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "a ", "dddd"]), st.sampled_from("12")), min_size=1))
def test_every_row_is_accounted_for(pairs: list[tuple[str, str]]) -> None:
    problems, report = collect_pairs(
        pairs, max_chars=3, reject=lambda p: "c" if p.question == "c" and p.answer == "2" else None
    )
    others = report.merged + report.contradicting + report.too_long + sum(report.rejected.values())
    assert report.rows == report.kept + others == len(pairs)
    assert report.kept == len(problems) == len({problem.id for problem in problems})


def test_no_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="f: holds no rows"):
        collect_pairs([])


def test_contamination_counts_by_tier() -> None:
    def of(tier: str, *ids: str) -> list[Problem]:
        return [Problem(i, "q", "1", tier) for i in ids]

    benchmark = of("aime24", "a", "b", "c") + of("amc23", "d")
    train = [Problem(i, f"unlike {i}", "1", "dapo") for i in "acx"]
    assert sources.contamination(train, benchmark) == {"aime24": sources.Overlap(2, 0), "amc23": sources.Overlap(0, 0)}


@pytest.mark.parametrize(
    ("train", "similar"),
    [
        ((r"Let $$z^{5}=\dfrac12$$ be so?", "7"), 1),
        (("let z^5 = 12 be, so", "7.0"), 1),
        ((r"Let $z^5=\frac12$ be so.", "8"), 0),  # the same letters: a minus sign may be all the difference
        ((r"Let $z^5=\frac13$ be so.", "7"), 0),
    ],
)
def test_contamination_by_similar_wording(train: tuple[str, str], similar: int) -> None:
    adapt = sources.columns("q", "a")
    benchmark = [adapt(row(q=r"Let $z^5=\frac{1}{2}$ be so.", a="7"))]
    found = sources.contamination([adapt(row(q=train[0], a=train[1]))], benchmark)
    assert found == {"": sources.Overlap(0, similar)}
