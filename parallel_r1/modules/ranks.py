"""One module code on one device, under DDP and under FSDP2: what depends on the strategy stands here.

| `trainer.strategy` | weights | gradients |
|---|---|---|
| one device | whole | as they are |
| `ddp` | whole on every rank | summed up on each rank, averaged once before the optimizer step |
| `ModelParallelStrategy` (FSDP2) | a part on every rank, gathered layer by layer | reduced in every backward pass |

Under FSDP2 every forward and backward pass is a collective, so all ranks run as many; under DDP none is, so that a rank
may repeat its passes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn

from parallel_r1.policy import Policy, PolicySource, load_policy
from parallel_r1.sharding import ShardedLoad

T = TypeVar("T")


def is_sharded(trainer: L.Trainer) -> bool:
    """Whether each rank holds a part of every weight."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def check_strategy(trainer: L.Trainer) -> None:
    """Raise ValueError for a strategy under which the module would compute something else."""
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
        raise ValueError(
            f"trainer.strategy is {type(strategy).__name__}: choose ddp, or "
            "lightning.pytorch.strategies.ModelParallelStrategy, which shards by FSDP2"
        )
    if isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh["tensor_parallel"].size() > 1:
        ranks = trainer.world_size
        raise ValueError(
            "trainer.strategy splits single weights over "
            f"{strategy.device_mesh['tensor_parallel'].size()} ranks, which the trainer does not do (the engine can: "
            "engine.init_args.tensor_parallel): give ModelParallelStrategy both data_parallel_size="
            f"{ranks} and tensor_parallel_size=1; left out, they are not these"
        )


def load_for(trainer: L.Trainer, folder: Path, source: PolicySource) -> Policy:
    """The policy of a folder, whole or sharded as the trainer's strategy wants it. Collective over ranks."""
    check_strategy(trainer)
    # batches are lists of problems, which hold no tensors; half precision would walk through them and refuse
    trainer.precision_plugin.convert_input = lambda data: data
    if not is_sharded(trainer):
        return load_policy(folder, source)
    precision = trainer.precision
    # under bf16-true Lightning would convert the weights after they were loaded
    dtype = {"bf16-true": "bfloat16", "16-true": "float16"}.get(precision, source.dtype)
    compute = torch.bfloat16 if precision == "bf16-mixed" else None
    mesh = trainer.strategy.device_mesh["data_parallel"]
    return load_policy(folder, source, ShardedLoad(mesh, dtype, compute, source.cpu_offload))


# --------------------------------------------------------------------------- gradients


@contextmanager
def gradients_stay_here(trainer: L.Trainer) -> Iterator[None]:
    """Keep DDP from reducing gradients in this backward pass: `average_gradients` does, once for all passes."""
    if isinstance(trainer.strategy, DDPStrategy):
        with trainer.strategy.model.no_sync():
            yield
    else:
        yield


@torch.no_grad()
def average_gradients(trainer: L.Trainer, model: nn.Module) -> None:
    """Under DDP, the mean of each gradient over all ranks; one that a rank lacks counts as zero there."""
    if not isinstance(trainer.strategy, DDPStrategy):
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= trainer.world_size


# --------------------------------------------------------------------------- an engine that several ranks share


class EngineRanks:
    """The ranks that share one engine: `size` consecutive ones. Each asks for what all of them want, and keeps its own.

    One rank an engine (size 1, the default) asks for its own alone.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self._group: dist.ProcessGroup | None = None
        if size > 1:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            if ranks % size:
                raise ValueError(
                    f"engine.init_args.tensor_parallel={size} while the trainer has {ranks} rank(s): an engine shares "
                    "the trainer's ranks, so their number must be a multiple of it"
                )
            # collective: every rank makes every group
            groups = [dist.new_group(list(range(i, i + size)), backend="gloo") for i in range(0, ranks, size)]
            self._group = groups[dist.get_rank() // size]

    def sample(self, mine: Sequence[T], sample: Callable[[list[T]], list]) -> list:
        """`sample` of this rank's requests, asked together with those of its peers. Collective over the peers."""
        if self._group is None:
            return sample(list(mine))
        parts: list[list[T]] = [[] for _ in range(self.size)]
        dist.all_gather_object(parts, list(mine), group=self._group)
        out = sample([request for part in parts for request in part])
        here = dist.get_rank() % self.size
        start = sum(map(len, parts[:here]))
        return out[start : start + len(mine)]
