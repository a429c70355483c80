"""The debug curriculum through real vLLM, as a user runs it; then what a second run, `test` and `predict` do."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallel_r1.data.doors import make_problems
from parallel_r1.evaluation.samples import key_of, read_samples
from parallel_r1.policy import is_model_folder

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
pytestmark = pytest.mark.integration


def parallel_r1(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "parallel_r1", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def scalars(run: Path, stage: str) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run / "tensorboard" / stage), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("debug") / "run"
    parallel_r1("fit", "--config", "configs/debug.yaml", f"--curriculum.root={folder}")
    return folder


def test_every_stage_leaves_a_model_a_record_and_a_summary(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["name"], summary["seed"]) == ("debug", 1)
    assert [s["name"] for s in summary["stages"]] == ["cold_start", "easy", "hard"]
    assert [s["steps"] for s in summary["stages"]] == [12, 3, 3]
    assert [s["module"] for s in summary["stages"]] == ["SFTModule", "RLModule", "RLModule"]
    for stage in summary["stages"]:
        assert is_model_folder(run / "stages" / stage["name"] / "model")
        for tier in ("easy", "hard"):
            for metric in (
                "accuracy",
                "accuracy_ci95",
                "parallel_ratio",
                "format_valid",
                "critical_tokens",
                "total_tokens",
                "n",
            ):
                for when in ("before", "after"):
                    assert math.isfinite(stage[when][f"{tier}/{metric}"])
        assert stage["after"]["easy/n"] == 32


def test_a_stage_starts_where_the_one_before_ended(run: Path) -> None:
    stages = json.loads((run / "summary.json").read_text())["stages"]
    for earlier, later in itertools.pairwise(stages):
        assert later["before"] == earlier["after"]


def test_rollouts_equal_the_policy_at_every_iteration(run: Path) -> None:
    for stage in ("easy", "hard"):
        gaps = scalars(run, stage)["rollout_logprob_gap/max"]
        assert len(gaps) == 3
        assert all(gap < 1e-4 for _, gap in gaps), gaps


def test_tensorboard_has_one_step_axis_and_the_groups(run: Path) -> None:
    steps = [
        step
        for stage, tag in (
            ("cold_start", "policy/loss"),
            ("easy", "reward/total/mean"),
            ("hard", "reward/total/mean"),
        )
        for step, _ in scalars(run, stage)[tag]
    ]
    assert steps == list(range(18))
    tags = set(scalars(run, "hard"))
    assert tags >= {
        "reward/total/mean",
        "rollout/accuracy",
        "rollout/parallel_ratio",
        "rollout/format_valid",
        "rollout/response_length",
        "rollout/truncated",
        "policy/entropy",
        "policy/grad_norm",
        "rollout_logprob_gap/mean",
        "rollout_logprob_gap/max",
        "time/rollout_s",
        "time/sync_s",
        "time/update_s",
        "time/tokens_per_second",
        "val/hard/accuracy",
    }
    assert "epoch" not in tags
    events = EventAccumulator(str(run / "tensorboard" / "hard"))
    events.Reload()
    assert "val/rollouts/text_summary" in events.Tags()["tensors"]


def test_finished_stages_are_skipped(run: Path) -> None:
    weights = run / "stages" / "hard" / "model" / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    done = parallel_r1("fit", "--config", "configs/debug.yaml", f"--curriculum.root={run}")
    assert weights.stat().st_mtime_ns == stamp
    assert done.stderr.count("is finished: skipped") == 3


def test_the_export_is_a_plain_hugging_face_model(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run / "stages" / "hard" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<Parallel><Path> 1 A: B +3 = 7", add_special_tokens=False, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "<Parallel><Path> 1 A: B +3 = 7"
    assert model(ids).logits.isfinite().all()


def test_test_reports_on_the_last_finished_stage_in_three_modes(run: Path) -> None:
    options = ("--evaluation.samples=2", "--evaluation.limit=8", "--evaluation.save_tokens=true")
    done = parallel_r1("test", "--config", "configs/debug.yaml", f"--curriculum.root={run}", *options)
    folder = run / "test" / "hard"
    assert (folder / "report.md").read_text() in done.stdout
    report = json.loads((folder / "report.json").read_text())
    assert report["model"] == "hard"
    assert list(report["tiers"]) == ["easy", "hard"]
    hard = report["tiers"]["hard"]
    assert (hard["problems"], hard["samples"]) == (8, 2)
    assert list(hard["modes"]) == ["fork_join", "plain", "sequential"]
    for metrics in hard["modes"].values():
        assert {"mean@2", "pass@2", "bootstrap_best@2", "majority@2", "parallel_speedup"} <= set(metrics)
    assert hard["modes"]["sequential"]["parallel_ratio"]["value"] == 0
    assert hard["equal_tokens"]["budget"] > 0
    rows = list(read_samples(folder))
    assert len({key_of(row) for row in rows}) == len(rows) == 2 * 8 * 2 * 3
    for row in rows:
        assert len(row["tokens"]) == len(row["logprobs"])
        assert row["total_tokens"] == sum(p is not None for p in row["logprobs"])
        assert row["mode"] != "fork_join" or row["valid"] or not row["finished"], "a fork is well formed, or cut"


def test_predict_answers_problems_given_on_the_command_line(run: Path) -> None:
    model = run / "stages" / "hard" / "model"
    done = parallel_r1(
        "predict",
        f"--evaluation.model={model}",
        f"--curriculum.root={run}/answers",
        "--problem=Joy has 4 coins. Doors C K. M: key. A: G +4. C: B +3. Coins at the key?",
        "--problem=What is 1: 2?",
        "--predict.attempts=3",
        "--predict.early_stop=off",
    )
    rows = [json.loads(line) for line in (run / "answers" / "predictions-hard.jsonl").read_text().splitlines()]
    assert [row["question"] for row in rows][1] == "What is 1: 2?"
    assert [len(row["attempts"]) for row in rows] == [3, 3]
    assert all(row["correct"] is None and row["answer"] == "(unknown)" for row in rows)
    assert "[1/2] Joy has 4 coins" in done.stdout
    assert not list((run / "answers").glob("*.partial*"))


IN_PLAIN_LIBRARIES = """
import json, sys


