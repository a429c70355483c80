"""Scores in chunks against scores from whole logits: values, gradients, and the heads of several architectures."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from parallel_r1.objective import token_logprobs
from parallel_r1.scores import HeadForm, attach_scores, chunked_scores, linear_head, logit_scores

FORMS = [
    HeadForm(),
    HeadForm(temperature=0.7),
    HeadForm(banned=(0, 3)),
    HeadForm(scale=0.25, softcap=2.0, temperature=1.3, banned=(5,)),
]


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=generator) for s in ((11, 6), (9, 6), (9,)))
    targets = torch.tensor([1, 2, 4, 6, 7, 8, 1, 2, 4, 6, 7])
    return *(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), targets


def whole(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, form: HeadForm, bans: Tensor | None) -> tuple:
    z = (hidden @ weight.T + bias) * form.scale
    if form.softcap is not None:
        z = form.softcap * torch.tanh(z / form.softcap)
    return logit_scores(z, targets, form.temperature, form.banned, bans)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("banned", [False, True])
def test_chunks_equal_the_whole(form: HeadForm, chunk: int, banned: bool) -> None:
    hidden, weight, bias, targets = case(torch.float64)
    bans = torch.full((11, 2), -1)
    bans[2], bans[5, 0] = torch.tensor([0, 1]), 2
    bans = bans if banned else None
    ours = chunked_scores(hidden, weight, bias, targets, form, bans, chunk)
    theirs = whole(hidden, weight, bias, targets, form, bans)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs)
    torch.testing.assert_close(ours.entropy, theirs.entropy)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(11, generator=generator, dtype=torch.float64) for _ in range(2))
    for weights in ((a, b), (a, None), (None, b)):
        loss = [sum((x * w).sum() for x, w in zip(s, weights, strict=True) if w is not None) for s in (ours, theirs)]
        mine, other = (torch.autograd.grad(x, (hidden, weight, bias), retain_graph=True) for x in loss)
        for x, y in zip(mine, other, strict=True):
            torch.testing.assert_close(x, y)


def test_the_oracle_of_the_padded_form_agrees() -> None:
    hidden, weight, _, targets = case()
    form = HeadForm(temperature=0.7, banned=(0, 3))
    logp, entropy = token_logprobs(hidden @ weight.T, targets, 0.7, (0, 3))
    ours = chunked_scores(hidden, weight, None, targets, form, chunk=3)
    torch.testing.assert_close(ours.logprobs, logp)
    torch.testing.assert_close(ours.entropy, entropy)


def test_no_tokens_give_a_gradient_of_zero() -> None:
    hidden, weight, bias, _ = case()
    ours = chunked_scores(hidden[:0], weight, bias, torch.zeros(0, dtype=torch.int64), HeadForm())
    ours.logprobs.sum().backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in (hidden, weight, bias))


def test_a_frozen_head_costs_no_gradient() -> None:
    hidden, weight, _, targets = case()
    chunked_scores(hidden, weight.detach(), None, targets, HeadForm()).logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_scores_are_float32_under_bfloat16() -> None:
    hidden, weight, _, targets = case(torch.bfloat16)
    ours = chunked_scores(hidden, weight, None, targets, HeadForm(), chunk=4)
    assert (ours.logprobs.dtype, ours.entropy.dtype) == (torch.float32, torch.float32)
    ours.logprobs.sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    hidden, weight, _, targets = case()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = chunked_scores(hidden, weight, None, targets, HeadForm(), chunk=4)
    mixed.logprobs.sum().backward()
    torch.testing.assert_close(mixed.logprobs, ours.logprobs, rtol=0.02, atol=0.02)
    assert weight.grad.dtype == torch.float32


def build(kind: str) -> torch.nn.Module:
    small = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": 0,
        "initializer_range": 0.5,
    }
    more = {
        "granite": {"logits_scaling": 8.0},
        "gemma2": {"final_logit_softcapping": 3.0},
        "cohere": {"logit_scale": 0.3},
    }
    name = {"granite": "Granite", "gemma2": "Gemma2", "cohere": "Cohere", "llama": "Llama", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{name}Config")(**small, **more.get(kind, {}))
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).float().eval()


@pytest.mark.parametrize("kind", ["qwen3", "llama", "granite", "gemma2", "cohere"])
def test_heads_that_scale_or_cap_are_known(kind: str) -> None:
    model = build(kind)
    assert linear_head(model)
    attach_scores(model)
    ids, source = torch.tensor([[5, 6, 7, 8]]), torch.tensor([0, 2])
    scores = model.token_scores(source, torch.tensor([9, 10]), 0.8, (1,), None, True, input_ids=ids, use_cache=False)
    expected = token_logprobs(model(ids).logits[0, source], torch.tensor([9, 10]), 0.8, (1,))
    torch.testing.assert_close(scores.logprobs, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores.entropy, expected[1], rtol=1e-4, atol=1e-4)


def test_a_head_of_another_kind_falls_back_to_its_own_logits() -> None:
    model = build("llama")
    plain = type(model).forward

    def doubled(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.logits = 2 * out.logits
        return out

    model.forward = doubled.__get__(model)
    assert not linear_head(model)
    attach_scores(model)
    ids, source = torch.tensor([[5, 6, 7, 8]]), torch.tensor([0, 2])
    scores = model.token_scores(source, torch.tensor([9, 10]), 1.0, (), None, False, input_ids=ids, use_cache=False)
    expected, _ = token_logprobs(model(ids).logits[0, source], torch.tensor([9, 10]))
    torch.testing.assert_close(scores.logprobs, expected)
