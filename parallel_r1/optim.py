"""Optimizers that PyTorch does not have as one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (torch.optim.Muon) for weight matrices, AdamW for embeddings, the output matrix and vectors.

    Small models find look-up circuits with Muon where AdamW stalls (measured, see LOG.md).

    Args:
        params: (name, parameter) pairs, as `named_parameters` gives them.
        lr: learning rate of both; Muon's update is scaled to the RMS of AdamW's (arXiv 2502.16982).
        weight_decay: of the matrices alone.
        betas: of AdamW.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]],
        lr: float = 2e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.98),
    ) -> None:
        named = list(params)
        matrices = [(n, p) for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        chosen = {n for n, _ in matrices}
        others = [(n, p) for n, p in named if n not in chosen]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(
                torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=0.0))
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        """One list of groups, so that a schedule that writes a learning rate here reaches the parts, and one state, so
        that a checkpoint of this optimizer is one of any optimizer."""
        start = 0
        for part in self.parts:
            part.param_groups = self.param_groups[start : start + len(part.param_groups)]
            start += len(part.param_groups)
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()
