"""The page in a real browser: hostile text stays text, filters and keys work, nothing is loaded, axe finds nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel_r1.evaluation.charts import Interval, Section, Steps, Table, interval_chart, line_chart
from parallel_r1.evaluation.page import write_page
from parallel_r1.structure.grammar import render_block

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"),
]

BLOCK = render_block([" 2 + 2 = 4", " count: 1, 2, 3, 4, so 5"], " 4, the count slipped")
MARKUP = "<script>alert('x')</script></script><img src=x onerror=alert(1)><b>bold</b><!-- ${7*7} {{7*7}}"
CONTROLS = "left\u202eright\u2066in\u2069 nul\x00 bell\x07 mark\u200f end"
LONG = "word " * 20_000


def row(**more: Any) -> dict[str, Any]:
    text = more.get("response", f"Think. {BLOCK}\nFinal Answer: 4")
    return {
        "id": "p0", "tier": "easy", "question": "2 + 2?", "answer": "4", "response": text,
        "finished": True, "correct": True, "final_answer": "4", "parallel": True, "valid": True,
        "total_tokens": 30, "critical_tokens": 20,
    } | more  # fmt: skip


def training(iteration: int, group: int, sample: int, **more: Any) -> dict[str, Any]:
    words = ["Think", ". ", "<Parallel>", "<Path>", " 4", "</Path>", "<Path>", " 5", "</Path>", "</Parallel>"]
    words += ["<Summary>", " 4", "</Summary>", "\n", "Final Answer: ", "4"]
    return row(
        id=f"q{iteration}-{group}", stage="hard", tier="hard", iteration=iteration, group=group, sample=sample,
        response="".join(words), tokens=[*words, "<eos>"], logprobs=[-0.001, None, -5.0, *[-0.7] * 14],
        reward=1.0, advantage=0.5, terms={"accuracy": 1.0, "length": None}, path_agreement=0.0,
        parallel_positions=[0.125], block_labels=["exploration"],
    ) | more  # fmt: skip


ROWS = [
    *(training(i, g, s, correct=s == 0) for i in range(3) for g in range(2) for s in range(4)),
    training(3, 0, 0, finished=False, correct=False),
    row(id="markup", question=MARKUP, answer=MARKUP, response=MARKUP + BLOCK.replace(" 4,", MARKUP), mode=MARKUP),
    row(id="controls", question=CONTROLS, response=CONTROLS, final_answer=CONTROLS, mode="plain"),
    row(id="long", response=LONG + "END", mode="plain", path_agreement=1.0),
    row(id="broken", response="<Parallel><Path>a</Path> text </Parallel> b <Summary> open", valid=False, mode="plain"),
    row(id="arabic", question="ما هو ٢ + ٢؟", response="الجواب هو 4", mode="plain"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    charts = [
        line_chart(MARKUP, {MARKUP: [(0, 0.5), (9, 0.6)], "b": [(0, 0.1), (9, 0.2)]}, Steps({0: "easy", 5: "hard"})),
        interval_chart("mean@8", [Interval("easy", "plain", 0.5, 0.4, 0.6), Interval("easy", MARKUP, 0.4, 0.3, 0.5)]),
    ]
    table = Table(
        ["set", "mode", "a very long head of a column", "mean@8"], [["easy", MARKUP, 0.25, 0.5]] * 2, note="n"
    )
    section = Section("Accuracy", "In words.", [table], charts)
    write_page(path, title=f"Run {MARKUP} {CONTROLS}", rows=ROWS, sections=[section], about={"model": MARKUP})
    return path


class Opened:
    """A page in a context of its own, which records everything that it should not do."""

    def __init__(self, browser: Any, file: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.happened: list[str] = []
        self.page.on("console", lambda message: self.happened.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.happened.append(f"error: {error}"))
        self.page.on("request", lambda request: self.happened.append(f"request: {request.url}"))
        self.page.on("dialog", lambda dialog: (self.happened.append("dialog"), dialog.dismiss()))
        self.page.goto(file.as_uri())
        assert self.happened.pop(0).startswith("request: file:")

    def count(self, text: str) -> None:
        self.page.wait_for_function("text => document.getElementById('count').textContent.startsWith(text)", arg=text)

    def open_problem(self, id: str) -> None:
        self.page.fill("[name=q]", id)
        self.page.wait_for_function(
            "id => document.querySelectorAll('#groups button').length === 1 &&"
            " document.querySelector('.problem .where').textContent.includes(id)",
            arg=id,
        )

    def focused(self) -> str:
        return self.page.evaluate("document.activeElement.className || document.activeElement.tagName")


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Opened]:
    it = Opened(browser, file)
    yield it
    it.context.close()
    assert not it.happened, "nothing was loaded, logged or run"


def test_hostile_text_is_text(opened: Opened) -> None:
    opened.open_problem("markup")
    shown = opened.page.inner_text("#detail")
    assert shown.count(MARKUP) == 6, "question, answer, mode, main text, path and summary"
    inside = opened.page.evaluate("document.querySelectorAll('main script, main img, main b > *').length")
    assert inside == 0
    assert opened.page.evaluate("document.scripts.length") == 2
    assert MARKUP in opened.page.title()


def test_controls_are_shown_by_number(opened: Opened) -> None:
    opened.open_problem("controls")
    shown = opened.page.inner_text(".main-text")
    assert shown == "leftU+202ErightU+2066inU+2069 nulU+0000 bellU+0007 markU+200F end"
    assert "⟪U+202E⟫" in opened.page.inner_text("h1")
    assert not set("\u202e\u2066\u200f") & set(opened.page.inner_text("body"))


def test_writing_from_right_to_left_stays_in_its_place(opened: Opened) -> None:
    opened.open_problem("arabic")
    assert opened.page.evaluate("getComputedStyle(document.querySelector('.main-text')).direction") == "rtl"
    assert opened.page.evaluate("getComputedStyle(document.querySelector('.main-text')).unicodeBidi") == "isolate"


def test_a_long_text_is_shown_in_part_then_whole(opened: Opened) -> None:
    opened.open_problem("long")
    assert opened.page.evaluate("document.querySelector('#detail').textContent.length") < 8_000
    opened.page.click("text=94,003 characters more")
    assert opened.page.inner_text(".main-text").endswith("word END")
    assert opened.focused() == "card"


def test_a_response_is_drawn_as_lanes_side_by_side(opened: Opened) -> None:
    opened.open_problem("q0-0")
    card = opened.page.locator(".card").first
    assert card.locator(".lane").all_inner_texts() == ["Path 1\n\n4", "Path 2\n\n5"]
    first, second = (card.locator(".lane").nth(i).bounding_box() for i in range(2))
    assert first["y"] == second["y"]
    assert second["x"] > first["x"] + first["width"]
    below = card.locator(".summary").bounding_box()
    assert below["y"] >= first["y"] + first["height"]
    text = card.inner_text()
    for part in ("✓ right", "reward 1", "advantage +0.500", "accuracy 1", "length –", "paths agree 0 %"):
        assert part in text
    assert "Block 1 · 2 paths · opens at 13 % of the response · exploration" in text


def test_a_broken_response_has_a_shape_too(opened: Opened) -> None:
    opened.open_problem("broken")
    text = opened.page.inner_text(".card")
    assert "broken structure" in text
    assert [part in text for part in ("a", "text", "b", "open")] == [True] * 4
    opened.open_problem("q3-0")
    assert "cut here by the length limit" in opened.page.inner_text(".card")


def test_filters(opened: Opened) -> None:
    page = opened.page
    opened.count("30 of 30 responses, 12 of 12 problems")
    page.select_option("[name=verdict]", "wrong")
    opened.count("18 of 30")
    assert page.locator("#detail .card").count() == 3
    page.click("text=3 of 4 responses match; show all")
    assert page.locator("#detail .card").count() == 4
    page.select_option("[name=iteration]", "2")
    opened.count("6 of 30 responses, 2 of 12")
    page.select_option("[name=verdict]", "cut")
    opened.count("0 of 30")
    assert "No response passes" in page.inner_text("#detail")
    page.click("text=Clear")
    opened.count("30 of 30")
    page.check("[name=disagree]")
    opened.count("25 of 30")
    page.uncheck("[name=disagree]")
    page.check("[name=invalid]")
    opened.count("1 of 30")
    page.uncheck("[name=invalid]")
    page.select_option("[name=mode]", "plain")
    opened.count("4 of 30")
    page.fill("[name=q]", "الجواب")
    opened.count("1 of 30")


def test_keyboard(opened: Opened) -> None:
    page = opened.page
    ids = []
    for key in ("j", "j", "n", "k", "p"):
        page.keyboard.press(key)
        at = page.evaluate("[...document.querySelectorAll('.card')].indexOf(document.activeElement)")
        ids.append((page.inner_text(".problem .where").rsplit(" ", 1)[1], at))
    assert ids == [("q0-0", 0), ("q0-0", 1), ("q0-1", 0), ("q0-0", 3), ("q0-0", 3)]
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is visible"
    page.keyboard.press("/")
    page.keyboard.type("jjj")
    assert page.input_value("[name=q]") == "jjj"
    opened.count("0 of 30")
    page.keyboard.press("Escape")
    assert opened.focused() == "BODY"
    page.click("text=Clear")
    opened.count("30 of 30")
    page.focus("#groups button")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.inner_text(".problem .where").endswith("q0-1")


def test_log_probabilities_by_pointer_and_by_keys(opened: Opened) -> None:
    page = opened.page
    tokens = page.locator(".card").first.locator(".tok")
    tokens.nth(4).hover()
    assert page.inner_text("#tip") == "log-probability -0.700 · 49.7 %"
    page.hover("text=Block 1 >> nth=0")  # stands for <Parallel>
    assert page.inner_text("#tip") == "log-probability -5.000 · 0.674 %"
    page.locator(".card .body").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("not sampled")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#tip") == "log-probability -0.001 · 99.9 %"
    colour = "getComputedStyle(document.querySelector('.tok.t2')).backgroundColor"
    shaded = page.evaluate(colour)
    page.uncheck("#shade")
    assert page.evaluate(colour) == "rgba(0, 0, 0, 0)" != shaded


def test_theme(opened: Opened) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = opened.page.evaluate(paper)
    opened.page.emulate_media(color_scheme="dark")
    dark = opened.page.evaluate(paper)
    assert light != dark
    opened.page.click("text=Theme: auto")
    assert opened.page.evaluate(paper) == light
    opened.page.click("text=Theme: light")
    opened.page.emulate_media(color_scheme="light")
    assert opened.page.evaluate(paper) == dark


@pytest.mark.parametrize("width", [360, 768])
def test_no_page_scrolls_sideways(browser: Any, file: Path, width: int) -> None:
    it = Opened(browser, file, width)
    for id in ("q0-0", "markup", "controls", "long", "broken"):
        it.open_problem(id)
        assert it.page.evaluate("document.documentElement.scrollWidth") <= width
    it.open_problem("q0-0")
    if width == 360:
        first, second = (it.page.locator(".lane").nth(i).bounding_box() for i in range(2))
        assert second["y"] >= first["y"] + first["height"], "lanes stand on one another"
    assert not it.happened
    it.context.close()


@pytest.mark.parametrize(
    ("scheme", "width", "id"), [("light", 1280, "q0-0"), ("dark", 1280, "controls"), ("dark", 360, "q0-0")]
)
def test_axe_finds_nothing_serious(browser: Any, file: Path, scheme: str, width: int, id: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    it = Opened(browser, file, width, scheme)
    it.open_problem(id)
    found = Axe().run(it.page).response["violations"]
    serious = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]
    assert not serious
    it.context.close()


def test_five_hundred_responses_stay_usable(browser: Any, tmp_path: Path) -> None:
    words = [f" word{i}" for i in range(400)]
    rows = [
        training(i, 0, 0, id=f"x{i}", response="".join(words), tokens=words, logprobs=[-0.5] * 400, correct=i % 5 > 0)
        for i in range(500)
    ]
    path = tmp_path / "many.html"
    write_page(path, title="many", rows=rows)
    start = time.perf_counter()
    it = Opened(browser, path)
    it.count("500 of 500")
    loaded = time.perf_counter() - start
    start = time.perf_counter()
    it.page.select_option("[name=verdict]", "wrong")
    it.count("100 of 500")
    it.page.fill("[name=q]", "word399")
    it.count("100 of 500")
    filtered = time.perf_counter() - start
    # generous: the cores of a test machine are shared
    assert loaded < 15
    assert filtered < 10
    assert it.page.evaluate("document.querySelectorAll('*').length") < 6_000
    assert not it.happened
    it.context.close()