def main(folder, questions, out):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in json.loads(questions)]
    said = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        said.append(tokenizer.decode(model.generate(**ids, do_sample=False)[0, ids["input_ids"].shape[1] :]))
    small = {"kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 8, "distributed_executor_backend": "uni"}
    llm = LLM(folder, dtype="float32", enforce_eager=True, **small)
    greedy = llm.get_default_sampling_params()
    assert (greedy.temperature, greedy.max_tokens, greedy.top_k) == (1.0, 72, 0), greedy
    greedy.temperature, greedy.skip_special_tokens = 0.0, False
    served = [answer.outputs[0].text for answer in llm.chat(chats, greedy)]
    assert "parallel_r1" not in sys.modules
    json.dump([[text.replace(tokenizer.eos_token, "") for text in texts] for texts in (said, served)], open(out, "w"))


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_an_export_says_the_same_in_plain_transformers_and_plain_vllm(run: Path, tmp_path: Path) -> None:
    """Greedy, in a fresh process that does not know this package, against what `predict` says."""
    folder = tmp_path / "exported"
    tool = [sys.executable, ROOT / "tools" / "export.py", run, folder]
    subprocess.run(tool, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    problems = make_problems("easy", "test", 6, 2, (0.5, 0.5, 0.0), 0)
    asked = [f"--problem={problem.question}" for problem in problems]
    greedy = ("--evaluation.temperature=0", f"--curriculum.root={tmp_path}")
    parallel_r1("predict", f"--evaluation.model={folder}", *greedy, *asked)
    ours = [json.loads(line)["response"] for line in (tmp_path / "predictions-exported.jsonl").read_text().splitlines()]
    script, out = tmp_path / "plain.py", tmp_path / "out.json"
    script.write_text(IN_PLAIN_LIBRARIES)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # one process, nothing compiled: quick to start
    env |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
    command = [sys.executable, script, folder, json.dumps([problem.question for problem in problems]), out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    said, served = json.loads(out.read_text())
    assert len(set(ours)) > 1
    assert said == ours
    assert served == ours


@pytest.mark.parametrize("engine_ranks", [1, 2], ids=["an engine each", "one engine for both"])
def test_two_ranks_under_fsdp2(tmp_path: Path, engine_ranks: int) -> None:
    strategy = "--trainer.strategy"
    options = (
        "--config=configs/debug.yaml",
        f"--curriculum.root={tmp_path}/run",
        "--trainer.devices=2",
        f"{strategy}=lightning.pytorch.strategies.ModelParallelStrategy",
        f"{strategy}.data_parallel_size=2",
        f"{strategy}.tensor_parallel_size=1",
        f"{strategy}.process_group_backend=gloo",
        f"--engine.init_args.tensor_parallel={engine_ranks}",
    )
    done = parallel_r1("fit", *options)
    assert done.stdout.count("summary:") == 1, "one rank reports"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [s["steps"] for s in summary["stages"]] == [12, 3, 3]
    assert summary["stages"][2]["after"]["hard/n"] == 32, "both ranks' shares are counted, each problem once"
    for stage in ("easy", "hard"):
        gaps = scalars(tmp_path / "run", stage)["rollout_logprob_gap/max"]
        assert len(gaps) == 3
        assert all(gap < 1e-4 for _, gap in gaps), gaps
    if engine_ranks == 2:
        return
    parallel_r1("test", *options, "--evaluation.samples=1", "--evaluation.modes=[plain]", "--evaluation.limit=9")
    files = sorted((tmp_path / "run" / "test" / "hard").glob("samples-*.jsonl"))
    assert [len(path.read_text().splitlines()) for path in files] == [9, 9], "each rank sampled its share"
    report = json.loads((tmp_path / "run" / "test" / "hard" / "report.json").read_text())
    assert [tier["problems"] for tier in report["tiers"].values()] == [9, 9]
    parallel_r1("predict", *options)
    rows = [json.loads(line) for line in (tmp_path / "run" / "predictions-hard.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == 64, "both ranks' problems are answered, each once"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not beside this checkout (../shared/data)")
def test_real_data_runs_with_finite_losses(tmp_path: Path) -> None:
    parallel_r1("fit", "--config", "configs/real_data_debug.yaml", f"--curriculum.root={tmp_path}/run")
    for stage, tag, steps in (("cold_start", "policy/loss", 3), ("easy", "policy/loss", 2), ("hard", "policy/loss", 2)):
        losses = scalars(tmp_path / "run", stage)[tag]
        assert len(losses) == steps
        assert all(math.isfinite(value) for _, value in losses)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stages"][1]["after"]["gsm8k/n"] == 16, "validated on rows of the real GSM8K test file"
