"""The page as text: what is escaped, bounded, grouped; how it looks and acts is tested in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from parallel_r1.evaluation.charts import Interval, Section, Steps, Table, band_chart, interval_chart, line_chart
from parallel_r1.evaluation.page import TEMPLATES, render, write_page
from parallel_r1.evaluation.page_rows import aligned, chosen, groups_of, script_json, viewer_data
from parallel_r1.evaluation.page_text import cell, shown

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>\u202e\x00&amp; ${1} $\\frac$"


def row(**more) -> dict:
    return {"id": "p", "tier": "easy", "question": "q", "response": "Final Answer: 4", "finished": True, **more}


def embedded(html: str) -> list[dict]:
    return json.loads(re.search(r'<script type="application/json" id="rows">(.*?)</script>', html, re.DOTALL)[1])


def test_nothing_of_the_data_is_markup() -> None:
    chart = line_chart(HOSTILE, {HOSTILE: [(0, 1.0)], "b": [(0, 2.0)]}, Steps({0: HOSTILE}), HOSTILE)
    marks = interval_chart(HOSTILE, [Interval(HOSTILE, HOSTILE, 0.5, 0.4, 0.6)])
    section = Section(HOSTILE, HOSTILE, [Table([HOSTILE], [[HOSTILE]], HOSTILE, HOSTILE)], [chart, marks])
    rows = [row(question=HOSTILE, response=HOSTILE, tier=HOSTILE, mode=HOSTILE, terms={HOSTILE: 1.0})]
    html = render(HOSTILE, {HOSTILE: HOSTILE}, [section], rows)
    assert html.count("<script") == html.count("</script") == 2, "the rows and the page's own script"
    assert "<img" not in html
    assert "<!--" not in re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert "\u202e" not in html.split("<script")[0]
    assert embedded(html)[0]["rows"][0]["response"] == HOSTILE


def test_nothing_is_loaded_from_anywhere() -> None:
    html = render("t", {}, [Section("s", charts=[line_chart("c", {"a": [(0, 1.0)]}, Steps())])], [row()])
    assert "default-src 'none'" in html
    assert not re.findall(r"""(?:src|href|url\()\s*=?\s*["']?(?!#)(?:https?:|//|\.)""", html)
    assert not re.search(r"@import|<link|<iframe|<base", html)


def test_ids_are_unique_over_charts() -> None:
    charts = [line_chart(f"c{i}", {"a": [(0, 1.0), (1, 2.0)]}, Steps({0: "x"})) for i in range(3)]
    ids = re.findall(r'\bid="([^"]+)"', render("t", {}, [Section("s", charts=charts)], [row()]))
    assert len(ids) == len(set(ids))
    references = re.findall(r"""href="#([^"]+)"|url\(#([^)]+)\)""", "".join(chart.svg for chart in charts))
    assert references
    assert {a or b for a, b in references} <= set(ids)


def test_charts_take_the_colours_of_the_page() -> None:
    chart = band_chart("where", [0, 0.5, 1], {0: [1, 3], 4: [0, 0]}, Steps({0: "easy"}))
    assert not re.findall(r"#[0-9a-f]{6}", chart.svg.replace("#000000", "")), "no colour of its own"
    assert "var(--muted)" in chart.svg
    assert chart.table.rows == [[0, 0.25, 0.75], [4, 0.0, 0.0]]
    assert re.match(r'<svg viewBox="[\d. ]+" role="img" aria-label="where">', chart.svg)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(theme: int) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5 at least; axe sees only the colours that a page happens to use."""
    css = (TEMPLATES / "page.css").read_text()
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)
    colour = {name: luminance((light, dark)[theme]) for name, light, dark in pairs}
    behind = ["paper", "card", "sunk"]
    used = [(text, back) for text in ("ink", "muted", "accent", *(f"lane-{i}" for i in range(6))) for back in behind]
    used += [("ink", f"heat-{i}") for i in range(1, 6)] + [(v, f"{v}-back") for v in ("right", "wrong", "cut")]
    for text, back in used:
        dark, light = sorted((colour[text], colour[back]))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text} on {back}"


def test_long_series_have_short_tables() -> None:
    chart = line_chart("c", {"a": [(i, float(i)) for i in range(1000)], "b": [(5, 1.0)]}, Steps())
    assert len(chart.table.rows) == 200
    assert chart.table.rows[1] == [5, 5.0, 1.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (0.5, "0.500"),
        (512, "512"),
        (1234567, "1,234,567"),
        (123.456, "123.5"),
        (2e-5, "2.0e-05"),
        (float("nan"), "nan"),
        ("a\u202eb\x00", "a⟪U+202E⟫b⟪U+0000⟫"),
    ],
)
def test_cells(value, text: str) -> None:
    assert cell(value) == text


def test_text_of_the_world_stays() -> None:
    for text in ("שלום", "مرحبا", "a\n\tb", "👩‍👩‍👧", "½ ≤ x", "नमस्ते"):
        assert shown(text) == text


def test_rows_of_a_problem_stand_together() -> None:
    rows = [row(mode=m, sample=s, id=i) for m in ("plain", "forced") for i in ("p", "q") for s in range(2)]
    assert [[(r["id"], r["mode"], r["sample"]) for r in group] for group in groups_of(rows)] == [
        [(i, m, s) for m in ("plain", "forced") for s in range(2)] for i in ("p", "q")
    ]
    training = [row(stage="hard", iteration=i, group=g, sample=0) for i in range(2) for g in range(2)]
    assert len(groups_of(training)) == 4


def test_a_page_takes_whole_groups_from_all_over() -> None:
    groups = [[row(id=str(i))] * 8 for i in range(100)]
    kept = chosen(groups, 80)
    assert [group[0]["id"] for group in kept] == [str(i) for i in range(0, 100, 10)]
    assert len(chosen(groups, 3)) == 1
    assert chosen(groups, 800) == groups
    uneven = [[row(id=str(i))] * (1 + i) for i in range(20)]
    assert sum(map(len, chosen(uneven, 50))) <= 50
    assert chosen([], 5) == []


def test_tokens_are_slices_of_the_text() -> None:
    assert aligned("ab c", ["ab", " c", "<eos>"], [-1, -2, -3]) == {
        "tokens": ["ab", " c", "<eos>"],
        "logprobs": [-1, -2, -3],
        "extra": 1,
    }
    # three tokens of one character, the last of them inserted
    split = aligned("x🙂y", ["x", "\ufffd", "\ufffd", "\ufffd", "y"], [-1.0, -0.5, -0.25, None, -2.0])
    assert split == {"tokens": ["x", "🙂", "y"], "logprobs": [-1.0, -0.75, -2.0], "extra": 0}
    assert aligned("é", ["\ufffd", "\ufffd"], [-1.0, -1.0])["tokens"] == ["é"]
    for text, tokens in (("abc", ["ab", "x"]), ("abc", ["ab"]), ("a", ["", "b"])):
        assert aligned(text, tokens, [-1.0] * len(tokens)) is None
    assert aligned("a", ["a"], [-1.0, -2.0]) is None
    assert aligned("a", None, None) is None
    assert aligned("", ["<eos>"], [-1.0]) == {"tokens": ["<eos>"], "logprobs": [-1.0], "extra": 1}


def test_what_a_page_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a" * 250_000
    shown_row = viewer_data([[row(response=long, tokens=[long], logprobs=[-1.0])]])[0]["rows"][0]
    assert (len(shown_row["response"]), shown_row["left_out"], "tokens" in shown_row) == (200_000, 50_000, False)
    monkeypatch.setattr("parallel_r1.evaluation.page_rows.MAX_TOKEN_BYTES", 150)
    tokens = {"response": "w " * 20, "tokens": ["w "] * 20, "logprobs": [-1.0] * 20}
    found = viewer_data([[row(**tokens), row(response="w", tokens=["w"], logprobs=[-1])]])[0]["rows"]
    assert ["tokens" in r for r in found] == [False, True]


def test_verdicts_and_facts_of_a_row() -> None:
    rows = [
        row(correct=True),
        row(correct=False),
        row(finished=False, correct=True),
        row(path_agreement=0.5, entropy=2.0),
    ]
    found = viewer_data([rows])[0]
    assert [r["verdict"] for r in found["rows"]] == ["right", "wrong", "cut", "wrong"]
    assert found["rows"][3]["agreement"] == 0.5
    assert found["rows"][3]["more"] == {"entropy": 2.0}
    assert (found["id"], found["tier"], found["question"]) == ("p", "easy", "q")


def test_json_is_safe_in_a_script_element() -> None:
    value = {"a": HOSTILE, "b": [float("nan"), 1], "c": "\u2028\ud800"}
    text = script_json(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": HOSTILE, "b": [None, 1], "c": "\u2028?"}


def test_a_report_of_any_shape_becomes_a_page(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_page(path, title="t", report={"val": {"easy/accuracy": 0.25, "deep": {"list": [1]}}})
    html = path.read_text()
    assert "val.easy/accuracy" in html
    assert "0.250" in html
    assert 'id="responses"' not in html
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_the_report_of_a_test(tmp_path: Path) -> None:
    def estimate(value: float) -> dict:
        return {"value": value, "ci95": [value - 0.05, value + 0.04]}

    metrics = {"mean@8": estimate(0.8), "pass@2": estimate(0.85), "pass@8": estimate(0.9)}
    metrics["total_tokens"] = {"value": 40.0, "ci95": None}
    tier = {
        "problems": 4,
        "samples": 8,
        "modes": {"plain": metrics, "sequential": metrics},
        "equal_tokens": {"budget": 210.25, "modes": {"plain": {"samples": 5.5, "mean": estimate(0.7)}}},
    }
    tiers = {"easy": tier, "hard": {**tier, "equal_tokens": None}}
    report = {"name": "r", "model": "m", "settings": {"temperature": 0.6}, "tiers": tiers}
    write_page(tmp_path / "report.html", title="t", report=report, rows=[row(mode="plain", sample=0)])
    html = (tmp_path / "report.html").read_text()
    for part in (
        "0.800 [0.750, 0.840]",
        "pass@k, hard",
        "210.2",
        "At equal total tokens",
        "<dd>0.6</dd>",
        "total tokens",
    ):
        assert part in html
