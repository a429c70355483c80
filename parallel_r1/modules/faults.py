"""What a stage does when something breaks: repeat what can be repeated, count what is left out, else stop and say why.

| fault | answer |
|---|---|
| a forward or backward pass runs out of memory | gradients dropped, budget of tokens halved, step repeated |
| a loss or gradient is not finite | the step changes nothing, on every rank; after so many in a row the stage stops |
| the engine raises | rebuilt, given the weights anew, asked the same again: equal seeds give equal tokens |
| nothing was learned: all responses cut, all rewards equal | a warning names the cause; a stop after so many if asked |
| no space left on the disk | the message names the file |

Ranks agree on each answer before they act on it, since what follows may be a collective.
"""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_warn

T = TypeVar("T")


class StageError(RuntimeError):
    """A stage that cannot go on as it is. The message names cause and remedy; what was saved before stays."""


# --------------------------------------------------------------------------- memory


class TokenBudget(Protocol):
    """Whoever cuts work into passes of at most `max_tokens_per_micro_batch` tokens."""

    max_tokens_per_micro_batch: int

    @property
    def sharded(self) -> bool:
        """Whether a pass is a collective, so that no rank can leave one alone."""

    def agree(self, level: int) -> int:
        """The highest level of all ranks."""

    def drop_gradients(self) -> None:
        """Forget what has been accumulated since the last optimizer step."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's allocator, or the CPU's, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def in_less_memory(
    host: TokenBudget, work: Callable[[], T], longest: int, before_retry: Callable[[], None] | None = None
) -> T:
    """Do work in passes that fit: halve the budget and do all of it again where one does not. Collective over ranks.

    work: from the first pass of an optimizer step to its last; it cuts passes anew at each call.
    longest: tokens of the longest row here, which no budget can cut. Raises StageError where that does not fit, and
    where the model is sharded: the other ranks are inside a collective that this one has left.
    """
    while True:
        result, failed = None, 0
        try:
            result = work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if host.sharded:
                raise StageError(
                    f"out of memory in a sharded forward or backward pass, which cannot be repeated on one rank alone: "
                    f"lower max_tokens_per_micro_batch (now {host.max_tokens_per_micro_batch}; half of it is a good "
                    "start), or set policy.gradient_checkpointing, and run the same command again"
                ) from error
            failed = 2 if host.max_tokens_per_micro_batch <= longest else 1
        # outside the handler: the exception, and with it every tensor of the failed pass, is gone
        worst = host.agree(failed)
        if not worst:
            return result
        if worst == 2:
            raise StageError(
                f"out of memory on a single response (the longest here has {longest} tokens with its prompt): lower "
                "generation.max_tokens or the engine's gpu_memory_utilization, set policy.gradient_checkpointing, or "
                "shard the policy over more ranks"
            )
        del result
        host.drop_gradients()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        host.max_tokens_per_micro_batch //= 2
        rank_zero_warn(
            f"out of memory in a micro-batch: the step is repeated with max_tokens_per_micro_batch="
            f"{host.max_tokens_per_micro_batch}, which stays so; set it in the configuration to save the retry"
        )
        if before_retry is not None:
            before_retry()


# --------------------------------------------------------------------------- numbers that are none


class SkippedSteps:
    """Counts optimizer steps that were left out because a loss or gradient was not finite.

    limit: so many in a row stop the stage. total, in_a_row: what was counted.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.total, self.in_a_row = limit, 0, 0

    def count(self, skipped: bool, step: int) -> None:
        """Take one step in, alike on every rank. Raises StageError at the limit."""
        self.total += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= self.limit:
            raise StageError(
                f"{self.in_a_row} optimizer steps in a row, the last of them step {step}, had a loss or gradient that "
                "is not finite; none changed the policy. Lower the learning rate or gradient_clip, look at the "
                "rewards, or train in float32 (trainer.precision); max_skipped_steps sets the limit"
            )
        if skipped:
            rank_zero_warn(
                f"step {step} was skipped: its loss or gradient is not finite ({self.in_a_row} in a row, {self.limit} "
                "stop the stage)"
            )


