"""The trace pipeline in parts: white space, reasons, the file that survives kills, endpoints that misbehave."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_server import Reply, Server, completion

from parallel_r1.data.sources import problem_id
from parallel_r1.files import write_text
from parallel_r1.reward.grading import grade
from parallel_r1.structure.grammar import TAGS, parse, render_block
from parallel_r1.traces.endpoint import Endpoint, EndpointTeacher
from parallel_r1.traces.pipeline import by_problem, fingerprint, generate
from parallel_r1.traces.rollouts import read_rollouts
from parallel_r1.traces.selection import Rules, canonical_space, clean, fault, select
from parallel_r1.traces.store import Candidate, CandidateFile
from parallel_r1.traces.teachers import Ask, EngineTeacher, Refusal, TeacherError, candidate_seed, missing
from parallel_r1.types import Problem

BLOCK = render_block(["a", "b"], "c")
GOOD = f"Let us see.\n\n{BLOCK}\n\nFinal Answer: 4"


def problem(question: str, answer: str = "4") -> Problem:
    return Problem(problem_id(question), question, answer, "t")


# --------------------------------------------------------------------------- white space


def test_canonical_space_by_hand() -> None:
    loose = "One. \n<Parallel>\n <Path> a  b\n\n</Path>\n<Path>c</Path> </Parallel>\n\n<Summary> d </Summary>end"
    tidy = "One.\n\n<Parallel><Path>\na  b\n</Path><Path>\nc\n</Path></Parallel><Summary>\nd\n</Summary>\n\nend"
    assert canonical_space(loose) == tidy
    assert canonical_space(BLOCK + BLOCK).count("</Summary>\n\n<Parallel>") == 1
    assert canonical_space("  plain  text\n") == "plain  text"


@given(st.lists(st.sampled_from([*TAGS, "a", " ", "\n", "b c"]), max_size=30).map("".join))
def test_canonical_space_is_idempotent_and_keeps_the_grammar(text: str) -> None:
    tidy = canonical_space(text)
    assert canonical_space(tidy) == tidy
    before, after = parse(text), parse(tidy)
    assert after.error == before.error
    assert [[p.strip() for p in b.paths] for b in before.blocks] == [[p.strip() for p in b.paths] for b in after.blocks]
    assert "".join(text.split()) == "".join(tidy.split())


def test_clean_drops_thoughts_the_repeated_problem_and_what_is_no_text() -> None:
    assert clean("<think>2 + 2?</think>\n\nSum it.\n2 + 2 = 4", "Sum it.") == "2 + 2 = 4"
    assert clean("a \ud800 b", "q") == "a ? b"
    assert clean(" as it is <Path> ", "q", canonical=False) == " as it is <Path> "


# --------------------------------------------------------------------------- reasons


@pytest.mark.parametrize(
    ("text", "finished", "correct", "reason"),
    [
        (GOOD, True, True, None),
        (GOOD, False, True, "cut by the length limit"),
        (" \n", True, True, "empty"),
        ("<Path>\n\nFinal Answer: 4", True, True, "not well formed: <Path> outside a block"),
        ("Final Answer: 4", True, True, "no block"),
        (BLOCK, True, True, "no final answer"),
        (f"{BLOCK} \\boxed{{4}}", True, True, "no final answer"),
        (f"{BLOCK}\n\nFinal Answer: 5", True, False, "wrong final answer"),
        (f"{BLOCK}\n\nFinal Answer: x + 1", True, False, "wrong final answer"),
    ],
)
def test_the_first_fault_is_the_reason(text: str, finished: bool, correct: bool, reason: str | None) -> None:
    assert fault(problem("q"), text, finished, correct, blocks=1) == reason


def test_blocks_may_be_asked_for_or_not() -> None:
    assert fault(problem("q"), "Final Answer: 4", True, True, blocks=0) is None
    assert fault(problem("q"), GOOD, True, True, blocks=2) == "fewer than 2 blocks"


def candidates(of: Problem, *texts: str) -> dict[str, list[Candidate]]:
    return {of.id: [Candidate(of.id, i, text, True) for i, text in enumerate(texts)]}


def test_selection_accounts_for_every_candidate() -> None:
    one, two, three = problem("1?"), problem("2?"), problem("3?")
    other = GOOD.replace("see", "think")
    given = {
        **candidates(one, "", GOOD, GOOD.replace("\n\n", "\n"), other),
        **candidates(two, GOOD.replace("4", "5"), f"{BLOCK}\nFinal Answer: $4.0$"),
        **candidates(problem("unknown"), GOOD),
    }
    found = select([one, two, three], given, Rules(per_problem=None), grade)
    assert [(p.question, text) for p, text in found.kept] == [
        ("1?", canonical_space(GOOD)),
        ("1?", canonical_space(other)),
        ("2?", canonical_space(f"{BLOCK}\nFinal Answer: $4.0$")),
    ]
    assert found.rejected == {"empty": 1, "the same as another candidate": 1, "wrong final answer": 1}
    assert found.candidates == 6 == len(found.kept) + found.rejected.total()
    assert [(r.question, r.solved, r.tried) for r in found.rates] == [("1?", 3, 4), ("2?", 1, 2)]
    assert found.lines()[:2] == ["       6 candidates of 2 problems", "       3 kept (50.0%), of 2 problems"]

    first = select([one, two], given, Rules(per_problem=1), grade)
    assert [text for _, text in first.kept] == [found.kept[0][1], found.kept[2][1]]
    assert first.rejected["good, but beyond 1 a problem"] == 1


# --------------------------------------------------------------------------- the raw file

SETTINGS = {"model": "m", "temperature": 1.0}


def test_candidates_are_there_again_and_settings_must_match(tmp_path: Path) -> None:
    path = tmp_path / "new" / "raw.jsonl"
    written = [Candidate("p", 1, "one\nline \u2028 \ud800 é", True), Candidate("p", 0, "", False)]
    with CandidateFile(path, SETTINGS) as file:
        file.append(written[:1])
        file.append(written[1:])
    before = path.read_bytes()
    with CandidateFile(path, SETTINGS) as file:
        assert list(file.candidates.values()) == written
        assert file.dropped == 0
        assert by_problem(file, 2) == {"p": written[::-1]}
        assert by_problem(file, 1) == {"p": written[1:]}
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match=r"other settings \(temperature was 1\.0, now 0\.5; top_p was null, now 1\)"):
        CandidateFile(path, {"model": "m", "temperature": 0.5, "top_p": 1}).__enter__()


def test_every_cut_of_the_file_loses_at_most_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    written = [Candidate("p", i, f"text {i}", True) for i in range(3)]
    with CandidateFile(path, SETTINGS) as file:
        file.append(written)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with CandidateFile(path, SETTINGS) as file:
            kept = sum(end <= size for end in ends[1:])
            assert list(file.candidates.values()) == written[:kept]
            assert file.dropped == size - max((end for end in ends if end <= size), default=0)
            file.append(written[kept:])
        assert path.read_bytes() == whole


def test_zeros_at_the_end_are_a_torn_line_too(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    with CandidateFile(path, SETTINGS):
        pass
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 100)
    with CandidateFile(path, SETTINGS) as file:
        assert file.dropped == 100
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (['{"settings": {}}', "{torn", '{"problem": "p"}'], "line 2: not a JSON object, and not the last line"),
        (['{"settings": {}}', '{"problem": "p", "candidate": 0}'], "line 2: it has no 'text'"),
        (['{"settings": {}}', '{"problem": "p", "candidate": true, "text": "", "finished": true}'], "wrong type"),
        (['{"problem": "p"}'], "its first line holds no settings"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, lines: list[str], complaint: str) -> None:
    path = tmp_path / "raw.jsonl"
    path.write_text("\n".join(lines) + "\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=re.escape(complaint)):
        CandidateFile(path, {}).__enter__()
    assert path.read_bytes() == before


def test_two_runs_never_write_to_one_file(tmp_path: Path) -> None:
    second = CandidateFile(tmp_path / "raw.jsonl", SETTINGS)
    with (
        CandidateFile(tmp_path / "raw.jsonl", SETTINGS),
        pytest.raises(ValueError, match="another run is writing to it"),
    ):
        second.__enter__()
    with CandidateFile(tmp_path / "raw.jsonl", SETTINGS):
        pass


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "x", "old \ud800")
    assert (tmp_path / "x").read_text() == "old ?"

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old ?"


# --------------------------------------------------------------------------- endpoints


@pytest.fixture
def serve() -> Iterator[Callable[[Reply], Server]]:
    servers: list[Server] = []

    def start(reply: Reply) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def asks(n: int) -> list[Ask]:
    return list(missing([problem(f"{i}?") for i in range(n)], 1, 0, {}))


def teacher(server: Server, concurrency: int = 4, **options: Any) -> EndpointTeacher:
    endpoint = Endpoint(server.url, "m", **{"pause_s": 0.001, "tries": 3, **options})
    return EndpointTeacher(endpoint, "Q {problem}", 50, 0.7, concurrency)


def write(one: EndpointTeacher, n: int) -> list[Candidate | Refusal]:
    return [answer for answers in one.write(asks(n)) for answer in answers]


def test_requests_are_what_the_protocol_says(serve: Callable[[Reply], Server]) -> None:
    def reply(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        time.sleep(0.01)
        return completion(body["messages"][0]["content"], "length" if body["seed"] % 2 else "stop")

    server = serve(reply)
    found = write(teacher(server, key="k", extra={"top_p": 0.9}), 20)
    expected = {(a.problem.id, 0, f"Q {a.problem.question}", a.seed % 2 == 0) for a in asks(20)}
    assert {(c.problem, c.index, c.text, c.finished) for c in found if isinstance(c, Candidate)} == expected
    assert (server.paths, server.keys) == ({"/v1/chat/completions"}, {"Bearer k"})
    assert {k: v for k, v in server.asked[0].items() if k not in ("messages", "seed")} == {
        "model": "m",
        "max_tokens": 50,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    assert 1 < server.most <= 4

    plain = serve(
        lambda body: (200, {}, json.dumps({"choices": [{"text": body["prompt"], "finish_reason": "stop"}]}).encode())
    )
    assert {c.text for c in write(teacher(plain, api="completions"), 2)} == {"Q 0?", "Q 1?"}
    assert plain.paths == {"/v1/completions"}


def test_failures_that_pass_are_tried_again(serve: Callable[[Reply], Server]) -> None:
    tries: Counter[int] = Counter()
    bad = [
        (503, {}, b"busy"),
        (429, {"Retry-After": "0"}, b"slow down"),
        (200, {}, b"{"),
        (200, {}, b'{"choices": []}'),
        (200, {"Content-Length": "100"}, b"cut off"),
    ]

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        tries[body["seed"]] += 1
        return bad[body["seed"] % len(bad)] if tries[body["seed"]] < 3 else completion("x")

    server = serve(reply)
    assert len(write(teacher(server, timeout_s=5.0), 20)) == 20
    assert set(tries.values()) == {3}


def test_an_endpoint_that_is_down_or_denies_ends_the_run(serve: Callable[[Reply], Server]) -> None:
    down = serve(lambda body: (500, {}, b"out of memory"))
    with pytest.raises(TeacherError, match=r"gave no answer in 3 tries, the last time: HTTP 500: out of memory"):
        write(teacher(down), 100)
    assert len(down.asked) <= 4 * 3
    denied = serve(lambda body: (401, {}, b"who are you?"))
    with pytest.raises(
        TeacherError, match=r"refuses every request, HTTP 401: who are you\?; check the URL, model, key"
    ):
        write(teacher(denied), 100)
    assert len(denied.asked) <= 4
    denied.http.server_close()
    nowhere = EndpointTeacher(Endpoint("http://127.0.0.1:9/v1", "m", tries=2, pause_s=0.001), "{problem}", 5, 1.0)
    with pytest.raises(TeacherError, match="gave no answer in 2 tries"):
        write(nowhere, 3)
    with pytest.raises(ValueError, match="no address of a server"):
        Endpoint("file:///etc/passwd", "m")


def test_single_refusals_are_told_and_many_in_a_row_end_the_run(serve: Callable[[Reply], Server]) -> None:
    long = serve(lambda body: (400, {}, b"too long") if "3?" in str(body["messages"]) else completion("x"))
    found = write(teacher(long), 10)
    assert [a.cause for a in found if isinstance(a, Refusal)] == ["HTTP 400: too long"]
    assert len(found) == 10
    never = serve(lambda body: (400, {}, b"unknown field"))
    with pytest.raises(TeacherError, match=r"refused \d requests in a row, the last one with HTTP 400: unknown field"):
        write(teacher(never), 100)
    assert len(never.asked) < 15


def test_an_answer_that_is_no_text_is_empty(serve: Callable[[Reply], Server]) -> None:
    server = serve(lambda body: completion(None))
    assert [c.text for c in write(teacher(server), 1) if isinstance(c, Candidate)] == [""]


def test_what_came_before_a_failure_is_kept_and_never_asked_again(
    serve: Callable[[Reply], Server], tmp_path: Path
) -> None:
    problems = [problem(f"{i}?") for i in range(10)]
    answered: Counter[int] = Counter()

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if len(answered) >= limit:
            return 500, {}, b"down"
        answered[body["seed"]] += 1
        return completion(f"{body['seed']}")

    server = serve(reply)
    for limit in (7, 15, 99):
        with CandidateFile(tmp_path / "raw.jsonl", SETTINGS) as file:
            try:
                generate(file, teacher(server), problems, 2, 0, lambda text: None)
            except TeacherError:
                assert limit < 99
            assert len(file.candidates) == len(answered)
    assert set(answered.values()) == {1}
    assert all(c.text == str(candidate_seed(0, *key)) for key, c in file.candidates.items())
    assert len(file.candidates) == 20


def test_seeds_depend_on_problem_and_number_alone() -> None:
    some = list(missing([problem("1?"), problem("2?")], 3, 0, {}))
    assert len({a.seed for a in some}) == 6
    assert all(0 <= a.seed < 2**31 for a in some)
    rest = list(missing([problem("2?")], 5, 0, {(problem("2?").id, 1): None}))
    assert [a for a in rest if a.index < 3] == [some[3], some[5]]
    assert [a.index for a in rest] == [0, 2, 3, 4]
    assert candidate_seed(1, "p", 0) != candidate_seed(0, "p", 0)


# --------------------------------------------------------------------------- a run's own rollouts


def rollouts_file(tmp_path: Path, *rows: dict[str, Any]) -> str:
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_rollouts_of_the_highest_reward_come_first(tmp_path: Path) -> None:
    rows = [
        {"question": "q", "response": "low", "answer": 4, "reward": -1},
        {"question": "q", "response": "", "answer": 4, "reward": 1.2, "finished": False},
        {"problem": "r", "text": "only", "ground_truth": "5"},
        {"question": " q", "response": "second", "answer": 4, "reward": 1.2},
    ]
    problems, found = read_rollouts(rollouts_file(tmp_path, *rows))
    assert [(p.question, p.answer) for p in problems] == [("q", "4"), ("r", "5")]
    assert [(c.index, c.text, c.finished) for c in found[problem_id("q")]] == [
        (0, "", False),
        (1, "second", True),
        (2, "low", True),
    ]


def test_golds_of_rollouts_come_from_the_problems_where_they_are_known(tmp_path: Path) -> None:
    file = rollouts_file(tmp_path, {"question": "q", "response": "x"})
    assert read_rollouts(file, [problem("q", "7")])[0] == [Problem(problem_id("q"), "q", "7", "")]
    with pytest.raises(ValueError, match=r"row 1: no gold answer .*--problems"):
        read_rollouts(file)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"question": "q", "answer": "4"}, "no column 'response' or 'text'"),
        ({"question": "q", "answer": "4", "response": None}, "the response is no text"),
        ({"question": "q", "answer": "(unknown)", "response": "x"}, "no gold answer"),
        ({"question": "q", "answer": "4", "response": "x", "reward": "good"}, "'reward' is 'good'"),
    ],
)
def test_rollouts_in_other_columns_are_refused(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_rollouts(rollouts_file(tmp_path, row))


# --------------------------------------------------------------------------- in this process


def test_an_engine_writes_what_its_seeds_say_and_tags_stay_in_the_text(tiny_model_dir: Path, tmp_path: Path) -> None:
    from parallel_r1.rollout.transformers_engine import TransformersEngine

    problems = [problem(f"w{i} w{i + 1}") for i in range(3)]

    def run(name: str, batch: int, per_problem: int) -> dict[tuple[str, int], Candidate]:
        one = EngineTeacher(TransformersEngine(), tiny_model_dir, "w9 {problem}", 30, 1.0, batch)
        with CandidateFile(tmp_path / name, SETTINGS) as file:
            assert not generate(file, one, problems, per_problem, 0, lambda text: None)
            return file.candidates

    whole = run("whole", 100, 4)
    assert len(whole) == 12
    assert len({candidate.text for candidate in whole.values()}) == 12
    assert any(tag in candidate.text for candidate in whole.values() for tag in TAGS)
    assert not any("<eos>" in c.text or "<pad>" in c.text for c in whole.values())
    assert {c.finished for c in whole.values()} == {True, False}
    run("parts", 2, 1)
    assert run("parts", 5, 4) == whole, "what else is sampled changes nothing"

    long = EngineTeacher(TransformersEngine(), tiny_model_dir, "w9 {problem}", 5000, 1.0)
    with pytest.raises(TeacherError, match=r"the engine cannot hold a request: .*max_tokens"):
        list(long.write(asks(1)))


def test_a_fingerprint_tells_weights_apart(tiny_model_dir: Path, untied_model_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model_dir, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(tiny_model_dir) != fingerprint(untied_model_dir)
