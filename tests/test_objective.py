"""Advantages and losses against values worked out by hand, and the invariances that training rests on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_r1.methods import Objective
from parallel_r1.objective import (
    Surrogate,
    advantages,
    denominator,
    kl_estimate,
    log_ratios,
    mismatch_correction,
    policy_loss,
    surrogate,
    token_logprobs,
    token_weights,
)

LOW, HIGH = 0.2, 0.28


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, -1.0, -1.0], [1.2, 1.0, -1.0]])
    # row 1: mean -1/3; centred 4/3, -2/3, -2/3; unbiased variance (16/9 + 4/9 + 4/9) / 2 = 4/3, deviation 1.154701
    # row 2: mean 0.4; centred 0.8, 0.6, -1.4; variance (0.64 + 0.36 + 1.96) / 2 = 1.48, deviation 1.216553
    centred = torch.tensor([[4 / 3, -2 / 3, -2 / 3], [0.8, 0.6, -1.4]])
    torch.testing.assert_close(advantages(rewards, std="none"), centred)
    scaled = centred / torch.tensor([[1.154701 + 1e-4], [1.216553 + 1e-4]])
    torch.testing.assert_close(advantages(rewards), scaled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_groups_without_contrast_have_exactly_zero_advantage(normalize_std: bool) -> None:
    # in float32 the mean of seven times -1.2 is not -1.2, so equal rewards need care; a group of one has no deviation
    for rewards in (torch.full((2, 3), 0.1), torch.tensor([[1.0], [-1.0]]), torch.full((1, 7), -1.2)):
        assert torch.equal(advantages(rewards, std="group" if normalize_std else "none"), torch.zeros_like(rewards))


def test_each_group_is_its_own() -> None:
    rewards = torch.tensor([[1.0, -1.0], [5.0, 5.0], [0.0, 3.0]])
    together = advantages(rewards)
    for p in range(3):
        assert torch.equal(together[p : p + 1], advantages(rewards[p : p + 1]))


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

    def gradient(self, pieces: list[list[int]]) -> Tensor:
        weight = self.weight.clone().requires_grad_()
        trained = self.mask.sum()
        for rows in pieces:
            logits = self.features[rows] @ weight
            logp = logits.log_softmax(-1).gather(-1, self.targets[rows].unsqueeze(-1)).squeeze(-1)
            loss = policy_loss(logp, self.old[rows], self.advantages[rows], self.mask[rows], LOW, HIGH).loss
            (loss / trained).backward()
        return weight.grad


@pytest.mark.parametrize("count", [2, 7])
def test_splitting_a_step_leaves_its_gradient_alone(count: int) -> None:
    step = Step()
    pieces = [part.tolist() for part in torch.arange(7).tensor_split(count)]
    whole = step.gradient([list(range(7))])
    assert whole.abs().max() > 0.01
    torch.testing.assert_close(step.gradient(pieces), whole, rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(7)), cut=st.integers(1, 6))
def test_the_order_of_samples_is_irrelevant(order: list[int], cut: int) -> None:
    step = Step()
    torch.testing.assert_close(
        step.gradient([order[:cut], order[cut:]]),
        step.gradient([list(range(7))]),
        rtol=1e-9,
        atol=1e-12,
    )


def test_means_of_unequal_pieces_would_not_do() -> None:
    """The check above can fail: averaging each piece by its own tokens, as is often done, gives another gradient."""
    step = Step()
    halves = [list(range(2)), list(range(2, 7))]
    whole = step.gradient([list(range(7))])
    trained = step.mask.sum()
    averaged = sum(step.gradient([part]) * (trained / step.mask[part].sum()) / len(halves) for part in halves)
    assert (averaged - whole).abs().max() > 0.01


# --------------------------------------------------------------------------- the whole family, on 2 x 3 examples

REWARDS = torch.tensor([[1.0, -1.0, -1.0], [1.2, 1.0, -1.0]])
CENTRED = torch.tensor([[4 / 3, -2 / 3, -2 / 3], [0.8, 0.6, -1.4]])


def test_rloo_by_hand() -> None:
    # each reward minus the mean of the other two: 1 - (-1), -1 - 0, -1 - 0; 1.2 - 0, 1 - 0.1, -1 - 1.1
    expected = torch.tensor([[2.0, -1.0, -1.0], [1.2, 0.9, -2.1]])
    torch.testing.assert_close(advantages(REWARDS, "rloo", "none"), expected)


def test_reinforce_pp_by_hand() -> None:
    # centred values sum to 0; squares 16/9 + 4/9 + 4/9 + 0.64 + 0.36 + 1.96 = 5.626667; / 5 = 1.125333, root 1.060817
    torch.testing.assert_close(advantages(REWARDS, "reinforce_pp", "batch"), CENTRED / (1.060817 + 1e-4))


def test_batch_deviation_by_hand() -> None:
    # rewards 1, -1, -1, 1.2, 1, -1: mean 0.2/6, squares 6.44 - 6 * (0.2/6)^2 = 6.433333; / 5 = 1.286667, root 1.134313
    torch.testing.assert_close(advantages(REWARDS, "grpo", "batch"), CENTRED / (1.134313 + 1e-4))


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_pp"])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_no_contrast_no_advantage_whatever_the_method(kind: str, std: str) -> None:
    for rewards in (torch.full((2, 3), 0.1), torch.tensor([[1.0], [-1.0]]), torch.full((1, 7), -1.2)):
        assert torch.equal(advantages(rewards, kind, std), torch.zeros_like(rewards))
    mixed = torch.cat([REWARDS, torch.full((1, 3), -1.2)])
    assert torch.equal(advantages(mixed, kind, std)[2], torch.zeros(3))


# two responses of three tokens; ratios as in the tests above
RATIO = torch.tensor([1.0, 1.5, 0.5, 1.0, 1.5, 0.5])
ADVANTAGE = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, -2.0])
RESPONSE = torch.tensor([0, 0, 0, 1, 1, 1])
OLD = torch.full((6,), -1.0)


def loss_of(**settings_: object) -> tuple[Surrogate, Tensor]:
    new = (OLD + RATIO.log()).requires_grad_()
    objective = Objective(**settings_).settled(16)
    log_ratio = log_ratios(new, OLD, RESPONSE, 2, sequence=objective.loss == "gspo")
    out = surrogate(log_ratio, new, ADVANTAGE, objective)
    out.value.sum().backward()
    return out, new.grad


@pytest.mark.parametrize("loss", ["ppo", "dapo", "dr_grpo"])
def test_clipped_losses_by_hand(loss: str) -> None:
    cap = 1.28 if loss == "dapo" else 1.2
    out, _ = loss_of(loss=loss)
    torch.testing.assert_close(out.value, torch.tensor([-1.0, -cap, -0.5, 2.0, 3.0, 1.6]))
    assert out.low.tolist() == [False] * 5 + [True]
    assert out.high.tolist() == [False, True, False, False, False, False]


def test_dual_clip_by_hand() -> None:
    # A = -2: gains -2, -3, -1.6 may not fall below 1.25 * -2
    out, grad = loss_of(dual_clip=1.25)
    torch.testing.assert_close(out.value, torch.tensor([-1.0, -1.2, -0.5, 2.0, 2.5, 1.6]))
    assert grad[4] == 0


def test_gspo_by_hand() -> None:
    # both responses: mean log ratio (0 + ln 1.5 + ln 0.5) / 3 = ln(0.75) / 3, ratio 0.75^(1/3) = 0.908560
    s = 0.75 ** (1 / 3)
    out, grad = loss_of(loss="gspo", clip_low=0.05, clip_high=0.05)
    # A = 1: min(s, 0.95) = s; A = -2: min(-2 s, -1.9) = -1.9, clipped
    torch.testing.assert_close(out.value, torch.tensor([-s] * 3 + [1.9] * 3))
    # each of three tokens carries -s, whose gradient by one log p is s / 3
    torch.testing.assert_close(grad, torch.tensor([-s] * 3 + [0.0] * 3))
    assert out.low.tolist() == [False] * 3 + [True] * 3


def test_cispo_by_hand() -> None:
    out, grad = loss_of(loss="cispo", clip_high=0.28)
    # -min(rho, 1.28) A log p, and the gradient leaves the weight alone
    weight = torch.tensor([1.0, 1.28, 0.5, 1.0, 1.28, 0.5])
    torch.testing.assert_close(out.value, -weight * ADVANTAGE * (OLD + RATIO.log()))
    torch.testing.assert_close(grad, -weight * ADVANTAGE)
    assert out.high.tolist() == [False, True, False, False, True, False]


def test_kl_estimators_by_hand() -> None:
    new, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])  # d = 0.5, -1
    torch.testing.assert_close(kl_estimate(new, reference, "k1"), torch.tensor([0.5, -1.0]))
    torch.testing.assert_close(kl_estimate(new, reference, "k2"), torch.tensor([0.125, 0.5]))
    k3 = torch.tensor([math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0])
    torch.testing.assert_close(kl_estimate(new, reference, "k3"), k3)


def test_weights_and_denominators_by_hand() -> None:
    response = torch.tensor([0, 0, 0, 2])  # response 1 has no trained token
    assert token_weights(response, 3, "token_mean").tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(token_weights(response, 3, "sequence_mean"), torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]))
    assert token_weights(response, 3, "constant").tolist() == [1, 1, 1, 1]
    assert [denominator(40, 3, a, 100) for a in ("token_mean", "sequence_mean", "constant")] == [40, 3, 300]
    assert denominator(0, 0, "constant", 100) == 1


def test_mismatch_corrections_by_hand() -> None:
    trainer = torch.tensor([0.0, 0.0, 0.0, 0.0])
    engine = -torch.tensor([1.0, 3.0, 0.25, 1.5]).log()  # ratios 1, 3, 0.25, 1.5; responses 0: 1 * 3, 1: 0.25 * 1.5
    response = torch.tensor([0, 0, 1, 1])

    def weights(kind: str) -> tuple[list[float], list[bool]]:
        out = mismatch_correction(trainer, engine, response, 2, kind, 0.5, 2.0)
        assert not out.weight.requires_grad
        return [round(w, 5) for w in out.weight.tolist()], out.masked.tolist()

    assert weights("none") == ([1, 1, 1, 1], [False] * 4)
    assert weights("token_truncate") == ([1, 2, 0.25, 1.5], [False] * 4)
    assert weights("token_mask") == ([1, 0, 0, 1.5], [False, True, True, False])
    assert weights("sequence_truncate") == ([2, 2, 0.375, 0.375], [False] * 4)
    assert weights("sequence_mask") == ([0, 0, 0, 0], [True] * 4)
    ratio = mismatch_correction(trainer, engine, response, 2, "token_mask", 0.5, 2.0).ratio
    torch.testing.assert_close(ratio, torch.tensor([1.0, 3.0, 0.25, 1.5]))  # before any bound


# --------------------------------------------------------------------------- TRL's formulas, derived again


def trl_loss(
    new: Tensor, old: Tensor, reference: Tensor, advantage: Tensor, mask: Tensor, kind: str, level: str, beta: float
) -> Tensor:
    """GRPOTrainer's loss as its documentation states it, on padded rows [R, T], with clip bounds 0.2 and 0.28.

    kind: grpo (mean over each row, then over rows), bnpo (mean over tokens), dr_grpo (rows times a constant of 10),
    cispo (detached ratio, capped at 1.28). level: importance sampling by token or by sequence.
    """
    log_ratio = new - old
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
    coef = torch.exp(log_ratio)
    a = advantage[:, None]
    if kind == "cispo":
        loss = -torch.clamp(coef, max=1.28).detach() * a * new
    else:
        loss = -torch.min(coef * a, torch.clamp(coef, 0.8, 1.28) * a)
    if beta:
        loss = loss + beta * (torch.exp(reference - new) - (reference - new) - 1)
    loss = loss.expand_as(mask) * mask
    if kind == "grpo":
        return (loss.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    if kind == "dr_grpo":
        return loss.sum() / (mask.shape[0] * 10)
    return loss.sum() / mask.sum()


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize(
    ("kind", "level", "ours"),
    [
        ("grpo", "token", {"loss": "ppo", "aggregation": "sequence_mean"}),
        ("bnpo", "token", {"loss": "dapo"}),
        ("dr_grpo", "token", {"loss": "dr_grpo", "constant_length": 10}),
        ("grpo", "sequence", {"loss": "gspo"}),
        ("cispo", "token", {"loss": "cispo"}),
    ],
)
def test_equal_to_trl(kind: str, level: str, ours: dict, beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, reference = (-torch.rand(4, 6, generator=generator, dtype=torch.float64) * 3 for _ in range(3))
    old = new + 0.4 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    advantage = torch.randn(4, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) > 0.3
    mask[:, 0] = True  # no empty row
    a, b = new.clone().requires_grad_(), new.clone().requires_grad_()
    theirs = trl_loss(a, old, reference, advantage, mask.double(), kind, level, beta)

    objective = Objective(**{"clip_low": 0.2, "clip_high": 0.28, **ours}).settled(10)
    response = mask.nonzero()[:, 0]
    log_ratio = log_ratios(b[mask], old[mask], response, 4, sequence=objective.loss == "gspo")
    value = surrogate(log_ratio, b[mask], advantage[response], objective).value
    value = value + beta * kl_estimate(b[mask], reference[mask], "k3")
    weights = token_weights(response, 4, objective.aggregation)
    mine = (value * weights).sum() / denominator(
        float(mask.sum()), 4.0, objective.aggregation, objective.constant_length
    )

    theirs.backward()
    mine.backward()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-6, atol=1e-8)
