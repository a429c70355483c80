"""A tiny Qwen3 and its tokenizer, built from a seed: the policy of the quickstart and of the tests.

It stands in for a pre-trained model, and a pre-trained model can look things up. A random one cannot, and on two CPU
cores it may never find out how (measured, see LOG.md). So `induction_init` starts the first two layers as what every
trained language model holds: previous-token heads, and induction heads that find the place where the current token
occurred before and copy what came next (Olsson et al. 2022, arXiv 2209.11895). The first do their work from the start;
the second are only a bias, which training completes. Everything else, the task included, is learned.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from parallel_r1.policy import PolicyInit
from parallel_r1.structure.grammar import TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


class TinyQwen3(PolicyInit):
    """A Qwen3 of about half a million parameters.

    Args:
        tokenizer: `doors` knows the words of the embedded task, `bytes` reads any text byte by byte.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layers.
        layers: decoder layers; induction_init needs two.
        heads: attention heads (and key-value heads).
        head_dim: width of a head, even.
        max_positions: longest sequence in tokens.
        induction_init: start with previous-token and induction heads.
        tied: one matrix for input and output embeddings.
    """

    def __init__(
        self,
        tokenizer: Literal["doors", "bytes"] = "doors",
        hidden_size: int = 128,
        intermediate_size: int = 384,
        layers: int = 2,
        heads: int = 4,
        head_dim: int = 32,
        max_positions: int = 512,
        induction_init: bool = True,
        tied: bool = True,
    ) -> None:
        if head_dim % 2:
            raise ValueError(f"policy.init.head_dim={head_dim}: rotary positions need an even number")
        if induction_init and (layers < 2 or heads * head_dim > hidden_size):
            raise ValueError(
                f"policy.init: induction_init needs 2 or more layers and heads * head_dim <= hidden_size, got layers="
                f"{layers}, {heads} * {head_dim}, hidden_size={hidden_size}; enlarge them or set induction_init=false"
            )
        self.tokenizer = tokenizer
        self.hidden_size, self.intermediate_size, self.layers = hidden_size, intermediate_size, layers
        self.heads, self.head_dim, self.max_positions = heads, head_dim, max_positions
        self.induction_init, self.tied = induction_init, tied

    def build(self, seed: int) -> tuple[nn.Module, PreTrainedTokenizerBase]:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        tokenizer = doors_tokenizer() if self.tokenizer == "doors" else byte_tokenizer()
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=self.tied,
            initializer_range=0.04,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(config)
            if self.induction_init:
                induction_init(model)
        return model, tokenizer


def doors_tokenizer() -> PreTrainedTokenizerBase:
    """One token a word, room, number or sign of the embedded task; its vocabulary is fixed, not trained."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from parallel_r1.data.doors import PIECE, vocabulary

    words = [PAD, EOS, UNKNOWN, *TAGS, *vocabulary()]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE.pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, so that any text can be read; tags are single tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([PAD, EOS, UNKNOWN, *TAGS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer)


def _wrap(tokenizer) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN, *TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=list(TAGS),
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def induction_init(model: nn.Module, frequencies: int = 6, noise: float = 0.3, ov_scale: float = 0.2) -> None:
    """Start layers 0 and 1 of a Qwen3 as previous-token heads and induction heads, one pair a head.

    Every embedding gets a shared direction c. Layer 0, head h: query and key read only c, the key turned back by one
    position of rotary phase, so that attention peaks at the token before; its value goes through P_h and comes out
    through Q_h (random orthonormal), that is, apart from the content of the token itself. Layer 1, head h: the query
    reads P_h of the current token, the key reads Q_h, that is P_h of the token before the key: equal where the current
    token occurred just before the key, whose own content is then copied out.
    """
    config = model.config
    size, dim = config.hidden_size, config.head_dim
    std = config.initializer_range
    shared = nn.functional.normalize(torch.randn(size), dim=0)
    table = model.get_input_embeddings().weight
    table -= torch.outer(table @ shared, shared)
    table += std * math.sqrt(size) * shared
    apart = torch.eye(size) - torch.outer(shared, shared)

    def subspace() -> Tensor:  # [dim, size], orthonormal rows without the shared direction
        return torch.linalg.qr(apart @ torch.randn(size, dim))[0].T

    first, second = (layer.self_attn for layer in model.model.layers[:2])
    for attention in (first, second):
        attention.q_norm.weight.fill_(1.5)  # RMS norms bound the logits: a gain makes attention sharp from the start
        attention.k_norm.weight.fill_(1.5)
    second.o_proj.weight.copy_(second.v_proj.weight.T)
    frequencies = min(frequencies, dim // 2)
    phase = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)  # rotary angle of one position
    for head in range(config.num_attention_heads):
        rows = slice(head * dim, (head + 1) * dim)
        x, y = torch.zeros(dim // 2), torch.zeros(dim // 2)
        angle = 2 * math.pi * torch.rand(frequencies)
        x[:frequencies], y[:frequencies] = angle.cos(), angle.sin()
        query = torch.cat([x, y])
        key = torch.cat([x * phase.cos() - y * phase.sin(), y * phase.cos() + x * phase.sin()])
        first.q_proj.weight[rows] = torch.outer(query, shared) + noise * std * torch.randn(dim, size)
        first.k_proj.weight[rows] = torch.outer(key, shared) + noise * std * torch.randn(dim, size)
        read, write = subspace(), subspace()
        first.v_proj.weight[rows] = ov_scale * read
        first.o_proj.weight[:, rows] = ov_scale * write.T
        content = std * math.sqrt(size / dim)
        second.q_proj.weight[rows] = content * read
        second.k_proj.weight[rows] = content * write
