"""Environment of all tests, and the tiny models that they share."""

from __future__ import annotations

import os

# Before torch is imported, whose threads otherwise spin while they wait: on busy cores that is several times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parallel_r1.structure.grammar import TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """110 words, one id each: <pad> 0, <eos> 1, the six tags 2..7, digits, made-up words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, EOS, *TAGS, *map(str, range(10)), *(f"w{i}" for i in range(92))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, additional_special_tokens=list(TAGS)
    )


def tiny_model(kind: str = "qwen3", *, tied: bool = True, seed: int = 0, vocab_size: int = 110) -> PreTrainedModel:
    """A random 2-layer causal LM of width 128, float32, sharp enough that its log-probabilities vary."""
    import torch
    import transformers

    config_class, model_class = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[kind]
    shape = {} if kind == "qwen2" else {"head_dim": 32}
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).float().eval()


def write_tiny_model(folder: Path, kind: str = "qwen3", *, tied: bool = True, seed: int = 0) -> Path:
    """Save a tiny model and its tokenizer as a Hugging Face folder."""
    tiny_model(kind, tied=tied, seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 with its tokenizer, float32, tied embeddings."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture(scope="session")
def untied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an output embedding of its own."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3-untied", tied=False)


@pytest.fixture(scope="session", params=["llama", "qwen2"])
def other_model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of other architectures."""
    return write_tiny_model(
        tmp_path_factory.mktemp("tiny") / request.param, request.param, tied=request.param == "qwen2"
    )
