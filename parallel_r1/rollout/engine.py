"""The interface between training code and whatever samples tokens.

Every engine keeps this contract, and the tests hold each of them to it:
- ids in, ids out: nothing is re-tokenised, and no special token is skipped;
- `Rollout.logprobs` are those of the distribution that was sampled from (after temperature and `banned`);
- the tokens of a request depend on its own prompt and seed alone, not on the rest of the batch (two engines draw
  different tokens from one seed: only their distributions and their greedy tokens agree);
- after `sync` returns, nothing computed with older weights is used again (prefix caches included);
- the trainer's random state and process group are as they were before the call.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_r1.structure.layout import Positions
from parallel_r1.structure.tokens import TagIds
from parallel_r1.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One response to sample.

    prompt_ids: the prompt. prefix_ids: forced first tokens of the response (context: they carry no loss).
    max_tokens: limit of the whole response, prefix included, in tokens. seed: 0 <= seed < 2**31.
    name: what messages call it; nothing else depends on it.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    prefix_ids: tuple[int, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Sampling:
    """How every request of a call is sampled.

    temperature: 0 is greedy (log-probabilities are then those at temperature 1). eos_ids: ids that end a response; the
    one that was sampled is the last token of the response. banned: ids that are never sampled; probabilities are those
    of the renormalised rest. There is no top_p, top_k or min_p on purpose: they would make training off-policy.
    """

    temperature: float = 1.0
    eos_ids: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # vLLM raises smaller temperatures to 0.01 itself, and then reports the log-probabilities of that.
        if self.temperature != 0 and not self.temperature >= 0.01:
            raise ValueError(f"temperature is {self.temperature}: give 0 (greedy) or at least 0.01")


@dataclass(frozen=True)
class Branching:
    """How a response forks into isolated paths and joins again.

    tags: the six control tags. positions: where the text after a block stands (`structure.layout`).
    paths: (fewest, most) paths of a block; the number is drawn for each block from the seed of its request.
    max_blocks: blocks a response may open; afterwards `<Parallel>` is not sampled any more and the text goes on.
    max_path_tokens, max_summary_tokens: sampled tokens of one path (of one summary), its closing tag included; one that
    is cut there is closed by an inserted tag. None: what is left of the response, shared equally among the paths.
    openings: tokens inserted after the `<Path>` of the first, second, ... path; empty for none.
    """

    tags: TagIds
    positions: Positions = "longest"
    paths: tuple[int, int] = (2, 2)
    max_blocks: int = 1
    max_path_tokens: int | None = None
    max_summary_tokens: int | None = None
    openings: tuple[tuple[int, ...], ...] = ()


class RolloutEngine(ABC):
    """Samples responses with weights that the trainer streams in. Constructing one is cheap; `start` loads it.

    ranks: consecutive ranks of the trainer that share one engine; all of them make the same calls with equal requests.
    """

    ranks: int = 1

    @abstractmethod
    def start(self, model_dir: Path, branching: Positions | None = None) -> None:
        """Load the architecture and the weights of a Hugging Face model folder.

        branching: None for an engine that serves `generate`, where everything is plain and causal; a scheme of
        positions for one that serves `generate_branching` under it. Never both: they would share a cache that means
        different things. Asked for the other, an engine starts anew.


        A folder without weight files gives the architecture alone. Called again with a folder of the same architecture
        and vocabulary it keeps the running engine and only marks its weights as unknown, whatever the folder holds.
        While weights are unknown `generate` raises RuntimeError: the next `sync` brings them.
        """

    @abstractmethod
    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights by (Hugging Face name, full tensor) pairs and drop everything cached under the old ones.

        Consumes the iterable one tensor at a time and writes nothing to disk. Raises RuntimeError before `start`, when
        a weight of the model is missing from the stream, or when a cache could not be dropped; the weights are then
        unknown.
        """

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Sample one response a request, in the order of the requests; an empty list for no requests.

        A prefix that uses up the whole limit comes back as it is, unfinished. Raises ValueError for a request that the
        engine cannot hold (prompt + max_tokens above its context), naming the sizes; RuntimeError when called before
        `start`, while the weights are unknown, or on an engine that was started for branching.
        """

    def generate_branching(self, requests: Sequence[Request], sampling: Sampling, plan: Branching) -> list[Rollout]:
        """Sample one response a request whose blocks hold isolated paths, in the order of the requests.

        The distribution is that of `structure.layout` under `unseen`: what training computes. Inserted tags are marked
        as not sampled, budgets hold for each part and for the whole, and no response waits for another. Raises as
        `generate` does, and ValueError for a request whose prefix holds more of a block than its opening `<Parallel>`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot isolate paths: for generation.structure=unseen choose VLLMEngine or "
            "TransformersEngine as engine.class_path"
        )

    def sleep(self) -> None:  # noqa: B027 - optional: only engines that hold device memory have something to do
        """Give device memory back between rollouts, where the engine can; its weights are then unknown."""

    @abstractmethod
    def close(self) -> None:
        """Free everything, sparing the trainer's process group. Safe to call twice."""


