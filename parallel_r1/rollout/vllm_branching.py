"""Branches on vLLM: every piece of a response is a request of its own that goes on from what earlier ones left behind.

A path is followed by a request of one more token: it computes the keys of the closing tag, which was sampled last (or
inserted), so that nobody has computed them yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from parallel_r1.rollout.branching import Piece, Sampled
from parallel_r1.rollout.engine import Branching, Request, Sampling
from parallel_r1.rollout.kv_splice import STORES, Load, Save, SpliceStore
from parallel_r1.rollout.structured_models import announce, forget, overrides
from parallel_r1.rollout.vllm_runtime import RequestLoop
from parallel_r1.structure.layout import Positions, layout

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

MakeParams = Callable[[Request, Sampling], "SamplingParams"]


def branching_arguments(config: dict[str, Any], positions: Positions) -> tuple[SpliceStore, dict[str, Any]]:
    """The store of a new engine, and the arguments of vLLM that make it serve branches. config: of the model folder."""
    store, name = SpliceStore(), uuid4().hex
    STORES[name] = store
    arguments: dict[str, Any] = {
        "kv_transfer_config": {
            "kv_connector": "SpliceConnector",
            "kv_connector_module_path": "parallel_r1.rollout.kv_splice",
            "kv_role": "kv_both",
            "engine_id": name,
        },
        "disable_hybrid_kv_cache_manager": True,
        "scheduling_policy": "priority",
        "async_scheduling": False,  # a request would finish with a step of its own still under way
    }
    if positions == "longest":
        arguments["hf_overrides"] = overrides(config["architectures"][0])
    return store, arguments


@dataclass
class Lineage:
    """What the response of one sample has left in the store. loads: contiguous from token 0; its end: `end`."""

    loads: tuple[Load, ...] = ()
    paths: dict[int, list[Load]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.loads[-1].end if self.loads else 0

    def add(self, key: tuple, offset: int, length: int) -> None:
        """The next `length` tokens of the response are those of a segment from `offset` on."""
        if length:
            self.loads = (*self.loads, Load(key, offset, self.end, length))

    def join(self) -> None:
        """Put the finished paths of a block one after the other."""
        for _, parts in sorted(self.paths.items()):
            for part in parts:
                self.add(part.key, part.offset, part.length)
        self.paths = {}


class Splicer:
    """Turns the pieces of many samples into requests with a lineage.

    computed: tokens of prompts that the engine really computed, by kind of piece; `closing` are those of closing tags.
    """

    def __init__(
        self, loop: RequestLoop, store: SpliceStore, plan: Branching, temperature: float, make_params: MakeParams
    ) -> None:
        self._loop, self._store, self._plan, self._temperature = loop, store, plan, temperature
        self._make_params = make_params
        self._lineages: dict[int, Lineage] = {}
        self.computed: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()

    def submit(self, piece: Piece, then: Callable[[Sampled], None]) -> None:
        """Queue a piece; `then` gets what was sampled."""
        line = self._lineages.setdefault(piece.sample, Lineage())
        if piece.kind == "summary":
            line.join()
        tags, save = self._plan.tags, None
        if piece.kind == "main":
            save = Save((piece.sample, piece.block, "main"), line.end, only_after=tags.parallel)
        elif piece.kind == "path":
            save = Save((piece.sample, piece.block, piece.path), line.end)
        start = line.end

        def done(output: RequestOutput) -> None:
            completion = output.outputs[0]
            result = Sampled(tuple(completion.token_ids), tuple(completion.logprobs.logprobs))
            if piece.kind == "path":
                self._close(piece, result, then)
                return
            if piece.kind == "main" and result.ids[-1] == tags.parallel:
                line.add(save.key, 0, len(piece.context) + len(result.ids) - 1 - start)
            then(result)

        sampling = Sampling(self._temperature, piece.stops, piece.banned)
        params = self._make_params(Request(piece.context, piece.max_tokens, piece.seed), sampling)
        self._request(piece, piece.kind, piece.context, params, line.loads, save, done)

    def _close(self, piece: Piece, result: Sampled, then: Callable[[Sampled], None]) -> None:
        """Have the keys of a path's last tokens computed, then go on."""
        line, tags = self._lineages[piece.sample], self._plan.tags
        tokens = piece.context + result.ids
        known = len(tokens) - 1  # all but the token sampled last
        if result.ids[-1] != tags.end_path:
            tokens += (tags.end_path,)
        body = Load((piece.sample, piece.block, piece.path), 0, line.end, known - line.end)
        save = Save((piece.sample, piece.block, piece.path, "closing"), known)
        # the first path brings the `<Parallel>` before it along; the others share it
        shared = 0 if piece.path == 0 else self._opening(piece) - line.end

        def done(output: RequestOutput) -> None:
            line.paths[piece.path] = [
                Load(body.key, shared, 0, body.length - shared),
                Load(save.key, 0, 0, len(tokens) - known),
            ]
            then(result)

        params = self._make_params(Request(tokens, 1, piece.seed), Sampling(self._temperature))
        self._request(piece, "closing", tokens, params, (*line.loads, body), save, done)

    def _opening(self, piece: Piece) -> int:
        """The index of a path's own `<Path>` in its context."""
        return len(piece.context) - 1 - piece.context[::-1].index(self._plan.tags.path)

    def _request(
        self,
        piece: Piece,
        kind: str,
        tokens: tuple[int, ...],
        params: SamplingParams,
        loads: tuple[Load, ...],
        save: Save | None,
        done: Callable[[RequestOutput], None],
    ) -> None:
        prompt, tags = tokens[: piece.prompt_length], self._plan.tags
        if self._plan.positions == "longest":  # a stock model counts by index by itself
            announce(tokens, layout(len(prompt), tokens[len(prompt) :], tags, "unseen", "longest").positions)
        params.extra_args = {"kv_transfer_params": {"load": list(loads), "save": save}}
        # equal tokens mean equal keys, unless a prompt names the tags: then it matters where it ends
        salt = str(piece.prompt_length) if set(prompt) & set(tags.all()) else None

        def count(output: RequestOutput) -> None:
            self.requests[kind] += 1
            self.computed[kind] += len(tokens) - (output.num_cached_tokens or 0)
            done(output)

        # samples in order, rather than all of them a step further: fewer have something in the store at a time
        self._loop.submit(tokens, params, count, cache_salt=salt, priority=piece.sample)

    def finished(self, sample: int) -> None:
        """Nothing goes on from a sample any more."""
        self._store.drop(sample)
        self._lineages.pop(sample, None)


@contextmanager
def nothing_left(store: SpliceStore, step: Callable[[], object]) -> Iterator[None]:
    """However the body ends, requests that it left behind included: no segment stays, and no block is held for one."""
    try:
        yield
    finally:
        store.clear()
        while store.pending:
            step()
        forget()
        assert store.empty
