"""Fork and join: how one response grows out of many requests. No engine, no tensors.

    main ... <Parallel>  ->  N paths on the shared prefix  ->  summary  ->  main ...  ->  end of sequence

A `Sample` asks for one `Piece` of text after the other (for the paths of a block: side by side) and puts together what
comes back. It is driven by callbacks alone, so samples never wait for one another. What it asks for is a function of
its own request, its seeds included: neither the batch nor the order in which pieces finish can change it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from parallel_r1.rollout.engine import Branching, Request, Sampling
from parallel_r1.structure.tokens import Kind
from parallel_r1.types import Rollout


@dataclass(frozen=True)
class Piece:
    """A stretch of one segment to sample.

    sample: whose response it belongs to. block, path: where (0-based; path is -1 outside paths).
    context: prompt and response so far, `prompt_length` tokens of it the prompt; that of a path ends with its own
    opening and holds none of its siblings. max_tokens: at most so many. stops: ids that end it, the sampled one
    included. banned: ids that are not sampled.
    """

    sample: int
    kind: Kind
    block: int
    path: int
    prompt_length: int
    context: tuple[int, ...]
    max_tokens: int
    seed: int
    stops: tuple[int, ...]
    banned: tuple[int, ...]


@dataclass(frozen=True)
class Sampled:
    """What an engine made of a piece. ids, logprobs: of equal length, 1 to max_tokens."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


Submit = Callable[[Piece, Callable[[Sampled], None]], None]
"""How a sample reaches the engine: the piece, and what to call with its result, at once or later."""


