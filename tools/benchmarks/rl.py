"""`bench.py rl`: an iteration of GRPO (sync, roll out, score, update) by ours and by TRL's GRPOTrainer.

The same random Qwen3 (four layers, width 128), prompts, group size, length limit, AdamW, clip of the gradient norm
and reward (the verifier is run, the value is a coin made of the text, so that every group teaches something). Cases:

    16x64, 16x256   16 sequences of exactly 64 or 256 tokens
    128xnatural     128 sequences that end by themselves: one token in a hundred ends a response, 256 at most

A first iteration is left out (allocators, caches, optimizer state). rollout_, sync_, score_ and update_cpu_s are parts
of cpu_s; what is left over is the trainers' own (batches, logging, loops).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import TINY, Clock, peak_bytes, random_qwen3

COMPARED = ("cpu_s", "wall_s", "rollout_cpu_s", "update_cpu_s", "peak_mb")


@dataclass(frozen=True)
class Case:
    """problems x group_size sequences of up to max_tokens; natural: they may end before. paths: 0 for one stream."""

    problems: int
    group_size: int
    max_tokens: int
    natural: bool = False
    vocabulary: int = 512
    prompt: int = 64
    paths: int = 0
    end_rate: float = 0.01


CASES = {
    "16x64": Case(2, 8, 64),
    "16x256": Case(2, 8, 256),
    "128xnatural": Case(16, 8, 256, natural=True),
}
OURS = {
    "ours_vllm": "parallel_r1.rollout.vllm_engine.VLLMEngine",
    "ours_transformers": "parallel_r1.rollout.transformers_engine.TransformersEngine",
}
AGAINST = {"trl": ["trl_transformers"], "trl_vllm": ["trl_vllm"], "none": []}


def add_options(rl: argparse.ArgumentParser) -> None:
    rl.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    rl.add_argument("--against", nargs="+", choices=list(AGAINST), default=["none"], help="what to compare with")
    rl.add_argument("--ours", nargs="+", choices=list(OURS), default=list(OURS), help="our engines")
    rl.add_argument("--iterations", type=int, default=3, help="iterations a process measures (default 3)")


def variants(args: argparse.Namespace, case: str) -> list[str]:
    return [*args.ours, *(name for other in args.against for name in AGAINST[other])]


def measure(case: Case, args: argparse.Namespace, variant: str) -> dict[str, float]:
    """Means of an iteration: seconds by phase, tokens, and the peak memory of the process."""
    run = run_ours if variant in OURS else run_trl
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        model = Path(folder) / "model"
        random_qwen3(model, TINY, case.vocabulary, context=2048, end_rate=case.end_rate if case.natural else None)
        return run(case, variant, args.iterations, model)


def prompts(case: Case, n: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(f"w{rng.randrange(8, case.vocabulary)}" for _ in range(case.prompt)) for _ in range(n)]


def coin(text: str) -> float:
    return float(zlib.crc32(text.encode()) % 2)


class Meter:
    """The time between the end of the first iteration and that of the last."""

    def __init__(self, clock: Clock, iterations: int) -> None:
        self.clock, self.iterations, self.seen = clock, iterations, 0
        self.tokens = 0
        self.start = (0.0, 0.0)
        self.result: dict[str, float] = {}

    def lap(self) -> None:
        now = time.process_time(), time.perf_counter()
        if self.seen == 0:
            self.start, self.tokens = now, 0
            self.clock.reset()
        self.seen += 1
        if self.seen == self.iterations + 1:
            n = self.iterations
            cpu, wall = (b - a for a, b in zip(self.start, now, strict=True))
            phases = {f"{phase}_cpu_s": s / n for phase, s in self.clock.cpu.items()}
            totals = {"cpu_s": cpu / n, "wall_s": wall / n, "tokens": self.tokens / n, "peak_mb": peak_bytes() / 1e6}
            self.result = {**totals, **phases}


def run_ours(case: Case, variant: str, iterations: int, model: Path) -> dict[str, float]:
    from importlib import import_module

    import lightning as L
    from torch.optim import AdamW

    from parallel_r1.data.datamodules import ProblemDataModule
    from parallel_r1.modules import RLModule
    from parallel_r1.modules.base import Session
    from parallel_r1.modules.responder import Generation
    from parallel_r1.policy import PolicySource
    from parallel_r1.reward.rewards import FromCallable
    from parallel_r1.types import Problem

    class Questions(ProblemDataModule):
        def problems(self, split: str) -> list[Problem]:
            if split != "train":
                return []
            texts = prompts(case, case.problems * (iterations + 1))
            return [Problem(f"p{i}", text, "1", "bench") for i, text in enumerate(texts)]

    module_name, class_name = OURS[variant].rsplit(".", 1)
    engine = getattr(import_module(module_name), class_name)()
    structure = {"structure": "unseen", "paths": case.paths, "max_blocks": 1} if case.paths else {}
    module = RLModule(
        reward=FromCallable(lambda judged, step: coin(judged.text)),
        group_size=case.group_size,
        generation=Generation(prompt="plain", max_tokens=case.max_tokens, **structure),
        optimizer=lambda parameters: AdamW(parameters, lr=1e-6),
    )
    clock = Clock()
    meter = Meter(clock, iterations)

    class Laps(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            responder = pl_module.responder
            if not case.natural:
                responder.policy.eos_ids = ()  # nothing ends a response but its limit
            responder.refresh = clock.timed("sync", responder.refresh)
            responder.judge = clock.timed("score", responder.judge)
            respond = clock.timed("rollout", responder.respond)

            def counted(*args: Any, **kwargs: Any) -> Any:
                rollouts = respond(*args, **kwargs, mode="parallel" if case.paths else "free")
                meter.tokens += sum(len(r.response_ids) for r in rollouts)
                return rollouts

            responder.respond = counted

        def on_train_batch_end(self, *args: Any) -> None:
            meter.lap()

    import parallel_r1.modules.rl as rl_module

    rl_module.update = clock.timed("update", rl_module.update)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=iterations + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        use_distributed_sampler=False,
        inference_mode=False,
        callbacks=[Laps()],
    )
    module.attach(Session(PolicySource(name=str(model)), engine, model, seed=0))
    trainer.fit(module, datamodule=Questions(batch_size=case.problems, val_size=0, seed=0))
    engine.close()
    return meter.result


def run_trl(case: Case, variant: str, iterations: int, model: Path) -> dict[str, float]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from parallel_r1.reward.grading import grade

    clock = Clock()
    meter = Meter(clock, iterations)

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        grade(list(zip(answer, completions, strict=True)))
        return [coin(text) for text in completions]

    class Laps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.lap()

    vllm = variant == "trl_vllm"
    fixed = {"ignore_eos": True} if vllm else {"min_new_tokens": case.max_tokens}
    sequences = case.problems * case.group_size
    config = GRPOConfig(
        output_dir=str(model.parent / "out"),
        per_device_train_batch_size=sequences,
        num_generations=case.group_size,
        max_completion_length=case.max_tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=iterations + 1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # on by default; slower where memory is no concern
        generation_kwargs=None if case.natural else fixed,
        use_vllm=vllm,
        vllm_mode="colocate",
        vllm_max_model_length=case.prompt + case.max_tokens,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    rows = [{"prompt": text, "answer": "1"} for text in prompts(case, case.problems * (iterations + 1))]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Laps()],
    )
    single_turn = clock.timed("rollout", trainer._generate_single_turn)

    def counted(*args: Any, **kwargs: Any) -> Any:
        out = single_turn(*args, **kwargs)
        meter.tokens += sum(map(len, out[0]))
        return out

    trainer._generate_single_turn = counted
    trainer._calculate_rewards = clock.timed("score", trainer._calculate_rewards)
    trainer._compute_loss = clock.timed("forward", trainer._compute_loss)
    trainer.accelerator.backward = clock.timed("backward", trainer.accelerator.backward)
    trainer.train()
    result = meter.result
    # the optimizer's step is small beside both; it is in cpu_s
    result["update_cpu_s"] = result.pop("forward_cpu_s") + result.pop("backward_cpu_s")
    return result
