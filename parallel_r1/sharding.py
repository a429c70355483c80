"""FSDP2: a policy that is never whole on any rank. Built without weights, sharded, then filled file by file.

    on meta -> fully_shard -> empty shards on the device -> each rank reads its own rows of each tensor

Peak memory of a load is the shards and one rank's part of the tensor under way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel_r1.scores import share_scores


@dataclass(frozen=True)
class ShardedLoad:
    """How a policy is spread over ranks.

    mesh: one dimension, the ranks that share the weights. dtype: of the weights. compute: gather and compute in this
    type, reduce gradients in float32; None: in `dtype`. cpu_offload: shards live in CPU memory between passes.
    """

    mesh: Any
    dtype: str = "float32"
    compute: torch.dtype | None = None
    cpu_offload: bool = False

    @property
    def device(self) -> torch.device:
        """Where the shards live."""
        kind = self.mesh.device_type
        if self.cpu_offload or kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.accelerator.current_device_index())


def shard(model: nn.Module, mesh: Any, compute: torch.dtype | None = None, cpu_offload: bool = False) -> None:
    """Each decoder layer, then the rest, sharded in place."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh}
    low = compute or next(model.parameters()).dtype
    if low in (torch.bfloat16, torch.float16):
        # gradients of all ranks are summed in float32: dozens of them would lose bits in half precision
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for layer in model.get_decoder().layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    share_scores(model)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built in the body get parameters without storage, and buffers as they should be.

    Buffers (tables of rotary embeddings) are computed when a module is built and stand in no file.
    """
    register = nn.Module.register_parameter

    def without_storage(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = without_storage
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def fill(model: nn.Module, folder: Path, device: torch.device) -> None:
    """Give a model without weights, sharded or not, those of a folder. Every rank reads its own rows and no others.

    Raises ValueError for a parameter that the folder does not hold, before anything is allocated.
    """
    from safetensors import safe_open

    places = stored_tensors(folder)
    names = _sources(model, places, folder)
    tied = _tied(model)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for module, key, owner, owner_key in tied:  # emptied one by one, they are two tensors now
        module._parameters[key] = owner._parameters[owner_key]
    parameters = dict(model.named_parameters())
    by_file: dict[str, list[str]] = {}
    for name in parameters:
        by_file.setdefault(places[names[name]], []).append(name)
    with torch.no_grad():
        for file, members in by_file.items():
            with safe_open(folder / file, framework="pt") as tensors:
                for name in members:
                    _read(parameters[name], tensors.get_slice(names[name]), name)


def stored_tensors(folder: Path) -> dict[str, str]:
    """Tensor name -> file of a model folder; empty for a folder without safetensors."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    out: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            out |= dict.fromkeys(tensors.keys(), file.name)
    return out


def can_fill(model: nn.Module, folder: Path) -> bool:
    """Whether a folder holds every parameter under its own name (some architectures rename or fuse when they load)."""
    try:
        _sources(model, stored_tensors(folder), folder)
    except ValueError:
        return False
    return True


def _sources(model: nn.Module, stored: dict[str, str], folder: Path) -> dict[str, str]:
    """The stored name of each parameter: its own, or that of a parameter it is tied to."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    out = {}
    for names in aliases.values():
        found = next((name for name in names if name in stored), None)
        if found is None:
            raise ValueError(f"{folder} holds no tensor {names[0]}: give a complete Hugging Face folder (safetensors)")
        out |= dict.fromkeys(names, found)
    return out


def _tied(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """(module, key, owner, key of the owner) of every parameter that another module owns."""
    owners: dict[int, tuple[nn.Module, str]] = {}
    out = []
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in owners:
                out.append((module, key, *owners[id(parameter)]))
            owners.setdefault(id(parameter), (module, key))
    return out


def _read(parameter: nn.Parameter, stored: Any, name: str) -> None:
    """Copy a stored tensor, or this rank's rows of it, into a parameter."""
    if list(stored.get_shape()) != list(parameter.shape):
        raise ValueError(
            f"{name} is stored as {stored.get_shape()}, the model's config makes it {list(parameter.shape)}"
        )
    if not isinstance(parameter, DTensor):
        parameter.copy_(stored[:])
        return
    local: Tensor = parameter.to_local()
    if local.numel():
        first = _first_row(parameter)
        local.copy_(stored[first : first + len(local)])


def _first_row(parameter: DTensor) -> int:
    """The index, in the whole tensor, of the first row of this rank: chunks of one size, the last ones smaller."""
    (placement,) = parameter.placements
    assert placement.is_shard(0), f"sharded by {placement}, where rows were expected"
    ranks = parameter.device_mesh.size()
    return parameter.device_mesh.get_local_rank() * -(-parameter.shape[0] // ranks)
