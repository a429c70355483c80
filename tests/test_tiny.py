"""The tiny Qwen3: the same bits for a seed, tokenizers that lose nothing, heads that attend as they are said to."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_r1.data.doors import PIECE, Tier, make_maze, make_problems, vocabulary
from parallel_r1.structure.grammar import TAGS, render_block
from parallel_r1.structure.tokens import TagIds
from parallel_r1.tiny import EOS, PAD, UNKNOWN, TinyQwen3, byte_tokenizer, doors_tokenizer

SPECIAL = (PAD, EOS, UNKNOWN, *TAGS)
DOORS, BYTES = doors_tokenizer(), byte_tokenizer()


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("induction", [True, False])
def test_the_seed_alone_decides_the_weights(induction: bool) -> None:
    init = TinyQwen3(induction_init=induction)
    first, _ = init.build(3)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second, _ = init.build(3)
    assert torch.equal(torch.get_rng_state(), state)  # nor does it disturb the caller's random numbers
    other, _ = init.build(4)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_small_and_shaped_as_asked(tied: bool) -> None:
    model, tokenizer = TinyQwen3(tied=tied, layers=3, intermediate_size=64).build(0)
    assert model.config.num_hidden_layers == 3
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    standard, _ = TinyQwen3().build(0)
    assert 3e5 < sum(p.numel() for p in standard.parameters()) < 6e5


@pytest.mark.parametrize("shape", [{"head_dim": 8}, {"head_dim": 4, "heads": 2, "hidden_size": 8}])
def test_narrow_heads_can_be_initialised_too(shape: dict[str, int]) -> None:
    model, _ = TinyQwen3(**shape).build(0)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 31}, "head_dim=31: rotary positions need an even number"),
        ({"layers": 1}, "needs 2 or more layers"),
        ({"heads": 8}, r"got layers=2, 8 \* 32, hidden_size=128; enlarge them or set induction_init=false"),
    ],
)
def test_impossible_shapes_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyQwen3(**arguments)
    if "head_dim" not in arguments:
        TinyQwen3(**arguments, induction_init=False).build(0)


# --------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("tokenizer", [DOORS, BYTES], ids=["doors", "bytes"])
def test_tags_are_single_tokens_that_decoding_keeps(tokenizer) -> None:
    tags = TagIds.from_tokenizer(tokenizer)
    assert len(set(tags.all())) == 6
    text = render_block([" key", " shut"], " found")
    ids = encode(tokenizer, text)
    assert [i for i in ids if i in tags.all()] == [
        tags.parallel,
        *(tags.path, tags.end_path) * 2,
        tags.end_parallel,
        tags.summary,
        tags.end_summary,
    ]
    assert decode(tokenizer, ids) == text


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40).filter(lambda text: not any(special in text for special in SPECIAL)))
def test_bytes_read_any_text(text: str) -> None:
    ids = encode(BYTES, text)
    assert decode(BYTES, ids) == text
    assert len(ids) == len(text.encode())
    assert BYTES.unk_token_id not in ids


@settings(deadline=None)
@given(pieces=st.lists(st.sampled_from([*TAGS, "x", " ", "é", "\n"]), max_size=12))
def test_bytes_and_tags_mix(pieces: list[str]) -> None:
    ids = encode(BYTES, "".join(pieces))
    assert decode(BYTES, ids) == "".join(pieces)
    assert [i for i in ids if i in TagIds.from_tokenizer(BYTES).all()] == encode(
        BYTES, "".join(p for p in pieces if p in TAGS)
    )


@pytest.mark.parametrize(("tier", "doors"), [("easy", 2), ("easy", 3), ("hard", 2), ("hard", 3), ("harder", 2)])
def test_the_words_of_the_embedded_task_are_all_known(tier: Tier, doors: int) -> None:
    for problem in make_problems(tier, "train", 150, doors, (0.4, 0.3, 0.3)):
        for text in (problem.question, problem.demonstration, f"Final Answer: {problem.answer}"):
            ids = encode(DOORS, text)
            assert DOORS.unk_token_id not in ids
            assert decode(DOORS, ids) == text


def test_an_unknown_word_is_one_token_that_says_so() -> None:
    assert encode(DOORS, " zebra") == [DOORS.unk_token_id]


def test_every_word_of_the_vocabulary_is_used_or_has_a_reason() -> None:
    """A word that nothing can say would only blur what is learned: the list and the generator must not drift apart."""
    seen: set[str] = set()
    rng = random.Random(0)
    for i in range(1500):
        maze = make_maze(rng, "easy", doors=2 + i % 2)
        text = maze.question(rng) + "".join(maze.demonstration(s, rng) for s in ("parallel", "sequential", "late"))
        seen |= set(PIECE.findall(text))
    # a line break separates a prompt from its instruction; 0 can only be said in error
    assert set(vocabulary()) - seen <= {"\n", " 0"}


# --------------------------------------------------------------------------- induction


def repeated(rows: int = 16, half: int = 24) -> Tensor:
    """Random words without repetition, twice over: what follows a word in the second half is known from the first."""
    generator = torch.Generator().manual_seed(1)
    words = torch.stack([torch.randperm(100, generator=generator)[:half] + 9 for _ in range(rows)])
    return torch.cat([words, words], dim=1)


def attention(model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean attention in the second half, [heads] each: layer 0 to the token before, layer 1 to what came next."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        first, second = model(ids, output_attentions=True).attentions[:2]
    half = ids.shape[1] // 2
    at = torch.arange(half, 2 * half - 1)
    return first[:, :, at, at - 1].mean(dim=(0, 2)), second[:, :, at, at - half + 1].mean(dim=(0, 2))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_untrained_heads_look_one_back_and_for_what_came_next(seed: int) -> None:
    ids = repeated()
    previous, following = attention(TinyQwen3().build(seed)[0], ids)
    random_previous, random_following = attention(TinyQwen3(induction_init=False).build(seed)[0], ids)
    assert previous.min() > 0.5  # every head
    assert random_previous.max() < 0.1
    assert following.mean() > 1.2 * random_following.mean()


def test_induction_heads_are_independent_of_where_a_word_stands() -> None:
    """Heads find words by content: shifting everything by ten tokens changes little."""
    model, ids = TinyQwen3().build(0)[0], repeated()
    shifted = torch.cat([torch.full((len(ids), 10), 9), ids], dim=1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        there = model(ids, output_attentions=True).attentions[0]
        later = model(shifted, output_attentions=True).attentions[0]
    at = torch.arange(30, 40)
    torch.testing.assert_close(later[:, :, at + 10, at + 9], there[:, :, at, at - 1], rtol=0, atol=0.05)
