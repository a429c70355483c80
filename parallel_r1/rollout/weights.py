"""Weights on their way from the trainer to an engine: names as in a Hugging Face checkpoint, tensors whole.

One tensor is whole at a time, so the extra memory is bounded by the largest parameter, not by the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# What wrappers put into parameter names: DDP, torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = re.compile(r"(?:^module\.|(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)")


def clean_name(name: str) -> str:
    """A parameter's name without what DDP, torch.compile or activation checkpointing put into it."""
    return _WRAPPERS.sub("", name)


def full_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) for every parameter of a plain, DDP-wrapped or FSDP2 causal LM.

    Tied parameters come once for each of their names: engines that repack `lm_head.weight` keep a stale copy otherwise.
    Under FSDP2 every step is a collective: all ranks iterate to the end, in the same order. The tensors may be views
    of the parameters themselves: copy what is to outlive the next optimizer step.
    """
    names: dict[int, list[str]] = defaultdict(list)
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(clean_name(name))
        parameters[id(parameter)] = parameter
    for key, parameter in parameters.items():
        tensor = _full(parameter)
        for name in names[key]:
            yield name, tensor
        del tensor  # else it would live on while the next one is gathered


@torch.no_grad()  # here, for around a generator it would hold on to what was yielded last
def _full(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    # With CPU offload the shards lie on the CPU, but the group only gathers on the mesh's device.
    shard = parameter.detach()
    if shard.device.type != shard.device_mesh.device_type:
        shard = shard.to(shard.device_mesh.device_type)
    return shard.full_tensor()


def parameter_names(model_dir: Path) -> frozenset[str]:
    """The names `full_weights` yields for the model of a folder: tied ones under each name. Loads no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))


class WeightStream:
    """A stream of weights for an engine that must be fed to the end, whatever happens on the trainer's side.

    Iterate it once, then call `check`. Where the source raises, the stream just ends and `check` raises in its place:
    an engine that is interrupted inside its own loader (vLLM takes its layers apart there) could not be used again.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self._names: set[str] = set()
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from map(self._noted, self._weights)  # a loop variable would hold each tensor one step longer
        except Exception as error:
            self._error = error

    def _noted(self, pair: tuple[str, Tensor]) -> tuple[str, Tensor]:
        self._names.add(pair[0])
        return pair

    def check(self, expected: Iterable[str]) -> None:
        """Raise the source's own error, or RuntimeError when it left out weights of the model."""
        if self._error is not None:
            raise self._error
        missing = sorted(set(expected) - self._names)
        if missing:
            raise RuntimeError(
                f"weight sync left out {len(missing)} weights ({', '.join(missing[:3])}, ...): the engine would go on "
                "with older ones. Stream every parameter by its Hugging Face name, as rollout.weights.full_weights does"
            )
