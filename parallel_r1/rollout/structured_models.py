"""Models of vLLM that stand their tokens where the layout says, for positions that are not the token's index.

vLLM lets a model choose positions through the interface for multi-modal rotary embeddings (three rows of positions).
The classes here give it three equal rows and hand the stock model one of them. So any form of rotary embedding works,
and weights keep their names. Imports vLLM: import it late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import SupportsMRoPE

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")

_POSITIONS: dict[tuple[int, ...], tuple[int, ...]] = {}
"""Positions by prompt, of the requests in flight. vLLM asks for them by tokens alone, and only the caller knows where
the problem ends and the response, which is structured, begins."""


def announce(tokens: Sequence[int], positions: Sequence[int]) -> None:
    """Tell the positions of a prompt before it is submitted. Raises RuntimeError where its tokens have others."""
    known = _POSITIONS.setdefault(tuple(tokens), tuple(positions))
    if known != tuple(positions):
        raise RuntimeError("two requests of equal tokens and different layouts run at once: sample them in two calls")


def forget() -> None:
    """Drop what was announced, once no request is in flight."""
    _POSITIONS.clear()


class _LaidOut:
    """What is laid over a stock class."""

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Any) -> tuple[Tensor, int]:
        """[3, T] equal rows of positions, and what to add to the index of a sampled token: it follows the last one."""
        positions = _POSITIONS.get(tuple(input_tokens))
        if positions is None:
            raise RuntimeError(
                "a request whose positions nobody announced reached an engine for branches: go through "
                "generate_branching, or start the engine without branching"
            )
        rows = torch.tensor(positions, dtype=torch.int64).expand(3, -1).contiguous()
        return rows, positions[-1] + 1 - len(positions)

    def forward(self, input_ids: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(input_ids, positions[0] if positions.ndim == 2 else positions, *args, **kwargs)


def overrides(architecture: str) -> dict[str, Any]:
    """vLLM's `hf_overrides` that put the laid-out class in place of a stock one. Raises ValueError for unknown ones."""
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"generation.positions=longest is not available for {architecture} in vLLM (only for "
            f"{', '.join(ARCHITECTURES)}): choose positions: index, which every model computes, or TransformersEngine"
        )
    name = f"LaidOut{architecture}"
    if name not in ModelRegistry.get_supported_archs():
        stock = ModelRegistry.models[architecture].load_model_cls()
        ModelRegistry.register_model(name, type(name, (_LaidOut, stock, SupportsMRoPE), {"__module__": __name__}))
    # the key in the config itself switches the interface on and leaves the rotary embedding alone
    return {"architectures": [name], "mrope_section": [1, 1, 1]}
