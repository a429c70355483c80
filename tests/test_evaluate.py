"""`test` and `predict` as a user runs them, with the transformers engine on a tiny model: kills, resumes, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_r1.cli import main
from parallel_r1.data.prompts import attach_prompt, named_prompt
from parallel_r1.evaluation.samples import key_of, read_samples
from parallel_r1.policy import PolicySource
from parallel_r1.tiny import TinyQwen3

ROOT = Path(__file__).parents[1]
ENGINE = "--engine=parallel_r1.rollout.transformers_engine.TransformersEngine"
DATA = "--evaluation.data=parallel_r1.data.embedded.EmbeddedTask"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    PolicySource(init=TinyQwen3()).prepare(folder, seed=0)
    attach_prompt(folder, named_prompt("plain", "seen"))
    return folder


def options(task: str, model: Path, root: Path, *more: str) -> list[str]:
    return [
        task,
        ENGINE,
        f"--evaluation.model={model}",
        f"--curriculum.root={root}",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--evaluation.generation.max_tokens=20",
        "--evaluation.generation.max_blocks=1",
        *more,
    ]


def measure(model: Path, root: Path, *more: str) -> list[str]:
    return options(
        "test",
        model,
        root,
        DATA,
        "--evaluation.data.eval_size=3",
        "--evaluation.samples=2",
        "--evaluation.batch_size=4",
        "--evaluation.resamples=100",
        *more,
    )


def report(root: Path) -> dict:
    return json.loads((root / "test" / "tiny" / "report.json").read_text())


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation that nothing disturbed."""
    root = tmp_path_factory.mktemp("whole")
    main(measure(model, root))
    return root


def test_every_problem_has_its_samples_in_every_mode(whole: Path) -> None:
    rows = list(read_samples(whole / "test" / "tiny"))
    assert len({key_of(row) for row in rows}) == len(rows) == 6 * 2 * 3
    found = report(whole)
    assert [(tier, t["problems"], t["samples"]) for tier, t in found["tiers"].items()] == [
        ("easy", 3, 2),
        ("hard", 3, 2),
    ]
    assert found["tiers"]["easy"]["modes"]["plain"]["total_tokens"]["value"] == pytest.approx(
        sum(r["total_tokens"] for r in rows if (r["mode"], r["tier"]) == ("plain", "easy")) / 6, abs=1e-5
    )
    assert (whole / "test" / "tiny" / "report.md").read_text().startswith("# tiny\n")


def test_no_path_of_this_machine_is_in_the_report_but_the_users_own(whole: Path, model: Path) -> None:
    text = (whole / "test" / "tiny" / "report.json").read_text()
    assert text.count(str(model)) == 1
    assert str(whole) not in text
    assert str(ROOT) not in text


