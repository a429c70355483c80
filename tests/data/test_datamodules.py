"""DataModules: splits, order over ranks and resumes, the loaders under a real Trainer, construction from a config."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from lightning import LightningModule, Trainer

import parallel_r1.data
from parallel_r1.data.base import ProblemDataModule, Split
from parallel_r1.data.datamodules import GSM8K, MATH, Benchmark, DAPOMath, Mixture, ParallelGSM8K, Problems
from parallel_r1.types import Problem


def problems(n: int, start: int = 0, tier: str = "t") -> list[Problem]:
    return [Problem(str(i), f"q{i}", str(i), tier) for i in range(start, start + n)]


class Given(ProblemDataModule):
    """Serves the lists it is given."""

    def __init__(self, splits: dict[str, list[Problem]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lists = splits

    def problems(self, split: Split) -> list[Problem]:
        return self.lists.get(split, [])


def on_rank(data: ProblemDataModule, rank: int, world_size: int) -> ProblemDataModule:
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
    return data


def ids(batch: list[Problem]) -> list[str]:
    return [problem.id for problem in batch]


def train_batches(data: ProblemDataModule, n: int) -> list[list[str]]:
    return [ids(batch) for batch, _ in zip(data.train_dataloader(), range(n), strict=False)]


def make(kind: str, **kwargs: Any) -> ProblemDataModule:
    parts = [{"train": problems(23, tier="a")}, {"train": problems(11, start=100, tier="b")}]
    if kind == "plain":
        return Given({"train": parts[0]["train"] + parts[1]["train"]}, **kwargs)
    return Mixture([Given(part, val_size=2) for part in parts], weights=[3, 1], **kwargs)


@settings(max_examples=30, deadline=None)  # shared cores: time says nothing
@given(
    kind=st.sampled_from(["plain", "mixture"]),
    seed=st.integers(0, 2**31),
    batch_size=st.integers(1, 40),
    start=st.integers(0, 50),
)
def test_ranks_and_resumes_see_the_same_global_batches(kind: str, seed: int, batch_size: int, start: int) -> None:
    whole = train_batches(make(kind, seed=seed, batch_size=batch_size), start + 3)[start:]
    for world_size in (1, 2, 4):
        ranks = []
        for rank in range(world_size):
            data = on_rank(make(kind, seed=seed, batch_size=batch_size), rank, world_size)
            data.start_iteration = start
            ranks.append(train_batches(data, 3))
        for i, batch in enumerate(whole):
            at = {j * world_size + r: x for r, batches in enumerate(ranks) for j, x in enumerate(batches[i])}
            assert at == dict(enumerate(batch))


def test_an_epoch_shows_every_training_problem_once() -> None:
    data = Given({"train": problems(12)}, batch_size=5, val_size=2, seed=1)
    shown = list(chain.from_iterable(train_batches(data, 4)))
    for epoch in (shown[:10], shown[10:]):
        assert sorted(epoch) == sorted(ids(data.split("train")))


def test_the_seed_is_the_runs_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Given({"train": problems(9)})
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert (data.seed, Given({}, seed=3).seed) == (17, 3)
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert data.seed == 0


def test_hold_out_is_disjoint_and_sized() -> None:
    for size, expected in ((None, 10), (7, 7), (0, 0)):
        data = Given({"train": problems(100)}, val_size=size)
        train, val = ids(data.split("train")), ids(data.split("val"))
        assert len(val) == expected
        assert sorted(train + val) == sorted(ids(problems(100)))
    assert Given({"train": problems(9)}, val_size=0).val_dataloader() == []
    assert len(Given({"train": problems(9000)}).split("val")) == 256


def test_training_problems_that_validate_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    data = Given({"train": problems(10), "val": problems(4, start=8)})
    with caplog.at_level("INFO"):
        data.setup("fit")
    assert ids(data.split("train")) == ids(problems(8))
    assert ids(data.split("val")) == ids(problems(4, start=8))
    assert "2 of 10 training problems are also validation problems" in caplog.text


@pytest.mark.parametrize(
    ("splits", "stage", "message"),
    [
        ({}, "fit", r"cannot hold val_size=1 problems out of 0 to train on"),
        ({"train": problems(5)}, "test", r"the 'test' split holds no problem"),
        ({"train": problems(2), "val": problems(2)}, "fit", r"the 'train' split holds no problem"),
    ],
)
def test_an_empty_split_is_an_error(splits: dict[str, list[Problem]], stage: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"Given: {message}"):
        Given(splits).check(stage)


def test_a_hold_out_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"cannot hold val_size=5 problems out of 5 .*; lower val_size"):
        Given({"train": problems(5)}, val_size=5).check()


@pytest.mark.parametrize("name", ["batch_size", "val_batch_size", "max_prompt_chars"])
def test_sizes_are_validated(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; give 1 or more"):
        Given({}, **{name: 0})


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_equally_many_evaluation_batches(world_size: int) -> None:
    data = [on_rank(Given({"test": problems(9)}, val_batch_size=4), rank, world_size) for rank in range(world_size)]
    batches = [list(map(ids, d.test_dataloader())) for d in data]
    assert {len(b) for b in batches} == {3} == {len(d.test_dataloader()) for d in data}
    assert [len(b) for b in batches[-1]] == {1: [4, 4, 1], 2: [2, 2, 0], 4: [1, 1, 0]}[world_size]
    assert sorted(chain.from_iterable(chain.from_iterable(batches))) == ids(problems(9))


class Recorder(LightningModule):
    """Counts optimizer steps and keeps the ids it was handed."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list[list[str]]] = {"train": [], "val": [], "predict": []}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: list[Problem], batch_idx: int) -> None:
        self.seen["train"].append(ids(batch))
        self.manual_backward(self.weight * len(batch))
        self.optimizers().step()

    def validation_step(self, batch: list[Problem], batch_idx: int) -> None:
        self.seen["val"].append(ids(batch))

    def predict_step(self, batch: list[Problem], batch_idx: int) -> None:
        self.seen["predict"].append(ids(batch))