# --------------------------------------------------------------------------- iterations that teach nothing


class IdleIterations:
    """Warns where a whole iteration taught nothing. limit: so many in a row stop the stage; None never does."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.in_a_row = limit, 0

    def look(self, metrics: Mapping[str, float], iteration: int, max_tokens: int) -> None:
        """Take an iteration's metrics in, alike on every rank. Raises StageError at the limit."""
        cause = idle_because(metrics, max_tokens)
        self.in_a_row = self.in_a_row + 1 if cause else 0
        if not cause:
            return
        if self.limit is not None and self.in_a_row >= self.limit:
            raise StageError(
                f"iteration {iteration}: {cause} It is the {self.in_a_row}. such iteration in a row, and "
                f"max_idle_iterations={self.limit}."
            )
        if not self.in_a_row & (self.in_a_row - 1):  # the first, second, fourth, eighth, ... of a row
            rank_zero_warn(f"iteration {iteration}: {cause}")


def idle_because(metrics: Mapping[str, float], max_tokens: int) -> str:
    """Why nothing was learned, and what helps; empty where something was."""
    if metrics.get("rollout/truncated", 0.0) >= 1.0:
        return (
            f"100 % of responses were cut by generation.max_tokens={max_tokens}, so none has an answer and nothing is "
            "learned: raise max_tokens, or start from a policy that ends its responses (a cold start)."
        )
    if metrics.get("rollout/zero_variance_groups", 0.0) >= 1.0:
        mean = metrics.get("reward/total/mean", float("nan"))
        return (
            f"all rewards of every group are equal (mean {mean:.3g}), so there is no gradient: take easier or harder "
            "problems (solve_rate of the data), a larger group_size, or objective.dynamic_sampling."
        )
    return ""


# --------------------------------------------------------------------------- the engine


class EngineRecovery:
    """Calls the engine, and repeats a call that failed on an engine that was built anew. Collective over ranks.

    rebuild: close, start and sync, on every rank. agree: the highest level of all ranks. limit: rebuilds in a row.
    """

    def __init__(self, rebuild: Callable[[], Any], agree: Callable[[int], int], limit: int = 2) -> None:
        self.rebuild, self.agree, self.limit, self.total = rebuild, agree, limit, 0

    def call(self, sample: Callable[[], T]) -> T:
        """Raises ValueError for requests that no engine could serve, RuntimeError when rebuilding did not help."""
        result: T | None = None
        pending = True
        for attempt in range(self.limit + 1):
            error: Exception | None = None
            if pending:
                try:
                    result, pending = sample(), False
                except Exception as raised:
                    error = raised
            hopeless = isinstance(error, ValueError | NotImplementedError | AssertionError)
            worst = self.agree(2 if hopeless else 1 if error else 0)
            if not worst:
                return result
            if hopeless:
                raise error
            if worst == 2:
                raise RuntimeError("another rank has requests that its engine cannot serve: see its message")
            if attempt == self.limit:
                raise RuntimeError(
                    f"the engine failed {attempt + 1} times in a row, each time built anew: {_said(error)}. Lower its "
                    "max_num_seqs or gpu_memory_utilization, or look at the error above; the same command goes on from "
                    "the last checkpoint"
                ) from error
            self.total += 1
            rank_zero_warn(
                f"the engine failed ({_said(error)}): it is built anew, gets the current weights, and then the same "
                "requests with the same seeds"
            )
            self.rebuild()
        raise AssertionError("unreachable: the last attempt returns or raises")


def _said(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"[:500] if error else "on another rank"


# --------------------------------------------------------------------------- the disk


@contextmanager
def room_for(what: str, path: Path, remedy: str) -> Iterator[None]:
    """Write a file. Raises StageError, naming it and the remedy, where the disk or the quota is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StageError(
            f"no space left for {what} in {path}: free some, or {remedy}; the same command then goes on from the last "
            "checkpoint"
        ) from error