@pytest.mark.integration
def test_killed_in_the_middle_it_goes_on_and_reports_the_same(whole: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "test" / "tiny"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "parallel_r1", *measure(model, tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < until:
        if sum(path.read_bytes().count(b"\n") for path in folder.glob("samples-*.jsonl")) >= 8:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    with (folder / "samples-0.jsonl").open("ab") as file:
        file.write(b'{"id": "torn')  # a kill in the middle of a row
    kept = [key_of(row) for row in read_samples(folder)]
    assert 8 <= len(kept) < 36
    main(measure(model, tmp_path))
    lines = (folder / "samples-0.jsonl").read_text().splitlines()
    keys = [key_of(json.loads(line)) for line in lines]
    assert keys[: len(kept)] == kept, "what was there stayed as it was"
    assert len(set(keys)) == len(keys) == 36, "nothing is sampled twice"
    for name in ("report.json", "report.md"):
        assert (folder / name).read_bytes() == (whole / "test" / "tiny" / name).read_bytes()


def test_a_batch_changes_no_sample(whole: Path, model: Path, tmp_path: Path) -> None:
    main(measure(model, tmp_path, "--evaluation.batch_size=1000"))
    mine, other = (
        {key_of(row): row["response"] for row in read_samples(root / "test" / "tiny")} for root in (tmp_path, whole)
    )
    assert mine == other


def test_a_finished_evaluation_is_reported_again_without_an_engine(
    whole: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from parallel_r1.rollout.transformers_engine import TransformersEngine

    before = report(whole)
    monkeypatch.setattr(TransformersEngine, "start", lambda *_: pytest.fail("nothing is left to sample"))
    main(measure(model, whole))
    assert report(whole) == before


def fails(capsys: pytest.CaptureFixture[str], args: list[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_a_changed_setting_is_refused_with_the_difference_and_the_remedy(
    whole: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = fails(capsys, measure(model, whole, "--evaluation.temperature=0.5", "--seed_everything=3"))
    for part in ("temperature was 1.0, now 0.5", "seed was 0, now 3", "--evaluation.fresh=true", "--evaluation.folder"):
        assert part in message
    assert "prompt" not in message


def test_fresh_drops_what_is_there(model: Path, tmp_path: Path) -> None:
    short = ("--evaluation.limit=1", "--evaluation.modes=[plain]")
    main(measure(model, tmp_path, *short))
    main(measure(model, tmp_path, *short, "--evaluation.fresh=true", "--seed_everything=3"))
    assert report(tmp_path)["settings"]["seed"] == 3
    assert len(list(read_samples(tmp_path / "test" / "tiny"))) == 4


def test_another_model_of_the_same_name_is_refused(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "tiny"
    PolicySource(init=TinyQwen3()).prepare(other, seed=1)
    attach_prompt(other, named_prompt("plain", "seen"))
    assert "model was" in fails(capsys, measure(other, whole))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--evaluation.samples=0"], ["evaluation.samples", "1 or more"]),
        (["--evaluation.samples={easy: 2}"], ["evaluation.samples", "hard"]),
        (["--evaluation.temperature=0"], ["evaluation.temperature=0", "evaluation.samples to 1"]),
        (["--evaluation.modes=[]"], ["evaluation.modes", "fork_join"]),
        (["--evaluation.modes=[forkjoin]"], ["modes", "forkjoin"]),
        (["--evaluation.model=nowhere"], ["evaluation.model", "nowhere"]),
        ([f"--evaluation.model={ROOT / 'tests'}"], ["evaluation.model", "neither a run"]),
        (["--evaluation.data=null"], ["evaluation.data", "benchmarks.yaml"]),
        (["--evaluation.generation.max_tokens=4096"], ["max_tokens=4096", "512"]),
        (["--evaluation.generation.max_tokens=6"], ["max_tokens=6", "block"]),
    ],
)
def test_a_mistake_is_one_message_that_names_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], named: list[str]
) -> None:
    message = fails(capsys, measure(model, tmp_path, *more))
    for part in named:
        assert part in message
    assert "Traceback" not in message
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_write_to_one_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from parallel_r1.evaluation.samples import SampleFile

    held = SampleFile(tmp_path / "test" / "tiny", 0)
    assert "another process" in fails(capsys, measure(model, tmp_path))
    held.close()


def test_predict_reads_a_file_and_consolidates(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"problem": "1 + 1 = ?", "answer": 2}\n{"question": "Joy \\u001b[31m has 4 coins."}\n')
    rounds = {}
    for per_round in (1, 4):
        root = tmp_path / str(per_round)
        args = [f"--predict.problems={file}", "--predict.attempts=4", f"--predict.attempts_per_round={per_round}"]
        main(options("predict", model, root, *args, "--predict.early_stop=off"))
        rounds[per_round] = (root / "predictions-tiny.jsonl").read_text()
    assert rounds[1] == rounds[4], "rounds change memory, not answers"
    rows = [json.loads(line) for line in rounds[1].splitlines()]
    assert [row["correct"] is None for row in rows] == [False, True]
    for row in rows:
        assert len(row["attempts"]) == 4
        assert row["tokens_of_all_attempts"] == sum(a["total_tokens"] for a in row["attempts"])
        assert row["response"] in [a["response"] for a in row["attempts"]]
        assert 0 < row["confidence"] <= 1
    assert "\x1b" not in capsys.readouterr().out


def test_predict_may_be_greedy_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ("--problem=1 + 1 = ?", "--evaluation.temperature=0")
    assert "predict.attempts to 1" in fails(
        capsys, options("predict", model, tmp_path, *greedy, "--predict.attempts=2")
    )
    said = []
    for seed in (1, 2):
        main(options("predict", model, tmp_path, *greedy, f"--seed_everything={seed}"))
        said.append(json.loads((tmp_path / "predictions-tiny.jsonl").read_text())["response"])
    assert said[0] == said[1]


def test_predict_without_problems_says_how_to_give_some(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--problem" in fails(capsys, options("predict", model, tmp_path))