def test_under_a_real_trainer() -> None:
    """An endless iterable, frozen records, validation by number of batches, and a start in the middle."""
    trainer = Trainer(
        max_steps=4,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = Given({"train": problems(30), "predict": problems(2)}, batch_size=4, val_size=5, val_batch_size=3, seed=2)
    data.start_iteration = 6
    recorder = Recorder()
    trainer.fit(recorder, datamodule=data)
    assert recorder.seen["train"] == [ids(data.batch(i)) for i in range(6, 10)]
    val = ids(data.split("val"))
    assert recorder.seen["val"] == [val[:3], val[3:]] * 2
    trainer.predict(recorder, datamodule=data)
    assert recorder.seen["predict"] == [["0", "1"]]


def test_a_mixture_draws_by_weight_and_keeps_each_parts_order() -> None:
    parts = [Given({"train": problems(50, tier="a")}), Given({"train": problems(8, start=45, tier="b")})]
    data = Mixture(parts, weights=[0.75, 0.25], batch_size=8, seed=4)
    data.check()
    drawn = [problem for i in range(40) for problem in data.batch(i)]
    assert [sum(p.tier == "b" for p in data.batch(i)) for i in range(40)] == [2] * 40
    train, val = data.split("train"), data.split("val")
    assert {p.id for p in drawn} == set(ids(train))
    assert not set(ids(train)) & set(ids(val))
    assert len(ids(train)) == len(set(ids(train)))
    b = [p.id for p in train if p.tier == "b"]
    shown = [p.id for p in drawn if p.tier == "b"][: len(b)]
    assert sorted(shown) == sorted(b), "a small part is shown whole before it repeats"


def test_mixture_errors() -> None:
    part = Given({"train": problems(9)}, val_size=0)
    for weights in ([1.0], [1.0, 0.0], [1.0, 1.0, 1.0]):
        with pytest.raises(ValueError, match="give one positive number for each of 2 parts"):
            Mixture([part, part], weights)
    with pytest.raises(ValueError, match="parts is empty"):
        Mixture([])
    with pytest.raises(ValueError, match="nothing is left to train on of part 1"):
        Mixture([part, part], val_size=0).check()


def write(file: Path, rows: list[dict]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(file)


def gsm8k_rows(n: int, start: int = 0) -> list[dict]:
    return [{"question": f"How many is {i}?", "answer": f"Well.\n#### {i}"} for i in range(start, start + n)]


def test_paths_of_splits(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", gsm8k_rows(20))
    test = write(tmp_path / "test.jsonl", gsm8k_rows(5, start=18))
    data = GSM8K(path=train, val_path=test, test_path=test, max_rows=19)
    assert len(data.split("val")) == 5
    assert len(data.split("train")) == 18, "19 rows, of which the last validates"
    assert len(GSM8K(path=train, val_path=test, val_size=3).split("val")) == 3
    assert len(data.split("test")) == len(data.split("predict")) == 5
    assert len(GSM8K(path=str(tmp_path)).split("test")) == 5
    with pytest.raises(ValueError, match=r"GSM8K: path is the file .*; give test_path"):
        GSM8K(path=train).check("test")
    with pytest.raises(FileNotFoundError, match="no data file or folder"):
        GSM8K(path=str(tmp_path / "gone.jsonl")).check("test")


def test_a_mistake_in_a_file_is_found_before_training(tmp_path: Path) -> None:
    rows = gsm8k_rows(20)
    rows[13]["answer"] = "none"
    with pytest.raises(ValueError, match=r"train\.jsonl, row 14: 'answer' holds no '#### '.*question, answer"):
        GSM8K(path=write(tmp_path / "train.jsonl", rows)).check()
    with pytest.raises(ValueError, match=r"no column 'prompt' \(columns found: question, answer\)"):
        DAPOMath(path=write(tmp_path / "wrong.jsonl", gsm8k_rows(2))).check()


def test_long_questions_are_left_out_of_training_only(tmp_path: Path) -> None:
    rows = [*gsm8k_rows(20), {"question": "x" * 100, "answer": "#### 1"}]
    file = write(tmp_path / "x.jsonl", rows)
    data = GSM8K(path=file, test_path=file, max_prompt_chars=50, val_size=0)
    assert len(data.split("train")) == 20
    assert len(data.split("test")) == 21
    assert [report.too_long for report in data.reports] == [1, 0]


def test_math_selects_levels_and_subjects(tmp_path: Path) -> None:
    rows = [
        {"problem": f"{level} {subject}?", "level": f"Level {level}", "type": subject, "answer": "1"}
        for level in (1, 2, 5, "?")
        for subject in ("Algebra", "Number Theory")
    ]
    file = write(tmp_path / "x.jsonl", rows)
    data = MATH(path=file, levels=[2, 5], subjects=["number theory"], val_size=0)
    assert [p.question for p in data.split("train")] == ["2 Number Theory?", "5 Number Theory?"]
    assert data.reports[0].rejected == {"another level": 4, "another subject": 2}
    with pytest.raises(ValueError, match=r"levels holds \[6\]; MATH has the levels 1 to 5"):
        MATH(path=file, levels=[5, 6])
    with pytest.raises(ValueError, match=r"subjects holds \['topology'\]; MATH has Algebra, "):
        MATH(path=file, subjects=["topology"])


def test_faulty_traces_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"problem": "1?", "text": "Final Answer: 1", "ground_truth": "1"},
        {"problem": "2?", "text": "<Path>", "ground_truth": "1"},
        {"problem": "3?", "text": "Final Answer: 2", "ground_truth": "1"},
    ]
    file = write(tmp_path / "x.jsonl", rows)
    data = ParallelGSM8K(path=file, val_size=0)
    assert [p.demonstration for p in data.split("train")] == ["Final Answer: 1"]
    assert data.reports[0].rejected == {"not well formed: <Path> outside a block": 1, "wrong final answer": 1}
    assert len(ParallelGSM8K(path=file, val_size=0, drop_faulty=False).split("train")) == 3


def test_any_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [{"q": f"{i}?", "a": i} for i in range(10)])
    data = Problems(path=file, problem_column="q", answer_column="a", tier="mine")
    assert {p.tier for p in data.split("train")} == {"mine"}
    asked = Problems(path=file, problem_column="q", answer_column=None)
    assert len(asked.split("predict")) == 10
    with pytest.raises(ValueError, match="can only be predicted"):
        asked.check("fit")


