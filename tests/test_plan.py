"""The plan of a run: sizes against real models, counts by hand, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import tiny_model
from lightning.pytorch.strategies import ModelParallelStrategy

from parallel_r1 import plan, planning
from parallel_r1.cli import CurriculumCLI
from parallel_r1.plan import Plan, Shape, Training
from parallel_r1.planning import number_of_ranks, plan_run
from parallel_r1.tiny import TinyQwen3

DEBUG = str(Path(__file__).parents[1] / "configs" / "debug.yaml")
# Qwen3-4B's published config
QWEN3_4B = {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_counted_as_the_model_holds_them(kind: str, tied: bool) -> None:
    model = tiny_model(kind, tied=tied)
    shape = Shape.of(model.config.to_dict())
    held = sum(p.numel() for p in model.parameters())
    assert shape.parameters <= held <= 1.01 * shape.parameters


def test_a_real_model_has_its_known_size() -> None:
    shape = Shape.of(QWEN3_4B)
    assert shape.parameters == pytest.approx(4.02e9, rel=0.005), "Qwen3-4B: 4.0 billion"
    assert shape.kv_bytes(2) == 147_456, "2 x 36 layers x 8 heads x 128 x 2 bytes"
    # rank 16 on q, k, v, o, gate, up, down
    a_layer = (2560 + 4096) + 2 * (2560 + 1024) + (4096 + 2560) + 3 * (2560 + 9728)
    assert shape.adapter_parameters(16) == 36 * 16 * a_layer


def test_a_configuration_without_sizes_is_unknown() -> None:
    assert Shape.of({"model_type": "strange"}) is None
    assert Shape.of({"text_config": QWEN3_4B}) == Shape.of(QWEN3_4B)


def test_experts_are_counted() -> None:
    dense, sparse = Shape.of(QWEN3_4B), Shape.of({**QWEN3_4B, "num_experts": 4, "moe_intermediate_size": 9728})
    assert sparse.parameters - dense.parameters == 36 * 3 * 3 * 2560 * 9728


def test_memory_a_rank_by_hand() -> None:
    shape = Shape.of(QWEN3_4B)
    n = shape.parameters
    parts = plan.memory(shape, Training(shards=8, tokens=8192, checkpointing=True, compute="bfloat16"), 2, 1, 10**9)
    assert parts["weights"] == parts["gradients"] == n * 4 // 8
    assert parts["optimizer"] == 2 * n * 4 // 8
    assert parts["engine weights"] == 2 * n
    assert parts["engine KV cache"] == 10**9
    # 36 layer inputs and one layer in full, in bfloat16
    in_full = 8192 * 2 * (14 * 2560 + 4 * 9728)
    assert parts["activations (about)"] == 8192 * 2 * 2560 * 36 + in_full + 3 * (64 << 20)
    lora = plan.memory(shape, Training(adapter=16), None, 1, None)
    assert lora["gradients"] == 4 * shape.adapter_parameters(16)
    assert "reference policy" in plan.memory(shape, Training(reference=True), None, 1, None)


def test_disk_holds_three_checkpoints_at_most() -> None:
    shape = Shape.of(QWEN3_4B)
    n = shape.parameters
    assert plan.disk(shape, Training(), exports=2, base=True) == {
        "models of stages": 2 * 4 * n,
        "checkpoints": 3 * 3 * 4 * n,
        "base policy": 4 * n,
    }
    assert plan.disk(shape, Training(), exports=0, base=False) == {"models of stages": 0}


def test_work_of_a_stage_by_hand() -> None:
    rl = plan.work("hard", "to do", 12, 16, 72, group_size=8, per_iteration=4, validations=3, val_responses=512)
    assert (rl.iterations, rl.prompts, rl.responses, rl.tokens, rl.evaluated) == (3, 48, 384, 384 * 72, 1536)
    sft = plan.work("cold", "to do", 10, 32, 500)
    assert (sft.kind, sft.responses, sft.tokens) == ("SFT", 320, 160_000)


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("s: ", 512, 512, None, None), "generation.max_tokens=512 leaves no token of the model's context=512"),
        (("s: ", 300, 512, 256, None), "max_model_len=256"),
        (("s: ", 72, 512, None, 4096), "max_length=4096 is above the model's context=512"),
        (("s: ", 72, 512, 1024, None), "max_model_len=1024 is above the model's context=512"),
    ],
)
def test_lengths_that_do_not_fit(arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan.check_lengths(*arguments)


def test_lengths_that_fit() -> None:
    plan.check_lengths("", 511, 512, 512, 512)
    plan.check_lengths("", 5000, None, None, 5000)


@pytest.mark.parametrize(
    ("batch", "mini", "each", "steps", "said"),
    [(10, 4, 4, 8, "mini_batches=4 does not divide batch_size=10"), (8, 2, 4, 10, "give 12")],
)
def test_batches_that_do_not_divide(batch: int, mini: int, each: int, steps: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan.check_batches("", batch, mini, each, steps)


def test_batches_that_divide() -> None:
    plan.check_batches("", 8, 2, 4, 12)
    plan.check_batches("", 5, 1, 1, 7)


def test_a_disk_that_is_too_small_is_refused_with_the_sums() -> None:
    small = Plan([], 1, 10, {}, {"checkpoints": 3_000_000, "models of stages": 1_000_000}, 2_500_000, "runs/x")
    with pytest.raises(ValueError, match=r"runs/x: the run needs 4 MB there \(checkpoints 3 MB.*2.5 MB are free.*root"):
        small.check()


# --------------------------------------------------------------------------- of a configured curriculum


def planned(tmp_path: Path, *args: str) -> Plan:
    cli = CurriculumCLI(["fit", "--config", DEBUG, f"--curriculum.root={tmp_path}/run", *args])
    return plan_run(cli.curriculum(), cli.options.trainer)


def test_the_debug_curriculum_is_planned(tmp_path: Path) -> None:
    found = planned(tmp_path)
    by_name = {stage.name: stage for stage in found.stages}
    assert by_name["hard"].responses == 3 * 4 * 4
    assert by_name["hard"].tokens == 48 * 72
    assert by_name["hard"].evaluated == 2 * 64
    assert by_name["cold_start"].prompts == 12 * 16
    text = found.text()
    for part in ("cold_start (SFT)", "hard (RL)", "3,456", "memory a rank", "disk:", "to do"):
        assert part in text
    held = sum(p.numel() for p in TinyQwen3().build(0)[0].parameters())
    assert found.parameters == pytest.approx(held, rel=0.01)


def test_a_plan_knows_what_is_done(tmp_path: Path) -> None:
    (tmp_path / "run/stages/cold_start/model").mkdir(parents=True)
    for name in ("stage.json", "model/config.json", "model/x.safetensors"):
        (tmp_path / "run/stages/cold_start" / name).write_text("{}")
    (tmp_path / "run/stages/easy/checkpoints/step-00000002").mkdir(parents=True)
    found = planned(tmp_path, "--curriculum.stages.easy.data.init_args.eval_size=16")
    assert [stage.state for stage in found.stages] == ["finished", "from step 2", "to do"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--curriculum.stages.hard.module.init_args.generation.max_tokens=512"],
            "stage hard: generation.max_tokens=512",
        ),
        (["--curriculum.stages.hard.module.init_args.mini_batches=3"], "stage hard: mini_batches=3"),
        (["--curriculum.stages.hard.module.init_args.ppo_epochs=2"], "max_steps=3 is no multiple .* give 4"),
        (["--curriculum.stages.cold_start.module.init_args.max_length=600"], "stage cold_start: max_length=600"),
        (["--engine.init_args.max_model_len=4096"], "max_model_len=4096"),
        (["--engine.init_args.tensor_parallel=2"], "tensor_parallel=2"),
    ],
)
def test_impossible_curricula_are_refused(tmp_path: Path, args: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        planned(tmp_path, *args)


def test_no_space_is_found_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ValueError, match="1 kB are free"):
        planned(tmp_path)


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ({"devices": 1, "accelerator": "cpu"}, 1),
        ({"devices": "2", "accelerator": "cpu", "num_nodes": 2}, 4),
        ({"devices": [0, 3], "accelerator": "gpu"}, 2),
        ({"devices": "auto", "accelerator": "cpu"}, 1),
    ],
)
def test_ranks_are_known_before_they_start(trainer: dict, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert number_of_ranks(trainer) == ranks
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert number_of_ranks(trainer) == 16


def test_shards_share_the_weights(tmp_path: Path) -> None:
    whole = planned(tmp_path)
    strategy = "--trainer.strategy"
    name = f"{ModelParallelStrategy.__module__}.{ModelParallelStrategy.__name__}"
    shared = planned(
        tmp_path,
        "--trainer.devices=2",
        f"{strategy}={name}",
        f"{strategy}.data_parallel_size=2",
        f"{strategy}.tensor_parallel_size=1",
    )
    assert shared.memory["weights"] * 2 == whole.memory["weights"]
    assert shared.ranks == 2
