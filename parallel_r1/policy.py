"""The policy: a Hugging Face causal LM with its tokenizer, always loaded from and saved to a plain model folder.

    PolicySource (configuration) --prepare--> folder with the six tags --load_policy--> Policy --export_policy--> folder

`prepare` runs once a run; every stage then starts from a folder and ends with one.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from parallel_r1 import attention
from parallel_r1.data.prompts import PROMPT_FILE, Prompt, attach_prompt, attached_prompt, read_prompt
from parallel_r1.files import PARTIAL, publish
from parallel_r1.lora import Lora, add_adapters, merged, recorded, save_adapter
from parallel_r1.objective import token_logprobs
from parallel_r1.rollout.weights import full_weights
from parallel_r1.scores import TokenScores, attach_scores, linear_head, linear_scores
from parallel_r1.sharding import ShardedLoad, can_fill, fill, parameters_on_meta, shard
from parallel_r1.structure.grammar import TAGS
from parallel_r1.structure.tokens import TagIds
from parallel_r1.structure.tree import dense_mask, mask_mod
from parallel_r1.types import Pack, PolicyBatch
from parallel_r1.vocabulary import Vocabulary, eos_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16", "float16"]


class PolicyInit(ABC):
    """Makes a model and a tokenizer from nothing: the stand-in for a pre-trained model."""

    @abstractmethod
    def build(self, seed: int) -> tuple[nn.Module, PreTrainedTokenizerBase]:
        """A causal LM and its tokenizer; the same seed gives the same bits."""


@dataclass
class PolicySource:
    """Where the policy of the first stage comes from: exactly one of `name` and `init`.

    Args:
        name: a model on the Hugging Face hub, or a local model folder.
        init: builds a small model from nothing.
        dtype: of the weights in training.
        attn_implementation: attention of transformers in training. `sdpa` suits every device; `flex_attention` needs a
            GPU; `flash_attention_2` computes each response by itself, and no isolated paths.
        lora: train adapters of low rank instead of all weights; null trains all.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        cpu_offload: keep the shards of weights, gradients and optimizer in CPU memory between passes (FSDP2 only).
        trust_remote_code: run code that comes with the model; off unless you trust its author.
    """

    name: str | None = None
    init: PolicyInit | None = None
    dtype: Dtype = "float32"
    attn_implementation: Literal["sdpa", "eager", "flex_attention", "flash_attention_2"] = "sdpa"
    lora: Lora | None = None
    gradient_checkpointing: bool = False
    cpu_offload: bool = False
    trust_remote_code: bool = False

    def check(self) -> None:
        """Raise ValueError for a source that can never load. Loads nothing."""
        if (self.name is None) == (self.init is None):
            init = type(self.init).__name__ if self.init else None
            raise ValueError(
                "policy: give exactly one of `policy.name` (a hub id or a model folder) and `policy.init` (a class "
                f"that builds a tiny model); got name={self.name!r}, init={init}"
            )
        if self.lora is not None:
            self.lora.check()
        if self.name and (self.name.startswith((".", "/", "~")) or Path(self.name).is_dir()):
            folder = Path(self.name).expanduser()
            if not (folder / "config.json").is_file():
                raise ValueError(f"policy.name={self.name!r}: no config.json there; give a Hugging Face model folder")

    def prepare(self, folder: Path, seed: int) -> Path:
        """Write the start policy, tags added, to `folder` unless it is there already. Returns the folder.

        Raises ValueError if the model or its tokenizer cannot be loaded.
        """
        self.check()
        if is_model_folder(folder):
            return folder
        model, tokenizer, prompt = self.load(seed)
        add_tags(model, tokenizer)
        save_folder(model, tokenizer, dict(model.state_dict()), folder, prompt)
        return folder

    def load(self, seed: int) -> tuple[nn.Module, PreTrainedTokenizerBase, Prompt | None]:
        """The model and the tokenizer as they are, without tags added, and the prompt that they bring along.

        Raises ValueError if the model or its tokenizer cannot be loaded.
        """
        self.check()
        if self.init is not None:
            model, tokenizer = self.init.build(seed)
            return model.to(getattr(torch, self.dtype)), tokenizer, None
        local = Path(self.name).expanduser()
        return self._load(str(local) if local.exists() else self.name)

    def _load(self, name: str) -> tuple[nn.Module, PreTrainedTokenizerBase, Prompt | None]:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import cached_file

        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=self.trust_remote_code)
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=getattr(torch, self.dtype), trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"policy.name={self.name!r} could not be loaded: {error}") from error
        file = cached_file(
            name,
            PROMPT_FILE,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        return model, tokenizer, read_prompt(Path(file)) if file else None


@dataclass
class Policy:
    """A model in training with its tokenizer.

    model: a causal LM, possibly wrapped or sharded in place. folder: where it was loaded from.
    eos_ids: every id that ends a response; pad_id: fills rows, and never counts. linear_head: logits are a linear layer
    of the last hidden states (and what `scores.HeadForm` knows), so they can be computed a few tokens at a time.
    lora, adapter: how it is adapted, and the adapter's tensors when they were last streamed.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    tags: TagIds
    eos_ids: tuple[int, ...]
    pad_id: int
    folder: Path
    linear_head: bool = True
    lora: Lora | None = None
    adapter: dict[str, Tensor] = field(default_factory=dict)

    def logits(self, batch: PolicyBatch) -> Tensor:
        """[R, T, V] logits of a batch under its positions and visibility.

        Raises ValueError for a visibility that the model's attention cannot follow.
        """
        mask = None if batch.visible is None else self._attention_mask(batch.visible)
        return self.model(
            input_ids=batch.input_ids, position_ids=batch.positions, attention_mask=mask, use_cache=False
        ).logits

    @property
    def can_pack(self) -> bool:
        """Whether responses may share a row and a prompt; else each needs a forward pass of its own."""
        kind = self.model.config._attn_implementation
        return kind in (attention.KIND, "eager", "flex_attention") and attention.can_pack(self.model)

    def score(self, pack: Pack, temperature: float = 1.0, banned: tuple[int, ...] = ()) -> TokenScores:
        """Log-probability and entropy, [N] float32 each and both differentiable, of the trained tokens of a pack.

        The distribution is the one the engine sampled from: softmax(logits / temperature) without `banned` ids (and
        those that the pack bans at a token).
        Raises ValueError for packed responses that the model's attention cannot tell apart.
        """
        return self.model.token_scores(
            pack.source,
            pack.targets,
            temperature,
            banned,
            pack.banned,
            self.linear_head,
            input_ids=pack.tokens[None],
            position_ids=pack.positions[None],
            use_cache=False,
            **self._tree_attention(pack),
        )

    def _tree_attention(self, pack: Pack) -> dict[str, Any]:
        """The arguments that make the attention in use follow the rule of `structure.tree`."""
        if pack.is_plain:
            return {}
        kind = self.model.config._attn_implementation
        if kind == attention.KIND:
            # a model that does not hand `tree` on sees nothing through this mask and returns NaN: never silently causal
            blind = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=pack.tokens.device)
            return {"attention_mask": blind, "tree": attention.plan_attention(pack.spans, pack.ids)}
        if kind == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            n, device = len(pack.tokens), pack.tokens.device
            compiled = device.type == "cuda"  # else the whole [T, T] mask would be made first
            mask = create_block_mask(mask_mod(pack.ids), None, None, n, n, device=device, _compile=compiled)
            return {"attention_mask": mask}
        return {"attention_mask": self._attention_mask(dense_mask(pack.ids)[None])}

    def _attention_mask(self, visible: Tensor) -> Tensor:
        # transformers takes a 4-D mask as it is, so it must come in the form the attention in use reads
        kind = self.model.config._attn_implementation
        mask = visible[:, None]  # a head axis
        if kind.endswith("sdpa"):
            return mask
        if kind == "eager":  # adds the mask to the scores: a bool would bias them by one instead of hiding anything
            dtype = self.model.get_input_embeddings().weight.dtype
            return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        raise ValueError(f"policy.attn_implementation={kind!r} cannot isolate paths: choose sdpa or eager")

    def logprobs(self, batch: PolicyBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability of each token given what it sees, and the entropy there: [R, T] float32, 0 in column 0."""
        logits = self.logits(batch)[:, :-1]
        logp, entropy = token_logprobs(logits, batch.input_ids[:, 1:], temperature, batch.banned)
        return nn.functional.pad(logp, (1, 0)), nn.functional.pad(entropy, (1, 0))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every weight, adapters merged in. Collective over ranks.

        Under LoRA it notes the adapter's tensors on the way, for `export_policy`.
        """
        if self.lora is None:
            return full_weights(self.model)
        return merged(recorded(full_weights(self.model), self.adapter), self.lora.alpha / self.lora.r)

    @property
    def vocabulary(self) -> Vocabulary:
        """What of the policy is not weights."""
        return Vocabulary(self.tokenizer, self.tags, self.eos_ids, self.pad_id, self.folder)

    def decode(self, response_ids: Sequence[int]) -> str:
        """The text of a response: tags kept, end-of-sequence and padding left out."""
        return self.vocabulary.decode(response_ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone, for people: a character that spans tokens shows as replacement characters."""
        return self.vocabulary.pieces(ids)


def load_policy(folder: Path, source: PolicySource, spread: ShardedLoad | None = None) -> Policy:
    """Load a prepared folder for training: whole, or spread over ranks (collective, and never whole on one).

    Raises ValueError if a tag is missing from its tokenizer.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
    tags = TagIds.from_tokenizer(tokenizer)
    dtype = getattr(torch, source.dtype if spread is None else spread.dtype)
    model = _whole(folder, source, dtype) if spread is None else _without_weights(folder, source, dtype)
    filled_later = any(p.is_meta for p in model.parameters())
    if source.attn_implementation == "sdpa":
        attention.register()
        model.set_attn_implementation(attention.KIND)
    if source.lora is not None:
        add_adapters(model, source.lora)
    attach_scores(model)
    linear = None if filled_later else linear_head(model)
    if source.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spread is not None:
        shard(model, spread.mesh, spread.compute, spread.cpu_offload)
    if filled_later:
        fill(model, Path(folder), spread.device)
        linear = linear_scores(model, spread.mesh.device_type)
        model.reshard()  # FSDP2 keeps the root whole between forward and backward, and an optimizer would see that
    eos = eos_ids_of(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    return Policy(model, tokenizer, tags, eos, pad, Path(folder), linear, source.lora)


def _whole(folder: Path, source: PolicySource, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=source.attn_implementation,
        trust_remote_code=source.trust_remote_code,
    )


def _without_weights(folder: Path, source: PolicySource, dtype: torch.dtype) -> nn.Module:
    """The model of a folder, its parameters without storage; whole for adapters, which start from random numbers, and
    for architectures whose parameters have other names in files."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=source.trust_remote_code),
            dtype=dtype,
            attn_implementation=source.attn_implementation,
            trust_remote_code=source.trust_remote_code,
        )
    model.tie_weights()
    if source.lora is not None or not can_fill(model, Path(folder)):
        return _whole(folder, source, dtype)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def export_policy(policy: Policy, folder: Path, weights: dict[str, Tensor], prompt: Prompt | None = None) -> None:
    """Write weights (full tensors, Hugging Face names), config, tokenizer and prompt as a model folder, atomically.

    prompt: what the policy was trained with; None keeps that of the folder it came from, where it has one.
    Under LoRA the weights are merged ones, and the adapter goes to the folder `adapter` beside it.
    """
    save_folder(policy.model, policy.tokenizer, weights, folder, prompt or attached_prompt(policy.folder))
    if policy.lora is not None:
        save_adapter(policy.adapter, policy.lora, policy.folder, folder.with_name("adapter"))


def eos_ids_of(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All ids that end a response: those of the generation config, of the model config and of the tokenizer.

    Raises ValueError when there is none, since no response could ever finish.
    """
    return eos_ids(getattr(model, "generation_config", None), model.config, tokenizer)


def add_tags(model: nn.Module, tokenizer: PreTrainedTokenizerBase, scale: float = 0.1) -> list[str]:
    """Make each control tag one token with embeddings of its own. Returns the tags that were new.

    A new tag starts as the mean of the embeddings of its text pieces plus a small part of its own (`scale` times the
    typical norm of a row), in the input and in the output embedding, tied or not. Spare rows of a padded vocabulary are
    identical in some checkpoints, so tags whose rows equal each other are given a new start as well.
    """
    pieces = {tag: tokenizer(tag, add_special_tokens=False).input_ids for tag in TAGS}
    vocab = tokenizer.get_vocab()
    new = [tag for tag in TAGS if tag not in vocab]
    if new:
        tokenizer.add_tokens(new, special_tokens=True)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    ids = {tag: tokenizer.convert_tokens_to_ids(tag) for tag in TAGS}
    tables = [model.get_input_embeddings().weight]
    if model.get_output_embeddings() is not None and model.get_output_embeddings().weight is not tables[0]:
        tables.append(model.get_output_embeddings().weight)
    for number, table in enumerate(tables):
        same = _with_equal_rows(table, ids)
        # rows that a resize added hold random numbers, which may not decide where a tag starts
        old = table.detach()[:rows].float()
        mean, own_norm = old.mean(dim=0), scale * float(old.norm(dim=1).median())
        for tag in TAGS:
            if tag in new or tag in same or ids[tag] >= rows:
                known = [i for i in pieces[tag] if i != ids[tag]]
                start = old[known].mean(dim=0) if known else mean
                _start_row(table, ids[tag], start, own_norm, seed=1000 * number + TAGS.index(tag))
    return new


def _with_equal_rows(table: Tensor, ids: dict[str, int]) -> set[str]:
    rows = {tag: table[i].detach() for tag, i in ids.items()}
    return {a for a in rows for b in rows if a != b and torch.equal(rows[a], rows[b])}


@torch.no_grad()
def _start_row(table: Tensor, row: int, mean: Tensor, own_norm: float, seed: int) -> None:
    own = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(seed))
    table[row] = (mean + own_norm * (own / own.norm()).to(mean.device)).to(table.dtype)


def is_model_folder(folder: Path) -> bool:
    """True for a complete export (folders are renamed into place, so a partial one never looks complete)."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def save_folder(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    weights: dict[str, Tensor],
    folder: Path,
    prompt: Prompt | None = None,
) -> None:
    """Write a model folder: to a sibling first, then renamed, so that whoever reads `folder` sees all of it or none."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft, state_dict=weights, safe_serialization=True)
    tokenizer.save_pretrained(draft)
    if prompt is not None:
        attach_prompt(draft, prompt)
    publish(draft, folder)