def piece_seed(seed: int, block: int, kind: str, path: int = 0) -> int:
    """The seed of a piece, in [0, 2**31): a function of its request's seed and of its place in the response."""
    digest = hashlib.blake2b(f"{seed}/{block}/{kind}/{path}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def number_of_paths(seed: int, block: int, paths: tuple[int, int]) -> int:
    """How many paths a block gets: uniform over the range, from the request's seed."""
    return random.Random(piece_seed(seed, block, "paths")).randint(*paths)


def bans(kind: Kind, may_open: bool, sampling: Sampling, plan: Branching) -> tuple[int, ...]:
    """Ids that would break the structure at a place, with those banned everywhere.

    Main text may open a block while `may_open`; a path and a summary may close themselves and nothing else: the
    response ends in the main text only.
    """
    tags = plan.tags
    allowed = {"main": {tags.parallel} if may_open else set(), "path": {tags.end_path}, "summary": {tags.end_summary}}[
        kind
    ]
    out = [tag for tag in tags.all() if tag not in allowed]
    if kind != "main":
        out += sampling.eos_ids
    return tuple(dict.fromkeys([*sampling.banned, *out]))


@dataclass
class Sample:
    """One response in the making: call `start` once; `finish` is called with the rollout, possibly before that returns.

    index: names the sample in its pieces.
    """

    index: int
    request: Request
    sampling: Sampling
    plan: Branching
    submit: Submit
    finish: Callable[[Rollout], None]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    banned: list[tuple[int, ...]] = field(default_factory=list)
    block: int = 0
    cuts: int = 0
    _paths: dict[int, tuple[Piece, Sampled]] = field(default_factory=dict)

    def start(self) -> None:
        self._insert(*self.request.prefix_ids)
        if self.request.prefix_ids[-1:] == (self.plan.tags.parallel,):
            self._fork()
        else:
            self._main()

    @property
    def left(self) -> int:
        """Tokens until the limit of the response."""
        return self.request.max_tokens - len(self.ids)

    # ------------------------------------------------------------------ main text

    def _main(self) -> None:
        if not self.left:
            return self._end(finished=False)
        tags, may_open = self.plan.tags, self.block < self.plan.max_blocks
        stops = (*self.sampling.eos_ids, tags.parallel) if may_open else self.sampling.eos_ids
        piece = self._piece("main", self.left, stops, bans("main", may_open, self.sampling, self.plan))
        return self.submit(piece, partial(self._main_done, piece))

    def _main_done(self, piece: Piece, result: Sampled) -> None:
        self._add(piece, result)
        if result.ids[-1] in self.sampling.eos_ids:
            self._end(finished=True)
        elif result.ids[-1] == self.plan.tags.parallel:
            self._fork()
        else:
            self._end(finished=False)

    # ------------------------------------------------------------------ a block

    def _fork(self) -> None:
        tags, plan = self.plan.tags, self.plan
        count = number_of_paths(self.request.seed, self.block, plan.paths)
        openings = [(tags.path, *opening) for opening in (plan.openings[:count] or ((),) * count)]
        # a closing tag may have to be inserted into every path; then </Parallel><Summary>
        share = (self.left - sum(map(len, openings)) - count - 2) // count
        if share < 1:
            return self._end(finished=False)
        budget = share if plan.max_path_tokens is None else min(share, plan.max_path_tokens)
        self._paths = {}
        banned = bans("path", False, self.sampling, plan)
        pieces = [
            self._piece("path", budget, (tags.end_path,), banned, path, opening)
            for path, opening in enumerate(openings)
        ]
        for piece in pieces:
            self.submit(piece, partial(self._path_done, piece, count))
        return None

    def _path_done(self, piece: Piece, count: int, result: Sampled) -> None:
        self._paths[piece.path] = (piece, result)
        if len(self._paths) == count:
            self._join()

    def _join(self) -> None:
        tags = self.plan.tags
        start = self.request.prompt_ids + tuple(self.ids)
        for path in range(len(self._paths)):
            piece, result = self._paths[path]
            self._insert(*piece.context[len(start) :])
            self._add(piece, result)
            self._close(tags.end_path)
        self._insert(tags.end_parallel, tags.summary)
        if not self.left:
            return self._end(finished=False)
        limit = self.plan.max_summary_tokens
        budget = self.left if limit is None else min(self.left, limit)
        piece = self._piece("summary", budget, (tags.end_summary,), bans("summary", False, self.sampling, self.plan))
        return self.submit(piece, partial(self._summary_done, piece))

    def _summary_done(self, piece: Piece, result: Sampled) -> None:
        self._add(piece, result)
        if not self.left:  # the limit of the whole response cut it: nothing is made up to follow
            return self._end(finished=False)
        self._close(self.plan.tags.end_summary)
        self.block += 1
        return self._main()

    # ------------------------------------------------------------------ bookkeeping

    def _piece(
        self,
        kind: Kind,
        budget: int,
        stops: tuple[int, ...],
        banned: tuple[int, ...],
        path: int = -1,
        opening: tuple[int, ...] = (),
    ) -> Piece:
        request = self.request
        context = request.prompt_ids + tuple(self.ids) + opening
        seed = piece_seed(request.seed, self.block, kind, path)
        return Piece(
            self.index, kind, self.block, path, len(request.prompt_ids), context, budget, seed, stops, banned
        )  # fmt: skip

    def _add(self, piece: Piece, result: Sampled) -> None:
        n = len(result.ids)
        assert 1 <= n <= piece.max_tokens, f"the engine gave {n} tokens for a budget of {piece.max_tokens}"
        self.ids += result.ids
        self.logprobs += result.logprobs
        self.sampled += [True] * n
        self.banned += [piece.banned] * n

    def _insert(self, *ids: int) -> None:
        n = len(ids)
        self.ids += ids
        self.logprobs += [0.0] * n
        self.sampled += [False] * n
        self.banned += [()] * n

    def _close(self, tag: int) -> None:
        """Insert a closing tag where the budget came before it."""
        if self.ids[-1] != tag:
            self._insert(tag)
            self.cuts += 1

    def _end(self, finished: bool) -> None:
        assert len(self.ids) <= self.request.max_tokens
        self.finish(
            Rollout(
                self.request.prompt_ids,
                tuple(self.ids),
                tuple(self.logprobs),
                tuple(self.sampled),
                finished,
                tuple(self.banned),
                self.cuts,
            )
        )


def start_samples(
    requests: Sequence[Request],
    sampling: Sampling,
    plan: Branching,
    submit: Submit,
    finish: Callable[[int, Rollout], None],
) -> None:
    """Start a sample a request; `finish` is called with the index of a request and its rollout."""
    for index, request in enumerate(requests):
        Sample(index, request, sampling, plan, submit, partial(finish, index)).start()
