"""What a run will take, worked out from numbers alone before a model is loaded: steps, tokens, memory, disk.

Sizes are those of a dense decoder with gated feed-forward layers (Qwen, Llama, Mistral); experts are counted where the
configuration names their number. Activations are a rule of thumb, and said to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_LOGITS_CHUNK_BYTES = 3 * (64 << 20)  # logits, softmax and gradient of one chunk (`scores.chunk_tokens`)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, by its `config.json`. context: longest sequence in tokens, None where it does not say."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    context: int | None
    experts: int = 1

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape | None:
        """None for a configuration that does not name its sizes in the usual way."""
        config = config.get("text_config") or config
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            experts = config.get("num_experts") or config.get("num_local_experts") or 1
            inner = config.get("moe_intermediate_size") if experts > 1 else None
            return cls(
                config["num_hidden_layers"],
                hidden,
                inner or config["intermediate_size"],
                heads,
                config.get("num_key_value_heads") or heads,
                config.get("head_dim") or hidden // heads,
                config["vocab_size"],
                bool(config.get("tie_word_embeddings", False)),
                config.get("max_position_embeddings"),
                experts,
            )
        except (KeyError, TypeError):
            return None

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each linear layer of a decoder layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, q), (self.hidden, kv), (self.hidden, kv), (q, self.hidden)]
        feed_forward = [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]
        return attention + feed_forward * self.experts

    @property
    def parameters(self) -> int:
        """All weights; biases and norms, under a thousandth of them, are left out."""
        tables = 1 if self.tied else 2
        return tables * self.vocabulary * self.hidden + self.layers * sum(i * o for i, o in self.linears)

    def adapter_parameters(self, r: int) -> int:
        """Weights of rank-r adapters on every linear layer."""
        return self.layers * sum(r * (i + o) for i, o in self.linears)

    def kv_bytes(self, dtype_bytes: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True)
class Work:
    """What one stage does. steps: of the optimizer. tokens: of responses (RL) or demonstrations (SFT), at most.

    state: `to do`, `finished`, or where it goes on.
    """

    name: str
    kind: str
    state: str
    steps: int
    iterations: int
    prompts: int
    responses: int
    tokens: int
    evaluated: int


def work(
    name: str,
    state: str,
    steps: int,
    batch_size: int,
    max_tokens: int,
    group_size: int | None = None,
    per_iteration: int = 1,
    validations: int = 0,
    val_responses: int = 0,
) -> Work:
    """The work of a stage. group_size None: supervised. per_iteration: optimizer steps an iteration.

    validations: how often; val_responses: responses each time.
    """
    iterations = -(-steps // per_iteration)
    prompts = iterations * batch_size
    responses = prompts * (group_size or 1)
    kind = "SFT" if group_size is None else "RL"
    tokens = responses * max_tokens
    return Work(name, kind, state, steps, iterations, prompts, responses, tokens, validations * val_responses)


@dataclass(frozen=True)
class Training:
    """How weights are held. shards: ranks that share them (1 under DDP). tokens: of a forward pass.

    states: tensors of the optimizer a trained weight (2 for AdamW). adapter: rank of LoRA, None without.
    """

    dtype: str = "float32"
    shards: int = 1
    states: int = 2
    adapter: int | None = None
    tokens: int = 16384
    checkpointing: bool = False
    reference: bool = False
    compute: str = "float32"


def trained_parameters(shape: Shape, training: Training) -> int:
    return shape.parameters if training.adapter is None else shape.adapter_parameters(training.adapter)


def memory(shape: Shape, training: Training, engine: int | None, engine_ranks: int, kv: int | None) -> dict[str, int]:
    """Bytes a rank by purpose. engine: bytes a weight in the engine; kv: of its cache, None for what is left.

    Activations are a rule of thumb for one forward pass with its backward pass: about 14 values of the hidden and 4 of
    the feed-forward size a token and layer, one layer's worth and the layers' inputs with gradient checkpointing.
    """
    size, trained = DTYPE_BYTES[training.dtype], trained_parameters(shape, training)
    low = DTYPE_BYTES[training.compute]
    a_layer = (14 * shape.hidden + 4 * shape.intermediate) * low
    each = shape.hidden * low if training.checkpointing else a_layer
    activations = training.tokens * (each * shape.layers + (a_layer if training.checkpointing else 0))
    whole = shape.parameters + (trained if training.adapter is not None else 0)
    parts = {
        "weights": whole * size // training.shards,
        "gradients": trained * size // training.shards,
        "optimizer": training.states * trained * size // training.shards,
        "activations (about)": activations + _LOGITS_CHUNK_BYTES,
    }
    if training.reference:
        parts["reference policy"] = shape.parameters * size // training.shards
    if engine is not None:
        parts["engine weights"] = shape.parameters * engine // engine_ranks
    if kv is not None:
        parts["engine KV cache"] = kv
    return parts


def checkpoint_bytes(shape: Shape, training: Training) -> int:
    """One checkpoint of all ranks together: what is trained, and its optimizer."""
    return (1 + training.states) * trained_parameters(shape, training) * DTYPE_BYTES[training.dtype]


def disk(shape: Shape, training: Training, exports: int, base: bool) -> dict[str, int]:
    """Bytes a run still writes: `exports` models of finished stages, the base policy, checkpoints at their most.

    Two checkpoints are kept, and a third is whole before the oldest goes.
    """
    model = shape.parameters * DTYPE_BYTES[training.dtype]
    parts = {"models of stages": exports * model}
    if exports:
        parts["checkpoints"] = 3 * checkpoint_bytes(shape, training)
    if base:
        parts["base policy"] = model
    return parts


# --------------------------------------------------------------------------- what cannot work


def check_lengths(
    prefix: str, max_tokens: int, context: int | None, engine_context: int | None, max_length: int | None
) -> None:
    """Raise ValueError where a response, or a demonstration, cannot fit the model or the engine."""
    for name, limit in (("the model's context", context), ("engine.init_args.max_model_len", engine_context)):
        if limit is not None and max_tokens >= limit:
            raise ValueError(
                f"{prefix}generation.max_tokens={max_tokens} leaves no token of {name}={limit} for the prompt: "
                f"prompt and response together may have {limit}; lower max_tokens"
            )
    if max_length is not None and context is not None and max_length > context:
        raise ValueError(f"{prefix}max_length={max_length} is above the model's context={context}: lower max_length")
    if engine_context is not None and context is not None and engine_context > context:
        raise ValueError(f"engine.init_args.max_model_len={engine_context} is above the model's context={context}")


def check_batches(prefix: str, batch_size: int, mini_batches: int, per_iteration: int, steps: int) -> None:
    """Raise ValueError where an iteration cannot be cut into its optimizer steps."""
    if batch_size % mini_batches:
        raise ValueError(
            f"{prefix}mini_batches={mini_batches} does not divide batch_size={batch_size}: its steps would see unequal "
            "numbers of problems; change one of the two"
        )
    if steps % per_iteration:
        raise ValueError(
            f"{prefix}max_steps={steps} is no multiple of the {per_iteration} optimizer steps of an iteration "
            f"(mini_batches * ppo_epochs): give {-(-steps // per_iteration) * per_iteration}"
        )


# --------------------------------------------------------------------------- the page


@dataclass(frozen=True)
class Plan:
    """A run as it will go. memory: bytes a rank; disk: bytes still to be written; free: bytes where the run lies."""

    stages: Sequence[Work]
    ranks: int
    parameters: int | None
    memory: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    free: int = 0
    folder: str = ""

    def check(self) -> None:
        """Raise ValueError where the disk does not hold what the run writes."""
        needed = sum(self.disk.values())
        if needed > self.free:
            parts = ", ".join(f"{name} {_size(value)}" for name, value in self.disk.items())
            raise ValueError(
                f"{self.folder}: the run needs {_size(needed)} there ({parts}), {_size(self.free)} are free: free "
                "space, or set --curriculum.root to a folder on a larger disk"
            )

    def text(self) -> str:
        head = ("stage", "state", "steps", "prompts", "responses", "tokens <=", "evaluated")
        rows = [
            (
                f"{w.name} ({w.kind})",
                w.state,
                str(w.steps),
                *(f"{n:,}" for n in (w.prompts, w.responses, w.tokens, w.evaluated)),
            )
            for w in self.stages
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in [head, *rows]
        ]
        lines.append("")
        model = f"{self.parameters:,} weights" if self.parameters else "sizes unknown"
        lines.append(f"model: {model}; {self.ranks} rank(s)")
        if self.memory:
            lines.append(f"memory a rank, about {_size(sum(self.memory.values()))}: {_parts(self.memory)}")
        if self.disk:
            lines.append(f"disk: {_size(sum(self.disk.values()))} of {_size(self.free)} free: {_parts(self.disk)}")
        return "\n".join(lines)


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {_size(value)}" for name, value in parts.items())


def _size(count: int) -> str:
    """Bytes in units of 1000."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1000:.3g} kB"
