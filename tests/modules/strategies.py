"""Stage modules under a strategy, for `test_strategies.py`: python strategies.py {one,ddp,fsdp} FOLDER

FOLDER holds the model; the first rank writes <strategy>.pt there, each rank <strategy>-<rank>.log.
"""

import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for conftest
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from stages import Uneven, Words

from parallel_r1.methods import Objective
from parallel_r1.modules import Generation, RLModule, SFTModule
from parallel_r1.modules.base import Session
from parallel_r1.policy import PolicySource
from parallel_r1.rollout.transformers_engine import TransformersEngine

GENERATION = {"prompt": "plain", "max_tokens": 6}


class ByProblem(Uneven):
    """Some groups differ in their rewards and some do not: those are dropped."""

    def score(self, samples, step):
        scores = super().score(samples, step)
        total = [x if int(s.problem.id[1:]) % 3 else 0.0 for x, s in zip(scores.total, samples, strict=True)]
        return type(scores)(total, {"by_problem": total})


def rl(**more):
    """Plain gradient descent: Adam would hide the scale of a gradient."""
    options = {"reward": Uneven(), "group_size": 3, "generation": Generation(**GENERATION)}
    return RLModule(**{"optimizer": lambda p: torch.optim.SGD(p, lr=0.05), **options, **more})


def sft(**more):
    return SFTModule(Generation(**GENERATION), lambda p: torch.optim.SGD(p, lr=0.05), **more)


# name -> (module, problems a step, Trainer's precision, whether the weights are kept on the CPU)
CASES = {
    "sft, uneven shares": (lambda: sft(), 3, "32-true", False),
    "sft, a rank without data": (lambda: sft(), 1, "32-true", False),
    "sft, in small passes": (lambda: sft(max_tokens_per_micro_batch=8), 5, "32-true", False),
    "rl, uneven shares": (lambda: rl(), 3, "32-true", False),
    "rl, a rank without data": (lambda: rl(), 1, "32-true", False),
    "rl, in small passes": (lambda: rl(max_tokens_per_micro_batch=20), 3, "32-true", False),
    "rl, several steps and a KL": (
        lambda: rl(mini_batches=2, ppo_epochs=2, objective=Objective(kl_coef=0.1)),
        4,
        "32-true",
        False,
    ),
    "rl, dropped groups": (
        lambda: rl(reward=ByProblem(), objective=Objective(dynamic_sampling=2)),
        3,
        "32-true",
        False,
    ),
    "sft, bf16-mixed": (lambda: sft(), 4, "bf16-mixed", False),
    "sft, bf16-true": (lambda: sft(), 4, "bf16-true", False),
    "rl, CPU offload": (lambda: rl(), 3, "32-true", True),
}


def strategy(name: str):
    if name == "fsdp":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return {"one": "auto", "ddp": "ddp"}[name]


def run(kind: str, folder: Path, module, batch_size: int, precision: str = "32-true", offload: bool = False) -> dict:
    """Train two steps (or one iteration); returns the weights and what was logged last."""
    steps = 2 * getattr(module, "mini_batches", 1) * getattr(module, "ppo_epochs", 1)
    dropped: list[float] = []

    class Dropped(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            dropped.append(float(trainer.callback_metrics.get("rollout/dropped_groups", 0.0)))

    trainer = L.Trainer(
        callbacks=[Dropped()],
        accelerator="cpu",
        devices=1 if kind == "one" else 2,
        strategy=strategy(kind),
        precision=precision,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=False,
        check_val_every_n_epoch=None,
    )
    source = PolicySource(name=str(folder), cpu_offload=offload and kind == "fsdp")
    module.attach(Session(source, TransformersEngine(), folder, 1))
    trainer.fit(module, datamodule=Words(batch_size=batch_size, val_size=0, seed=0))
    found = {name: weight.detach().float().clone() for name, weight in module.export_weights()}
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"weights": found, "logged": logged, "dropped": sum(dropped)}


def out_of_memory_on_rank_1(module) -> None:
    backward = module.backward_sum

    def failing(loss, n):
        backward(loss, n)
        if module.global_rank == 1 and module.max_tokens_per_micro_batch > 20:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    module.backward_sum = failing


def no_number_on_rank_1(module) -> None:
    backward = module.backward_sum
    module.backward_sum = lambda loss, n: backward(
        loss * float("nan") if module.global_rank == 1 and module.global_step == 1 else loss, n
    )


class FailsOnRank1(TransformersEngine):
    """Its second call fails, on one rank alone."""

    calls = starts = 0

    def start(self, *args):
        self.starts += 1
        super().start(*args)

    def generate(self, requests, sampling):
        self.calls += 1
        if self.calls == 2 and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise RuntimeError("CUDA error")
        return super().generate(requests, sampling)


def main(kind: str, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    out = {name: run(kind, folder, make(), *more) for name, (make, *more) in CASES.items()}
    broken = rl()
    no_number_on_rank_1(broken)
    out["no number on rank 1"] = run(kind, folder, broken, 3)
    broken = rl()
    engine = FailsOnRank1()
    attach = broken.attach
    broken.attach = lambda session: attach(Session(session.source, engine, session.folder, session.seed))
    out["engine fails on rank 1"] = {**run(kind, folder, broken, 3), "starts": engine.starts}
    if kind == "ddp":
        tight = rl()
        out_of_memory_on_rank_1(tight)
        out["out of memory on rank 1"] = {**run(kind, folder, tight, 3), "budget": tight.max_tokens_per_micro_batch}
    if broken.global_rank == 0:
        torch.save(out, folder / f"{kind}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
