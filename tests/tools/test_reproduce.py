"""The paper in miniature: which runs are made and when, what is kept, and what the report says of them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import pytest
import yaml

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import reproduce  # noqa: E402
from reproduction import claims, report  # noqa: E402
from reproduction.claims import ACCURACY, CLAIMS, CRITICAL, RATIO, Claim, Comparison  # noqa: E402
from reproduction.rows import ROWS, Run  # noqa: E402

from parallel_r1.cli import CurriculumCLI  # noqa: E402

CONFIGS = reproduce.CONFIGS


# --------------------------------------------------------------------------- rows and their configurations


def test_every_row_has_a_configuration_and_every_configuration_a_row() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(ROWS)


def test_every_claim_is_about_rows() -> None:
    for claim in (*CLAIMS, *claims.CHECKS):
        for comparison in claim.comparisons:
            assert {comparison.a, comparison.b or comparison.a} <= set(ROWS)


@pytest.mark.integration  # two seconds a row
def test_a_row_shares_the_cold_start_of_another_only_where_they_are_configured_alike(tmp_path: Path) -> None:
    """Every row parses; only seed, problems and steps that the report states are in them."""
    starts, responses = {}, set()
    for name, row in ROWS.items():
        cli = CurriculumCLI(reproduce.arguments(name, "fit", tmp_path, 3, quick=False))
        curriculum = cli.curriculum()
        curriculum.check("fit")
        assert curriculum.seed == 3
        assert curriculum.chosen("fit")[-1] == (row.last or "cold_start")
        config = yaml.safe_load(cli._task_parser.dump(cli.config["fit"], skip_unset=True))
        starts[name] = config["curriculum"]["stages"]["cold_start"]
        hard = curriculum.stages["hard"]
        structure = (
            hard.module.generation.structure
            if row.last == "hard"
            else starts[name]["module"]["init_args"]["generation"]["structure"]
        )
        assert {"seen": "plain", "unseen": "fork_join", "sequential": "sequential"}[structure] == row.mode
        responses.add(hard.data.batch_size * hard.module.group_size)
    for name, row in ROWS.items():
        if row.start:
            assert starts[name] == starts[row.start], name
    assert responses == {report.RESPONSES}


def test_a_command_line_is_what_a_user_would_type(tmp_path: Path) -> None:
    words = reproduce.arguments("unseen_s2", "test", tmp_path, 2, quick=False)
    assert words[:5] == ["test", "--config", f"{CONFIGS}/seen.yaml", "--config", f"{CONFIGS}/unseen_s2.yaml"]
    assert "--seed_everything=2" in words
    assert "--curriculum.only=hard" in words
    assert "--evaluation.modes=[fork_join]" in words
    more = reproduce.arguments("sequential_tokens", "fit", tmp_path, 1, quick=False, steps=41)
    assert "--curriculum.stages.hard.trainer.max_steps=41" in more


def test_rows_bring_what_they_start_from() -> None:
    assert reproduce.wanted_rows(["seen"]) == ["sft_seen", "seen"]
    tokens = ["sft_seen", "sft_sequential", "seen", "sequential", "sequential_tokens"]
    assert reproduce.wanted_rows(["sequential_tokens"]) == tokens
    assert reproduce.wanted_rows([]) == list(ROWS)
    with pytest.raises(ValueError, match="no row 'sen'; choose from base"):
        reproduce.wanted_rows(["sen"])


# --------------------------------------------------------------------------- scheduling


def test_a_run_waits_for_what_it_needs(tmp_path: Path) -> None:
    runs = [Run(tmp_path, row, 1) for row in ("sequential_tokens", "seen", "sequential", "sft_seen", "sft_sequential")]
    schedule, order = reproduce.Schedule(runs), []

    def worker() -> None:
        for run in schedule:
            order.append(run.row)
            schedule.done(run, True)

    workers = [Thread(target=worker, daemon=True) for _ in range(3)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join(timeout=20)
    assert sorted(order) == sorted(run.row for run in runs)
    for row in order:
        for needed in filter(None, (ROWS[row].start, *ROWS[row].needs)):
            assert order.index(needed) < order.index(row)


def test_what_needs_a_failed_run_is_left_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    rows = ["sft_seen", "sft_sequential", "seen", "sequential", "sequential_tokens"]
    schedule, order = reproduce.Schedule([Run(tmp_path, row, 1) for row in rows]), []
    for run in schedule:
        order.append(run.row)
        schedule.done(run, run.row != "sft_seen")
    assert order == ["sft_seen", "sft_sequential", "sequential"]


# --------------------------------------------------------------------------- what is kept


def finish(run: Run, stage: str) -> None:
    for folder in (run.folder / "stages" / stage / "model", run.folder / "tensorboard" / stage):
        folder.mkdir(parents=True)
    (run.folder / "stages" / stage / "stage.json").write_text("{}")


def test_a_cold_start_is_copied_whole(tmp_path: Path) -> None:
    finish(Run(tmp_path, "sft_seen", 1), "cold_start")
    run = Run(tmp_path, "seen", 1)
    reproduce.share_cold_start(run)
    assert (run.folder / "stages" / "cold_start" / "stage.json").is_file()
    assert (run.folder / "stages" / "cold_start" / "model").is_dir()
    assert not run.trained
    finish(run, "hard")
    assert run.trained


def test_equal_tokens(tmp_path: Path) -> None:
    """30 steps of 60 tokens a response are what 45 steps of 40 are."""
    from torch.utils.tensorboard import SummaryWriter

    for row, tokens in (("seen", 60.0), ("sequential", 40.0)):
        run = Run(tmp_path, row, 1)
        finish(run, "hard")
        with SummaryWriter(str(run.folder / "tensorboard" / "hard")) as writer:
            for step in range(30):
                writer.add_scalar("rollout/total_tokens", tokens, step)
    assert reproduce.steps_for_equal_tokens(Run(tmp_path, "sequential_tokens", 1)) == 45


def test_metrics_are_those_of_the_rows_own_mode(tmp_path: Path) -> None:
    def entry(value: float) -> dict:
        return {"value": value, "ci95": [0, 1]}

    run = Run(tmp_path, "unseen_s1", 1)
    assert not run.tested
    folder = run.folder / "test" / "hard"
    folder.mkdir(parents=True)
    tier = {
        "samples": 2,
        "modes": {"fork_join": {"mean@2": entry(0.75), RATIO: entry(0.9)}, "plain": {"mean@2": entry(0.1)}},
        "by_problem": {"fork_join": [{"id": "x", "correct": 2}, {"id": "y", "correct": 1}]},
    }
    (folder / "report.json").write_text(json.dumps({"tiers": {"hard": tier}}))
    assert run.metrics()[ACCURACY] == 0.75
    assert run.metrics()[RATIO] == 0.9
    assert run.correct() == {"x": 1.0, "y": 0.5}


# --------------------------------------------------------------------------- the report


@dataclass
class Fake:
    """A run as it might come out."""

    row: str
    seed: int
    values: dict[str, float] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)
    problems: dict[str, float] = field(default_factory=dict)
    commands: list[dict] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        return self.values

    def correct(self) -> dict[str, float]:
        return self.problems

    def events(self, tag: str) -> list[float]:
        return self.curve

    def usage(self) -> list[dict]:
        return self.commands


def fakes(**accuracies: list[float]) -> list[Fake]:
    """Runs by row, one accuracy a seed."""
    return [Fake(row, s, {ACCURACY: value}) for row, values in accuracies.items() for s, value in enumerate(values, 1)]


def test_differences_are_paired_by_seed() -> None:
    """The rows differ by .1 in each seed while seeds differ by .3: unpaired, nothing could be said."""
    runs = fakes(seen=[0.5, 0.8, 0.2], sequential=[0.4, 0.7, 0.1])
    found = claims.measure(Comparison(ACCURACY, "seen", "sequential"), runs)
    assert found.seeds == pytest.approx((0.1, 0.1, 0.1))
    assert found.verdict == "holds"
    assert claims.measure(Comparison(ACCURACY, "sequential", "seen"), runs).verdict == "fails"


def test_seeds_without_both_sides_do_not_count() -> None:
    runs = fakes(seen=[0.5, 0.8, 0.2], sequential=[0.4])
    found = claims.measure(Comparison(ACCURACY, "seen", "sequential"), runs)
    assert found.seeds == pytest.approx((0.1,))
    assert found.verdict == "open"
    assert claims.measure(Comparison(ACCURACY, "seen", "base"), runs).seeds == ()


def test_a_curve_is_compared_with_its_own_start() -> None:
    comparison = Comparison("rollout/parallel_position", "seen_position", None)
    early, late, short = [0.2] * 5 + [0.9] * 9 + [0.4] * 5, [0.1] * 5 + [0.3] * 5, [0.0] * 9
    runs = [Fake("seen_position", s, curve=curve) for s, curve in enumerate((early, late, short))]
    assert claims.measure(comparison, runs).seeds == pytest.approx((0.2, 0.2))


@pytest.mark.parametrize(
    ("verdicts", "claim"),
    [
        (["holds", "holds"], "reproduced"),
        (["holds", "open"], "undecided"),
        (["open"], "undecided"),
        (["holds", "fails"], "not reproduced"),
        (["open", "fails"], "not reproduced"),
        ([], "undecided"),
    ],
)
def test_a_claim_needs_all_its_comparisons(verdicts: list[str], claim: str) -> None:
    assert claims.claim_verdict(verdicts) == claim


def test_the_report_tells_what_is_missing_and_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim("Seen beats sequential", (Comparison(ACCURACY, "seen", "sequential"),))
    monkeypatch.setattr(report, "CLAIMS", (claim,))
    numbers = dict.fromkeys([*report.COLUMNS, CRITICAL], 0.5)
    labels = {name: row.label for name, row in ROWS.items()}
    runs = [
        Fake(row, seed, {**numbers, ACCURACY: value + seed / 100}, [0.1] * 12, {"x": value, "y": value})
        for row, value in (("seen", 0.8), ("sequential", 0.3))
        for seed in (1, 2)
    ]
    runs[0].commands = [{"task": "fit", "rc": 1, "wall_s": 9, "cpu_s": 1800, "error": "lost"}, {"task": "fit", "rc": 0}]
    runs[0].commands[1] |= {"wall_s": 9, "cpu_s": 1800, "error": ""}
    runs.append(Fake("unseen_s1", 1, commands=[{"task": "fit", "rc": -9, "wall_s": 1, "cpu_s": 0, "error": "`no`"}]))
    path = tmp_path / "paper.md"
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "notes.md").write_text("What a person makes of it.")
    text = report.report(runs, labels, path, "python tools/reproduce.py", "2 CPU cores")
    assert "| Seen beats sequential | **reproduced** |" in text
    assert "+0.500 [+0.500, +0.500]" in text
    assert "1.00 CPU-hours" in text
    assert "Evaluation: 2 hard problems of the test split, the same for every row" in text
    assert "What a person makes of it." in text
    assert "**Not finished:** Unseen S1 (accuracy) (seed 1)." in text
    assert "- seed 1, `unseen_s1`, fit: exit status -9: `no`" in text
    assert "seed 1, `seen`" not in text, "its second try succeeded"
    assert "| Seen | 2 | 0.815 [0.751, 0.879] |" in text  # .81 and .82: .815 +- 12.7062 * .00707 / sqrt(2)
    runs[1].problems = {"x": 1.0, "z": 1.0}
    assert "**not the same**" in report.report(runs, labels, path, "python tools/reproduce.py", "2 CPU cores")
    figures = [line.split("](")[1][:-1] for line in text.splitlines() if line.startswith("![")]
    assert len(figures) == 4
    for figure in figures:
        assert (tmp_path / figure).stat().st_size < 100_000


@pytest.mark.integration
def test_two_rows_from_start_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--only", "sft_seen,sequential", "--seeds", "1", "--root", str(tmp_path / "runs")]
    path = tmp_path / "report.md"
    reproduce.main([*options, "--report", str(path)])
    assert "Every run is finished." in path.read_text()
    assert capsys.readouterr().out.count("trained, tested") == 3
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("*") if file.is_file()}
    reproduce.main([*options, "--report", str(path)])
    after = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("*") if file.is_file()}
    assert after == before, "a finished run is not touched again"