def test_benchmarks_are_tiers(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [{"problem": "1?", "answer": "1"}, {"problem": "2?", "answer": "1"}])
    two = write(tmp_path / "b.jsonl", [{"question": "1?", "solution": r"\boxed{1}"}])
    data = Benchmark({"aime24": one, "own": two, "gsm8k": write(tmp_path / "c.jsonl", gsm8k_rows(1))})
    for split in ("val", "test", "predict"):
        assert [p.tier for p in data.split(split)] == ["aime24", "aime24", "own", "gsm8k"]
    with pytest.raises(ValueError, match="holds no problems to train on"):
        data.check("fit")
    with pytest.raises(ValueError, match=r"no known home of \['own'\]; give a path, or name one of aime24"):
        Benchmark({"own": None})
    with pytest.raises(ValueError, match="sets is empty"):
        Benchmark({})


CONFIGS = [
    {"class_path": "GSM8K", "init_args": {"path": "x", "val_path": "y", "batch_size": 4, "seed": 3}},
    {"class_path": "DAPOMath", "init_args": {"streaming": True, "max_rows": 10, "max_prompt_chars": 2000}},
    {"class_path": "MATH", "init_args": {"levels": [4, 5], "subjects": ["Algebra"], "hub_config": "algebra"}},
    {"class_path": "ParallelGSM8K", "init_args": {"drop_faulty": False, "val_size": 0}},
    {"class_path": "Problems", "init_args": {"path": "x", "answer_column": None, "tier": "own"}},
    {"class_path": "Benchmark", "init_args": {"sets": {"aime24": None, "own": "x.jsonl"}, "val_batch_size": 8}},
]


