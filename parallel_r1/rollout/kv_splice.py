"""Keys and values of finished paths, carried into the requests that go on after them: a vLLM connector in one process.

A summary must see every path of its block, and no path may have seen another. vLLM computes a prompt as plain causal
text, so what paths left behind cannot be computed again from tokens: it is kept. A request says in its
`kv_transfer_params` which stretch of its own keys and values to keep when it finishes (`save`), and what the beginning
of its prompt is made of (`load`). Keys are stored as rotated, so every path brings its own positions along.

vLLM's scheduler and its worker each have a connector of their own; both hold the `SpliceStore` of their engine. Imports
vLLM: import it late.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request

Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Save:
    """Keep the keys and values of tokens [start, end of what was computed), under a key that starts with its sample.

    only_after: keep them only where the last sampled token is this one; None keeps them always.
    """

    key: Key
    start: int
    only_after: int | None = None


@dataclass(frozen=True)
class Load:
    """Tokens [start, start + length) of a prompt are those from `offset` on of the segment `key`."""

    key: Key
    offset: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Copy:
    """Tokens [low, high) of a request, whose blocks are known, to or from a segment, at `offset` there."""

    request: str
    key: Key
    blocks: Sequence[int]
    low: int
    high: int
    offset: int = 0


@dataclass
class SpliceStore:
    """What one engine keeps. segments: [layers, 2 (keys, values), tokens, heads, head size] by key.

    known: segments that are here by the time they are loaded. pending: saves that no step has carried out yet.
    saved, loaded: tokens so far.
    """

    segments: dict[Key, Tensor] = field(default_factory=dict)
    known: set[Key] = field(default_factory=set)
    pending: list[Copy] = field(default_factory=list)
    saved: int = 0
    loaded: int = 0

    @property
    def empty(self) -> bool:
        return not (self.segments or self.known or self.pending)

    def drop(self, sample: Hashable) -> None:
        """Forget everything of a sample. What is pending is still carried out, since it holds blocks, but not kept."""
        self.known = {key for key in self.known if key[0] != sample}
        self.segments = {key: kv for key, kv in self.segments.items() if key[0] != sample}

    def clear(self) -> None:
        """Forget everything of all samples."""
        self.known.clear()
        self.segments.clear()


STORES: WeakValueDictionary[str, SpliceStore] = WeakValueDictionary()
"""By engine. vLLM makes the connectors itself, from a name, so this is how they find theirs."""


@dataclass
class SpliceMetadata(KVConnectorMetadata):
    """What a step copies: saves first, so that a load of the same step finds them."""

    saves: list[Copy] = field(default_factory=list)
    loads: list[Copy] = field(default_factory=list)


class SpliceConnector(KVConnectorBase_V1):
    """Carries out saves and loads around vLLM's forward pass. One instance plans (scheduler), one copies (worker)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store = STORES[vllm_config.kv_transfer_config.engine_id]
        self._block_size: int = vllm_config.cache_config.block_size
        self._loads: dict[str, list[Copy]] = {}
        self._cache: PagedCache | None = None
        self._done: set[str] = set()

    # ------------------------------------------------------------------ the scheduler's side

    def on_new_request(self, request: Request) -> None:
        if "load" not in (request.kv_transfer_params or {}):
            raise RuntimeError(
                "a request without lineage reached an engine for branches, which would compute it as plain causal "
                "text: go through generate_branching, or start the engine without branching"
            )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        loads: list[Load] = request.kv_transfer_params["load"]
        if not loads:
            return 0, False
        if missing := [load.key for load in loads if load.key not in self._store.known]:
            raise RuntimeError(f"request {request.request_id} goes on from segments that are gone: {missing}")
        return max(0, loads[-1].end - num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens <= 0:
            return
        loads: list[Load] = request.kv_transfer_params["load"]
        first, block_ids = loads[-1].end - num_external_tokens, tuple(blocks.get_block_ids()[0])
        self._loads[request.request_id] = [
            Copy(request.request_id, load.key, block_ids, low, load.end, load.offset + low - load.start)
            for load in loads
            if (low := max(load.start, first)) < load.end
        ]

    def build_connector_meta(self, scheduler_output: Any) -> SpliceMetadata:
        loads = [copy for copies in self._loads.values() for copy in copies]
        meta = SpliceMetadata(self._store.pending, loads)
        self._store.pending, self._loads = [], {}
        return meta

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        save: Save | None = (request.kv_transfer_params or {}).get("save")
        if save is None or request.status not in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        ):
            return False, None
        if save.only_after is not None and request.output_token_ids[-1] != save.only_after:
            return False, None
        # the keys of the token sampled last are never computed
        end = min(request.num_computed_tokens, request.num_tokens - 1)
        self._store.pending.append(Copy(request.request_id, save.key, tuple(block_ids), save.start, end))
        self._store.known.add(save.key)
        return True, None  # its blocks stay until the worker reports the copy

    def has_pending_block_frees(self) -> bool:
        return bool(self._store.pending)

    def has_pending_push_work(self) -> bool:
        return bool(self._store.pending)

    # ------------------------------------------------------------------ the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        layers = get_layers_from_vllm_config(self._vllm_config, Attention)
        self._cache = PagedCache([(layers[name], cache) for name, cache in kv_caches.items()], self._block_size)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, SpliceMetadata)
        store, cache = self._store, self._cache
        assert cache is not None
        kept = [copy for copy in meta.saves if copy.key in store.known]
        for copy, segment in zip(kept, cache.read(kept), strict=True):
            store.segments[copy.key] = segment
            store.saved += copy.high - copy.low
        self._done |= {copy.request for copy in meta.saves}
        cache.write(meta.loads, [store.segments[copy.key] for copy in meta.loads])
        store.loaded += sum(copy.high - copy.low for copy in meta.loads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done, self._done = self._done, set()
        return done or None, None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before the forward pass starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves are made when a request has finished."""

    def wait_for_save(self) -> None:
        """Saves are done when `start_load_kv` returns."""


class PagedCache:
    """Reads and writes tokens of vLLM's paged cache.

    layers: attention layers, each with its [blocks, heads, block size, 2 * head size].
    """

    def __init__(self, layers: Sequence[tuple[Any, Tensor]], block_size: int) -> None:
        self._layers, self._block_size = layers, block_size
        self._packing: Tensor | None = None

    def read(self, copies: Sequence[Copy]) -> list[Tensor]:
        """The tokens of each copy: [layers, 2, tokens, heads, head size], in memory of their own."""
        if not copies:
            return []
        block, inside = self._slots(copies)
        out = torch.stack([torch.stack(self._gather(cache, block, inside)) for _, cache in self._layers])
        return [part.clone() for part in out.split([copy.high - copy.low for copy in copies], dim=2)]

    def write(self, copies: Sequence[Copy], segments: Sequence[Tensor]) -> None:
        """Put the tokens of each copy into the cache, from `copy.offset` on of its segment."""
        if not copies:
            return
        block, inside = self._slots(copies)
        slots = block * self._block_size + inside
        parts = [
            segment[:, :, copy.offset : copy.offset + copy.high - copy.low]
            for copy, segment in zip(copies, segments, strict=True)
        ]
        whole = torch.cat(parts, dim=2)
        assert whole.shape[2] == len(slots), "a segment is shorter than what is loaded from it"
        for (layer, cache), (keys, values) in zip(self._layers, whole, strict=True):
            layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)

    def _slots(self, copies: Sequence[Copy]) -> tuple[Tensor, Tensor]:
        """Block and place in it of each token of all copies."""
        blocks, inside = [], []
        for copy in copies:
            at = torch.arange(copy.low, copy.high)
            blocks.append(torch.tensor(copy.blocks)[at // self._block_size])
            inside.append(at % self._block_size)
        device = self._layers[0][1].device
        return torch.cat(blocks).to(device), torch.cat(inside).to(device)

    def _gather(self, cache: Tensor, block: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens, [tokens, heads, head size] each."""
        if cache.device.type != "cpu":
            keys, values = cache[block, :, inside].chunk(2, dim=-1)
            return keys, values
        if self._packing is None:
            self._packing = packing(*self._layers[0])
        blocks, heads = cache.shape[:2]
        flat = cache.view(blocks, heads, -1)
        at, head = block[:, None, None], torch.arange(heads)[None, :, None]
        keys, values = (flat[at, head, place[inside][:, None]] for place in self._packing)
        return keys, values


def packing(layer: Any, cache: Tensor) -> Tensor:
    """Where vLLM's CPU kernels put each number of a block: [2 (keys, values), block size, head size] indices into it.

    They pack blocks to suit the instruction set, in ways that are nowhere told, so numbered values are written to a
    spare cache and looked for. Raises RuntimeError where a block is not just its numbers in another order.
    """
    _, heads, tokens, width = cache.shape
    size = width // 2
    count = 2 * tokens * size
    number = torch.arange(count).view(2, tokens, size)
    found = torch.zeros(count, dtype=torch.int64)
    digit = 1
    while digit < count:  # digits to the base 128, which every type of float holds exactly
        spare = torch.zeros((1, *cache.shape[1:]), dtype=cache.dtype)
        values = (number // digit % 128).to(cache.dtype)
        keys, values = (v[:, None].expand(tokens, heads, size).contiguous() for v in values)
        layer.impl.do_kv_cache_update(layer, keys, values, spare, torch.arange(tokens))
        found += spare[0, 0].flatten().long() * digit
        digit *= 128
    if not torch.equal(found.sort().values, torch.arange(count)):
        raise RuntimeError(
            f"this vLLM stores {cache.dtype} blocks of {tokens} tokens in a form that cannot be read back: set "
            "engine.dtype to float32, or choose TransformersEngine"
        )
    return found.argsort().view(2, tokens, size)
