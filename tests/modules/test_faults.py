"""What a stage does when something breaks: faults are put in by hand, and everything else is real."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from conftest import write_tiny_model
from stages import Uneven, Words

from parallel_r1.methods import Objective
from parallel_r1.modules import Generation, RLModule, SFTModule
from parallel_r1.modules.base import Session
from parallel_r1.modules.faults import (
    EngineRecovery,
    IdleIterations,
    SkippedSteps,
    StageError,
    in_less_memory,
    is_out_of_memory,
    room_for,
)
from parallel_r1.optim import MuonWithAdamW
from parallel_r1.policy import PolicySource
from parallel_r1.reward.rewards import Reward
from parallel_r1.rollout.engine import RolloutEngine
from parallel_r1.rollout.transformers_engine import TransformersEngine

OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("faults") / "model")


def fit(module, folder: Path, engine: RolloutEngine | None = None, steps: int = 2, callbacks: list | None = None):
    """Train a module for some steps, in this process; returns what was logged at each step, and the trainer."""
    logged: list[dict[str, float]] = []

    class Log(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=False,
        check_val_every_n_epoch=None,
        callbacks=[Log(), *(callbacks or [])],
    )
    module.attach(Session(PolicySource(name=str(folder)), engine or TransformersEngine(), folder, 1))
    trainer.fit(module, datamodule=Words(batch_size=2, val_size=0, seed=0))
    return logged, trainer


def rl(**more) -> RLModule:
    options = {"reward": Uneven(), "group_size": 3, "generation": Generation(prompt="plain", max_tokens=6)}
    return RLModule(**{**options, **more})


def weights(module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.model.named_parameters()}


def broken_at(module, steps: set[int], value: float = float("nan")) -> None:
    """Make the loss of some optimizer steps (0-based) no number."""
    backward = module.backward_sum
    module.backward_sum = lambda loss, n: backward(loss * value if module.global_step in steps else loss, n)


# --------------------------------------------------------------------------- losses that are no numbers


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, MuonWithAdamW, torch.optim.SGD])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_changes_nothing_and_counts_as_a_step(folder, optimizer, value) -> None:
    module = SFTModule(
        Generation(prompt="plain", max_tokens=6), optimizer=lambda p: optimizer(p, lr=1e-2, weight_decay=0.1)
    )
    broken_at(module, {1}, value)
    seen = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append((weights(module), str(module.optimizers().optimizer.state_dict())))

    with pytest.warns(UserWarning, match="step 1 was skipped: its loss or gradient is not finite"):
        logged, trainer = fit(module, folder, steps=3, callbacks=[Keep()])
    (first, state), (second, state_after), (third, _) = seen
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert state.split("'param_groups'")[0] == state_after.split("'param_groups'")[0], "momentum stays too"
    assert any(not torch.equal(second[n], third[n]) for n in first), "the next step is an ordinary one"
    assert trainer.global_step == 3, "data and schedule stay in line with the steps"
    assert [row["policy/skipped_steps"] for row in logged] == [0, 1, 1]


def test_rl_skips_the_broken_step_of_an_iteration_alone(folder) -> None:
    module = rl(mini_batches=2, max_logprob_gap=1e-4)
    broken_at(module, {1})
    with pytest.warns(UserWarning, match="step 1 was skipped"):
        logged, trainer = fit(module, folder, steps=4)
    assert [row["policy/skipped_steps"] for row in logged] == [1, 1]
    assert (trainer.global_step, module.iteration) == (4, 2)


def test_so_many_in_a_row_stop_the_stage(folder) -> None:
    module = rl(max_skipped_steps=2)
    broken_at(module, {1, 2, 3})
    with pytest.raises(StageError, match=r"2 optimizer steps in a row.*Lower the learning rate"):
        fit(module, folder, steps=8)
    assert module.skipped.total == 2


def test_the_count_survives_a_checkpoint() -> None:
    module, resumed, checkpoint = rl(), rl(), {}
    module.skipped.total, module.skipped.in_a_row, module.idle.in_a_row = 5, 2, 3
    module.max_tokens_per_micro_batch = 100
    module.on_save_checkpoint(checkpoint)
    resumed.on_load_checkpoint(checkpoint)
    assert resumed.max_tokens_per_micro_batch == 100
    assert (resumed.skipped.total, resumed.skipped.in_a_row, resumed.idle.in_a_row) == (5, 2, 3)


def test_a_good_step_ends_a_row() -> None:
    skipped = SkippedSteps(2)
    for step, bad in enumerate([True, False, True, False]):
        if bad:
            with pytest.warns(UserWarning, match="was skipped"):
                skipped.count(bad, step)
        else:
            skipped.count(bad, step)
    assert (skipped.total, skipped.in_a_row) == (2, 0)


# --------------------------------------------------------------------------- memory


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError(OUT_OF_MEMORY))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError(OUT_OF_MEMORY))


def small_memory(module, tokens: int) -> list[int]:
    """Let passes of more than so many tokens run out of memory in the backward pass, when half of it is done."""
    sizes: list[int] = []
    score, backward = module.score, module.backward_sum

    def scored(pack):
        sizes.append(len(pack.tokens))
        return score(pack)

    def failing(loss, n):
        backward(loss, n)  # its gradient is there by then
        if sizes[-1] > tokens:
            raise RuntimeError(OUT_OF_MEMORY)

    module.score, module.backward_sum = scored, failing
    return sizes


@pytest.mark.parametrize(
    ("objective", "more"),
    [
        (Objective(), {}),
        (Objective(kl_coef=0.1), {"mini_batches": 2, "ppo_epochs": 2}),
        (Objective(old_logprobs="engine", kl_coef=0.1), {}),
    ],
)
def test_a_pass_that_does_not_fit_is_repeated_in_halves_with_the_same_result(folder, objective, more) -> None:
    """Also where log-probabilities of the old policy and of the reference are kept from before the first step."""

    def run(limit: int | None):
        module = rl(objective=objective, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), group_size=4, **more)
        sizes = small_memory(module, limit) if limit else []
        logged, _ = fit(module, folder, steps=module.mini_batches * module.ppo_epochs)
        return module, logged[0], sizes

    whole, expected, _ = run(None)
    with pytest.warns(UserWarning, match="out of memory in a micro-batch: the step is repeated with max_tokens"):
        cut, found, sizes = run(24)
    assert max(sizes) > 24 >= sizes[-1]
    assert cut.max_tokens_per_micro_batch < 32
    for name, value in weights(whole).items():
        assert torch.allclose(weights(cut)[name], value, atol=1e-6), name
    for key in ("policy/loss", "policy/grad_norm", "policy/entropy", "rollout_logprob_gap/mean", "policy/ratio/max"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    if objective.kl_coef:
        assert found["policy/reference_kl"] == pytest.approx(expected["policy/reference_kl"], rel=1e-4)


class Budget:
    """A host of `in_less_memory` on one rank."""

    def __init__(self, tokens: int, sharded: bool = False, others: int = 0) -> None:
        self.max_tokens_per_micro_batch, self.sharded, self.others, self.dropped = tokens, sharded, others, 0

    def agree(self, level: int) -> int:
        return max(level, self.others)

    def drop_gradients(self) -> None:
        self.dropped += 1


def raising(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_a_single_response_that_does_not_fit_is_an_error() -> None:
    host = Budget(64)
    with (
        pytest.warns(UserWarning, match="max_tokens_per_micro_batch=32"),
        pytest.raises(StageError, match=r"longest here has 40 tokens.*lower generation.max_tokens"),
    ):
        in_less_memory(host, raising(RuntimeError(OUT_OF_MEMORY)), longest=40)
    assert host.dropped == 1


def test_in_a_sharded_model_it_is_an_error_at_once() -> None:
    with pytest.raises(StageError, match=r"lower max_tokens_per_micro_batch \(now 64"):
        in_less_memory(Budget(64, sharded=True), raising(torch.OutOfMemoryError("CUDA")), longest=1)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        in_less_memory(Budget(64), raising(RuntimeError("shapes do not match")), longest=1)


def test_a_rank_that_had_room_repeats_with_the_others() -> None:
    host, calls = Budget(64, others=1), []

    def work() -> str:
        calls.append(host.max_tokens_per_micro_batch)
        host.others = 0 if len(calls) == 2 else 1
        return "done"

    with pytest.warns(UserWarning, match="out of memory"):
        assert in_less_memory(host, work, longest=1) == "done"
    assert calls == [64, 32]


# --------------------------------------------------------------------------- iterations that teach nothing


def test_all_responses_cut_is_said_and_stops_where_asked(folder) -> None:
    module = rl(generation=Generation(prompt="plain", max_tokens=1), max_idle_iterations=2)
    with (
        pytest.warns(UserWarning, match=r"100 % of responses were cut by generation.max_tokens=1"),
        pytest.raises(StageError, match=r"the 2\. such iteration in a row, and max_idle_iterations=2"),
    ):
        fit(module, folder, steps=5)


def test_equal_rewards_are_said() -> None:
    idle = IdleIterations(None)
    with pytest.warns(UserWarning, match=r"all rewards of every group are equal \(mean -1\).*dynamic_sampling"):
        idle.look({"rollout/zero_variance_groups": 1.0, "reward/total/mean": -1.0}, 0, 8)
    idle.look({"rollout/zero_variance_groups": 0.9, "rollout/truncated": 0.99}, 1, 8)
    assert idle.in_a_row == 0


# --------------------------------------------------------------------------- the engine


class Failing(TransformersEngine):
    """Raises in the middle of its n-th call, having been asked for everything."""

    def __init__(self, at: int, times: int = 1) -> None:
        super().__init__()
        self.at, self.times, self.calls, self.starts = at, times, 0, 0
        self.rollouts: list = []

    def start(self, *args):
        self.starts += 1
        super().start(*args)

    def generate(self, requests, sampling):
        self.calls += 1
        if self.times and self.calls >= self.at:
            self.times -= 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        out = super().generate(requests, sampling)
        self.rollouts.append(out)
        return out


def test_an_engine_that_fails_is_built_anew_and_gives_the_same_tokens(folder) -> None:
    calm, failing = Failing(99), Failing(2)
    one, two = rl(max_logprob_gap=1e-4), rl(max_logprob_gap=1e-4)
    fit(one, folder, calm)
    with pytest.warns(UserWarning, match="the engine failed .*illegal memory access.*built anew"):
        fit(two, folder, failing)
    assert failing.starts == calm.starts + 1
    assert failing.rollouts == calm.rollouts
    for name, value in weights(one).items():
        assert torch.equal(weights(two)[name], value), name


def test_an_engine_that_fails_again_and_again_stops_the_run(folder) -> None:
    with (
        pytest.warns(UserWarning, match="the engine failed"),
        pytest.raises(RuntimeError, match=r"failed 3 times in a row.*illegal memory access.*the same command goes on"),
    ):
        fit(rl(), folder, Failing(1, times=99))


def test_ranks_rebuild_together_and_only_the_failed_one_asks_again() -> None:
    log: list[str] = []
    levels = iter([1, 0])  # another rank fails once
    recovery = EngineRecovery(lambda: log.append("rebuild"), lambda level: max(level, next(levels)))
    with pytest.warns(UserWarning, match="on another rank"):
        assert recovery.call(lambda: log.append("sample") or [1, 2]) == [1, 2]
    assert log == ["sample", "rebuild"]


def test_requests_that_no_engine_could_serve_are_not_repeated() -> None:
    recovery = EngineRecovery(lambda: pytest.fail("rebuilt"), lambda level: level)
    with pytest.raises(ValueError, match="too long"):
        recovery.call(raising(ValueError("too long")))
    other = EngineRecovery(lambda: pytest.fail("rebuilt"), lambda level: 2)
    with pytest.raises(RuntimeError, match="another rank"):
        other.call(list)


# --------------------------------------------------------------------------- the rest


def test_weights_that_never_reach_the_engine_stop_the_run(folder, monkeypatch) -> None:
    sync, calls = TransformersEngine.sync, []

    def once(self, stream):
        calls.append(1)
        if len(calls) == 1:
            sync(self, stream)

    monkeypatch.setattr(TransformersEngine, "sync", once)
    monkeypatch.setattr(TransformersEngine, "sleep", lambda self: None)
    module = rl(max_logprob_gap=1e-4, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(RuntimeError, match=r"at iteration 2, above max_logprob_gap=1e-04: .*stale weights"):
        fit(module, folder, steps=4)


def test_long_prompts_are_left_out_and_counted(folder) -> None:
    module = rl(generation=Generation(prompt="plain", max_tokens=6, max_prompt_tokens=1))
    logged, _ = fit(module, folder, steps=1)
    assert logged[0]["data/dropped_prompts"] == 2
    with pytest.raises(ValueError, match=r"problem p\d+ needs 2 prompt \+ 1100 response .* holds 1024.*leave"):
        fit(rl(generation=Generation(prompt="plain", max_tokens=1100)), folder, steps=1)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    message = r"no space left for rollouts in .*set save_rollouts: 0; the same command"
    with pytest.raises(StageError, match=message), room_for("rollouts", tmp_path, "set save_rollouts: 0"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), room_for("rollouts", tmp_path, "-"):
        raise PermissionError(errno.EACCES, "denied")


def test_rollouts_on_a_full_disk_stop_the_stage(folder, tmp_path: Path) -> None:
    """/dev/full takes no byte: as real as a full disk gets."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    from parallel_r1.modules.rollout_log import RolloutLog

    module = rl(save_rollouts=2)
    module.attach(Session(PolicySource(name=str(folder)), TransformersEngine(), folder, 1, stage_folder=tmp_path))
    module._kept = RolloutLog(tmp_path, (0, 1))
    module._kept.path = full
    attach = module.attach
    module.attach = lambda session: attach(Session(**{**session.__dict__, "stage_folder": tmp_path}))
    with pytest.raises(StageError, match="no space left for rollouts"):
        fit(module, folder, steps=1)


class Broken(Reward):
    """Cannot be computed."""

    def score(self, samples, step):
        raise AssertionError("validation asked for the training reward")


def test_validation_never_uses_the_training_reward(folder) -> None:
    module = rl(reward=Broken())
    module.attach(Session(PolicySource(name=str(folder)), TransformersEngine(), folder, 1))
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, inference_mode=False)
    trainer.validate(module, datamodule=Words(val_size=4, seed=0), verbose=False)
    assert module.evaluation["t/accuracy"] == 0.0
    assert module.evaluation["t/n"] == 4