@pytest.mark.parametrize(
    "config",
    [*CONFIGS, {"class_path": "Mixture", "init_args": {"parts": CONFIGS[:2], "weights": [1, 2]}}],
    ids=lambda config: config["class_path"],
)
def test_every_module_is_built_from_a_config(config: dict[str, Any]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data", type=ProblemDataModule)
    found = parser.parse_object(
        {"data": {**config, "class_path": f"parallel_r1.data.datamodules.{config['class_path']}"}}
    )
    data = parser.instantiate(found).data
    assert type(data).__name__ == config["class_path"]
    for name, value in config["init_args"].items():
        if name not in ("parts", "subjects", "seed"):
            assert getattr(data, name) == value


def test_prompts_and_sources_import_in_no_time() -> None:
    code = (
        "import sys, parallel_r1.data.sources, parallel_r1.data.prompts, parallel_r1.data.order\n"
        "print(sorted({'torch', 'lightning', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize("name", ["base", "datamodules", "order", "prompts", "reading", "sources"])
def test_heavy_libraries_are_imported_late(name: str) -> None:
    """`--help` must not pay for them. (Read from the source: Lightning itself already imports torch.)"""
    folder = Path(parallel_r1.data.__file__).parent
    imports = {
        alias.split(".")[0]
        for node in ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    assert not imports & {"datasets", "math_verify", "pyarrow", "torch", "transformers", "vllm"}