def request_seed(seed: int, iteration: int, sample: int) -> int:
    """The sampling seed of one response, in [0, 2**31).

    iteration: how many rollouts the run has made before; sample: the index of the response in the global batch of all
    ranks, so that seeds differ between ranks while the number of ranks changes nothing.
    """
    digest = hashlib.blake2b(f"{seed}/{iteration}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def check_requests(requests: Sequence[Request], sampling: Sampling, *, context: int, vocab_size: int) -> None:
    """Raise ValueError, naming request and sizes, for what an engine of this context and vocabulary cannot sample."""
    for name, ids in (("eos_ids", sampling.eos_ids), ("banned", sampling.banned)):
        _check_ids(f"sampling.{name}", ids, vocab_size)
    if len(set(sampling.banned)) >= vocab_size:
        raise ValueError(f"sampling.banned holds all {vocab_size} ids of the vocabulary: nothing is left to sample")
    for index, request in enumerate(requests):
        prompt, prefix, limit = len(request.prompt_ids), len(request.prefix_ids), request.max_tokens
        name = request.name or f"request {index}"
        if prompt == 0:
            raise ValueError(f"{name} has an empty prompt: give at least one token to condition on")
        if limit < 1 or prefix > limit:
            raise ValueError(
                f"{name} allows max_tokens={limit} for a response with a prefix of {prefix} tokens: raise max_tokens "
                "or shorten the prefix"
            )
        if prompt + limit > context:
            raise ValueError(
                f"{name} needs {prompt} prompt + {limit} response (max_tokens) = {prompt + limit} tokens, the engine "
                f"holds {context}: raise its max_model_len, lower max_tokens, or leave long prompts out "
                "(generation.max_prompt_tokens)"
            )
        if not 0 <= request.seed < 2**31:
            raise ValueError(f"{name} has seed {request.seed}: seeds lie in [0, 2**31), see request_seed")
        _check_ids(name, request.prompt_ids + request.prefix_ids, vocab_size)


def check_branching(requests: Sequence[Request], plan: Branching) -> None:
    """Raise ValueError, naming request and cause, for what cannot be sampled in branches."""
    fewest, most = plan.paths
    if not 2 <= fewest <= most:
        raise ValueError(f"paths={plan.paths}: a block needs two or more paths, the fewest first")
    if plan.openings and len(plan.openings) < most:
        raise ValueError(f"there are {len(plan.openings)} openings for up to {most} paths: give one a path")
    tags = set(plan.tags.all())
    for index, request in enumerate(requests):
        at = [i for i, token in enumerate(request.prefix_ids) if token in tags]
        opens = at == [len(request.prefix_ids) - 1] and request.prefix_ids[-1] == plan.tags.parallel
        if at and not opens:
            raise ValueError(
                f"request {index} has a prefix with control tags at {at}: paths that no engine has sampled have no "
                "keys and values, and computing them as plain text would show each path its siblings. Give a prefix "
                "without tags, or one with `<Parallel>` as its last token"
            )
        if opens and plan.max_blocks < 1:
            raise ValueError(f"request {index} starts with `<Parallel>` while max_blocks is 0: allow a block")


def require_mode(started: Positions | None, asked: Positions | None) -> None:
    """Raise RuntimeError where an engine is asked for what it was not started for."""
    if started != asked:
        names = {
            None: "plain causal text",
            "longest": "branches at positions `longest`",
            "index": "branches at `index`",
        }
        raise RuntimeError(
            f"the engine was started for {names[started]} and is asked for {names[asked]}, which it would compute "
            "wrongly: call start with the other `branching` and sync"
        )


def _check_ids(owner: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"{owner}: ids span {min(ids)}..{max(ids)}, the model's vocabulary is 0..{vocab_size - 1}: "
            "is this the tokenizer of this model?"
        )


def make_rollout(request: Request, ids: Sequence[int], logprobs: Sequence[float], finished: bool) -> Rollout:
    """The record of a request's sampled `ids`, its forced prefix put in front."""
    prefix = request.prefix_ids
    return Rollout(
        prompt_ids=request.prompt_ids,
        response_ids=prefix + tuple(ids),
        logprobs=(0.0,) * len(prefix) + tuple(logprobs),
        sampled=(False,) * len(prefix) + (True,) * len(ids),
        finished=finished,
    )
