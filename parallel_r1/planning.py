"""Reads a configured curriculum into a plan (`plan`), and refuses what cannot work. Loads no weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from parallel_r1 import plan
from parallel_r1.changes import has_begun
from parallel_r1.checkpoint import complete, place
from parallel_r1.curriculum import Curriculum, Stage
from parallel_r1.modules import RLModule
from parallel_r1.modules.base import StageModule
from parallel_r1.rollout.model_folder import named_config, read_config

_PRECISION = {"bf16-true": ("bfloat16", "bfloat16"), "16-true": ("float16", "float16")}


def plan_run(curriculum: Curriculum, trainer: Mapping[str, Any]) -> plan.Plan:
    """The plan of a `fit`. trainer: the Trainer arguments that all stages share.

    Raises ValueError, naming the option, for what can never work.
    """
    ranks = number_of_ranks(trainer)
    config = model_config(curriculum)
    shape = plan.Shape.of(config)
    stages, trainings = [], []
    for name in curriculum.chosen("fit"):
        stage, options = curriculum.stages[name], {**trainer, **curriculum.stages[name].overrides()}
        _check(f"stage {name}: ", stage, curriculum, shape)
        stages.append(_work(curriculum, name, stage, options, shape))
        if not curriculum.finished(name):
            trainings.append(_training(curriculum, stage, options, ranks))
    engine = curriculum.engine
    if ranks % engine.ranks:
        raise ValueError(
            f"engine.init_args.tensor_parallel={engine.ranks} does not divide the trainer's {ranks} rank(s), which the "
            "engines share; change one of the two"
        )
    memory: dict[str, int] = {}
    disk: dict[str, int] = {}
    if shape and trainings:
        largest = max(trainings, key=lambda t: (t.tokens, t.reference))
        kv = getattr(engine, "kv_cache_bytes", None) or ((1 << 30) if trainer.get("accelerator") == "cpu" else None)
        kind = getattr(engine, "dtype", "auto")
        memory = plan.memory(
            shape, largest, plan.DTYPE_BYTES.get(kind if kind != "auto" else largest.dtype, 4), engine.ranks, kv
        )
        base = not (curriculum.root / "base").is_dir() and any(map(curriculum.starts_from_base, curriculum.stages))
        disk = plan.disk(shape, largest, exports=len(trainings), base=base)
        _check_device(memory)
    disk_of = next(p for p in [curriculum.root, *curriculum.root.absolute().parents] if p.is_dir())
    free = shutil.disk_usage(disk_of).free
    found = plan.Plan(stages, ranks, shape and shape.parameters, memory, disk, free, str(curriculum.root))
    found.check()
    return found


def number_of_ranks(trainer: Mapping[str, Any]) -> int:
    """Processes that train together, as far as it is known before they start."""
    if os.environ.get("WORLD_SIZE"):
        return int(os.environ["WORLD_SIZE"])
    devices, nodes = trainer.get("devices"), int(trainer.get("num_nodes") or 1)
    if isinstance(devices, list | tuple):
        return len(devices) * nodes
    if isinstance(devices, int | str) and str(devices).isdigit():
        return int(devices) * nodes
    return max(1, torch.cuda.device_count()) * nodes if trainer.get("accelerator") != "cpu" else nodes


def model_config(curriculum: Curriculum) -> dict[str, Any]:
    """The `config.json` of the run's base policy, or of what it will be made from."""
    base, source = curriculum.root / "base", curriculum.source
    if (base / "config.json").is_file():
        return read_config(base)
    if source.init is not None:
        return source.init.build(curriculum.seed)[0].config.to_dict()
    return named_config(source.name, source.trust_remote_code)


def _check(prefix: str, stage: Stage, curriculum: Curriculum, shape: plan.Shape | None) -> None:
    module = stage.module
    context = shape.context if shape else None
    engine_context = getattr(curriculum.engine, "max_model_len", None)
    max_length = None if isinstance(module, RLModule) else getattr(module, "max_length", None)
    plan.check_lengths(prefix, module.generation.max_tokens, context, engine_context, max_length)
    if isinstance(module, RLModule):
        each = module.mini_batches * module.ppo_epochs
        plan.check_batches(prefix, stage.data.batch_size, module.mini_batches, each, stage.trainer.max_steps)


def _longest(module: StageModule, shape: plan.Shape | None) -> int:
    return getattr(module, "max_length", None) or min(4096, (shape and shape.context) or 4096)


def _work(
    curriculum: Curriculum, name: str, stage: Stage, options: Mapping[str, Any], shape: plan.Shape | None
) -> plan.Work:
    module, data = stage.module, stage.data
    rl = isinstance(module, RLModule)
    each = module.mini_batches * module.ppo_epochs if rl else 1
    iterations = -(-stage.trainer.max_steps // each)
    interval = options.get("val_check_interval")
    validations = 2 + (iterations // interval if isinstance(interval, int) and interval else 0)
    state = "to do"
    if curriculum.finished(name):
        state = "finished"
    elif has_begun(curriculum.root, name):
        newest = complete(place(curriculum.root, name))
        state = f"from step {int(newest[0].name.removeprefix('step-'))}" if newest else state
    return plan.work(
        name,
        state,
        stage.trainer.max_steps,
        data.batch_size,
        module.generation.max_tokens if rl else _longest(module, shape),
        module.group_size if rl else None,
        each,
        validations,
        len(data.split("val")) * len(module.eval_modes),
    )


def _training(curriculum: Curriculum, stage: Stage, options: Mapping[str, Any], ranks: int) -> plan.Training:
    source, module = curriculum.source, stage.module
    strategy, precision = options.get("strategy"), str(options.get("precision") or "")
    sharded = isinstance(strategy, ModelParallelStrategy)
    dtype, compute = _PRECISION.get(precision, (source.dtype, "bfloat16" if "bf16" in precision else source.dtype))
    return plan.Training(
        dtype,
        ranks if sharded else 1,
        adapter=source.lora.r if source.lora else None,
        tokens=module.max_tokens_per_micro_batch,
        checkpointing=source.gradient_checkpointing,
        reference=isinstance(module, RLModule) and module.objective.kl_coef > 0 and source.lora is None,
        compute=compute,
    )


def _check_device(memory: dict[str, int]) -> None:
    if not torch.cuda.is_available():
        return
    total = torch.cuda.get_device_properties(0).total_memory
    least = sum(memory.get(part, 0) for part in ("weights", "gradients", "optimizer"))
    if least > total:
        raise ValueError(
            f"weights, gradients and optimizer take {least / 1e9:.0f} GB a rank, the device has {total / 1e9:.0f} GB: "
            "shard over more ranks (trainer.strategy ModelParallelStrategy), set policy.lora, or choose policy.dtype "
            "bfloat16"
        )
