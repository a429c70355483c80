"""Advantages and losses against values worked out by hand, and the invariances that training rests on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_r1.objective import group_advantages, policy_loss, sft_loss, token_logprobs

LOW, HIGH = 0.2, 0.28


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, -1.0, -1.0], [1.2, 1.0, -1.0]])
    # row 1: mean -1/3; centred 4/3, -2/3, -2/3; unbiased variance (16/9 + 4/9 + 4/9) / 2 = 4/3, deviation 1.154701
    # row 2: mean 0.4; centred 0.8, 0.6, -1.4; variance (0.64 + 0.36 + 1.96) / 2 = 1.48, deviation 1.216553
    centred = torch.tensor([[4 / 3, -2 / 3, -2 / 3], [0.8, 0.6, -1.4]])
    torch.testing.assert_close(group_advantages(rewards, normalize_std=False), centred)
    scaled = centred / torch.tensor([[1.154701 + 1e-4], [1.216553 + 1e-4]])
    torch.testing.assert_close(group_advantages(rewards), scaled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_groups_without_contrast_have_exactly_zero_advantage(normalize_std: bool) -> None:
    # in float32 the mean of seven times -1.2 is not -1.2, so equal rewards need care; a group of one has no deviation
    for rewards in (torch.full((2, 3), 0.1), torch.tensor([[1.0], [-1.0]]), torch.full((1, 7), -1.2)):
        assert torch.equal(group_advantages(rewards, normalize_std), torch.zeros_like(rewards))


def test_each_group_is_its_own() -> None:
    rewards = torch.tensor([[1.0, -1.0], [5.0, 5.0], [0.0, 3.0]])
    together = group_advantages(rewards)
    for p in range(3):
        assert torch.equal(together[p : p + 1], group_advantages(rewards[p : p + 1]))


def test_token_logprobs_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]])  # weights 1, 2, 5 of 8
    logp, entropy = token_logprobs(logits, torch.tensor([1]))
    assert logp.item() == pytest.approx(math.log(2 / 8))
    assert entropy.item() == pytest.approx(-sum(w / 8 * math.log(w / 8) for w in (1, 2, 5)))
    # temperature 1/2 squares the weights: 1, 4, 25 of 30
    assert token_logprobs(logits, torch.tensor([1]), temperature=0.5)[0].item() == pytest.approx(math.log(4 / 30))
    # without token 2 there are 1, 2 of 3, and its own probability is 0
    logp, entropy = token_logprobs(logits, torch.tensor([1]), banned=(2,))
    assert logp.item() == pytest.approx(math.log(2 / 3))
    assert entropy.item() == pytest.approx(-(1 / 3 * math.log(1 / 3) + 2 / 3 * math.log(2 / 3)))
    assert token_logprobs(logits, torch.tensor([2]), banned=(2,))[0].item() == -math.inf


def test_token_logprobs_are_float32_and_leave_the_logits_alone() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    before = logits.clone()
    logp, entropy = token_logprobs(logits, torch.zeros(2, 3, dtype=torch.int64), 2.0, (1, 4))
    assert (logp.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert (logp.shape, entropy.shape) == ((2, 3), (2, 3))
    assert torch.equal(logits, before)


def test_a_banned_token_has_no_gradient_and_spoils_none() -> None:
    logits = torch.randn(1, 4, requires_grad=True)
    logp, entropy = token_logprobs(logits, torch.tensor([0]), banned=(3,))
    assert not entropy.requires_grad
    logp.sum().backward()
    assert logits.grad[0, 3] == 0
    assert logits.grad.isfinite().all()
    assert logits.grad[0, :3].abs().min() > 0


def test_policy_loss_by_hand() -> None:
    ratios = torch.tensor([[1.0, 1.5, 0.5], [1.0, 1.5, 0.5]])
    old = torch.full((2, 3), -1.0)
    out = policy_loss(old + ratios.log(), old, torch.tensor([1.0, -2.0]), torch.ones(2, 3, dtype=torch.bool), LOW, HIGH)
    # A = 1:  min(1, 1) = 1; min(1.5, 1.28) = 1.28, clipped; min(0.5, 0.8) = 0.5
    # A = -2: min(-2, -2) = -2; min(-3, -2.56) = -3; min(-1, -1.6) = -1.6, clipped
    # loss = -(1 + 1.28 + 0.5 - 2 - 3 - 1.6) = 3.82
    assert out.loss.item() == pytest.approx(3.82, abs=1e-5)
    assert (out.clipped_low.item(), out.clipped_high.item()) == (1, 1)


def test_policy_gradient_by_hand() -> None:
    old = torch.full((2, 3), -1.0)
    new = (old + torch.tensor([[1.0, 1.5, 0.5], [1.0, 1.5, 0.5]]).log()).requires_grad_()
    policy_loss(new, old, torch.tensor([1.0, -2.0]), torch.ones(2, 3, dtype=torch.bool), LOW, HIGH).loss.backward()
    # d(-rho A) / d logp = -rho A where the ratio is not clipped, 0 where it is. At rho = 1 both arms of the minimum are
    # equal: torch halves the gradient between them, and the clamp passes its half on.
    torch.testing.assert_close(new.grad, torch.tensor([[-1.0, 0.0, -0.5], [2.0, 3.0, 0.0]]))


def test_the_first_step_on_policy_is_plain_policy_gradient() -> None:
    logp = torch.randn(3, 4, requires_grad=True)
    advantages, mask = torch.tensor([1.0, -0.5, 2.0]), torch.rand(3, 4) > 0.3
    out = policy_loss(logp, logp.detach(), advantages, mask, LOW, HIGH)
    out.loss.backward()
    torch.testing.assert_close(logp.grad, torch.where(mask, -advantages[:, None], 0.0))
    assert (out.clipped_low.item(), out.clipped_high.item()) == (0, 0)


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
def test_masked_positions_never_count(garbage: float) -> None:
    mask = torch.tensor([[False, True, True, False]])
    logp = torch.tensor([[garbage, -1.0, -2.0, garbage]], requires_grad=True)
    out = policy_loss(logp, torch.tensor([[-3.0, -1.0, -2.0, 0.0]]), torch.tensor([1.5]), mask)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-3.0)
    assert torch.equal(logp.grad, torch.tensor([[0.0, -1.5, -1.5, 0.0]]))
    assert (out.clipped_low.item(), out.clipped_high.item()) == (0, 0)


def test_an_empty_mask_gives_a_zero_that_can_be_differentiated() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    logp = torch.randn(2, 3, requires_grad=True)
    loss = policy_loss(logp, torch.zeros(2, 3), torch.ones(2), nothing).loss
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logp.grad, torch.zeros(2, 3))

    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = sft_loss(logits, torch.zeros(2, 3, dtype=torch.int64), nothing)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(2, 3, 5))


def test_sft_loss_by_hand() -> None:
    logits = torch.log(torch.tensor([[[1.0, 1.0, 2.0], [1.0, 3.0, 4.0]], [[1.0, 8.0, 1.0], [5.0, 3.0, 2.0]]]))
    targets, mask = torch.tensor([[2, 1], [1, 0]]), torch.tensor([[True, True], [False, True]])
    # -ln 2/4 - ln 3/8 - ln 5/10
    assert sft_loss(logits, targets, mask).item() == pytest.approx(math.log(4 / 2) + math.log(8 / 3) + math.log(2))


def test_sft_loss_ignores_impossible_masked_tokens() -> None:
    logits = torch.tensor([[[0.0, 0.0], [0.0, -math.inf]]], requires_grad=True)
    loss = sft_loss(logits, torch.tensor([[0, 1]]), torch.tensor([[True, False]]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert logits.grad.isfinite().all()


class Step:
    """One optimizer step on a small linear policy: R rows of T tokens, features of width 6, 9 words."""

    def __init__(self, rows: int = 7, tokens: int = 5) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(rows, tokens, 6, generator=generator, dtype=torch.float64)
        self.weight = torch.randn(6, 9, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(9, (rows, tokens), generator=generator)
        self.mask = torch.rand(rows, tokens, generator=generator) > 0.4
        self.mask[2] = False  # an empty response
        self.advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
        noise = 0.3 * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
        self.old = (self.features @ self.weight).log_softmax(-1).gather(-1, self.targets[..., None])[..., 0] + noise

    def gradient(self, pieces: list[list[int]], supervised: bool) -> Tensor:
        weight = self.weight.clone().requires_grad_()
        trained = self.mask.sum()
        for rows in pieces:
            logits = self.features[rows] @ weight
            if supervised:
                loss = sft_loss(logits, self.targets[rows], self.mask[rows])
            else:
                logp = logits.log_softmax(-1).gather(-1, self.targets[rows].unsqueeze(-1)).squeeze(-1)
                loss = policy_loss(logp, self.old[rows], self.advantages[rows], self.mask[rows], LOW, HIGH).loss
            (loss / trained).backward()
        return weight.grad


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("count", [2, 7])
def test_splitting_a_step_leaves_its_gradient_alone(count: int, supervised: bool) -> None:
    step = Step()
    pieces = [part.tolist() for part in torch.arange(7).tensor_split(count)]
    whole = step.gradient([list(range(7))], supervised)
    assert whole.abs().max() > 0.01
    torch.testing.assert_close(step.gradient(pieces, supervised), whole, rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(7)), cut=st.integers(1, 6))
def test_the_order_of_samples_is_irrelevant(order: list[int], cut: int) -> None:
    step = Step()
    torch.testing.assert_close(
        step.gradient([order[:cut], order[cut:]], supervised=False),
        step.gradient([list(range(7))], supervised=False),
        rtol=1e-9,
        atol=1e-12,
    )


def test_means_of_unequal_pieces_would_not_do() -> None:
    """The check above can fail: averaging each piece by its own tokens, as is often done, gives another gradient."""
    step = Step()
    halves = [list(range(2)), list(range(2, 7))]
    whole = step.gradient([list(range(7))], supervised=False)
    trained = step.mask.sum()
    averaged = sum(
        step.gradient([part], supervised=False) * (trained / step.mask[part].sum()) / len(halves) for part in halves
    )
    assert (averaged - whole).abs().max() > 0.01
