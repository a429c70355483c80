"""Muon with AdamW as one optimizer: who gets what, schedules, resumes."""

from __future__ import annotations

import io
from itertools import chain

import pytest
import torch
from conftest import tiny_model
from torch import nn

from parallel_r1.optim import MuonWithAdamW


class Small(nn.Module):
    """A matrix, a vector, an embedding, an output matrix."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed_tokens = nn.Parameter(torch.randn(7, 4, generator=generator))
        self.inner = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.bias = nn.Parameter(torch.randn(4, generator=generator))
        self.lm_head = nn.Parameter(torch.randn(7, 4, generator=generator))

    def loss(self, step: int) -> torch.Tensor:
        hidden = torch.tanh(self.embed_tokens[[step % 7, (3 * step + 1) % 7]] @ self.inner + self.bias)
        return nn.functional.cross_entropy(hidden @ self.lm_head.T, torch.tensor([step % 5, 6]))


def build(steps_of_schedule: int = 10) -> tuple[Small, MuonWithAdamW, torch.optim.lr_scheduler.LambdaLR]:
    model = Small()
    optimizer = MuonWithAdamW(model.named_parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps_of_schedule)
    return model, optimizer, schedule


def train(
    model: Small, optimizer: MuonWithAdamW, schedule: torch.optim.lr_scheduler.LRScheduler, steps: range
) -> list[float]:
    losses = []
    for step in steps:
        loss = model.loss(step)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


def names(part: torch.optim.Optimizer) -> set[str]:
    return {name for group in part.param_groups for name in group["param_names"]}


@pytest.mark.parametrize("tied", [True, False])
def test_inner_matrices_go_to_muon_and_the_rest_of_a_model_to_adamw(tied: bool) -> None:
    model = tiny_model(tied=tied)
    optimizer = MuonWithAdamW(model.named_parameters())
    muon, adamw = optimizer.parts
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    assert names(muon) == {n for n, p in model.named_parameters() if n.endswith("_proj.weight")}
    assert {"model.embed_tokens.weight", "model.norm.weight"} < names(adamw)
    assert ("lm_head.weight" in names(adamw)) == (not tied)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))  # every parameter once


def test_only_matrices_decay() -> None:
    optimizer = MuonWithAdamW(Small().named_parameters(), weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


@pytest.mark.parametrize("missing", ["matrices", "others"])
def test_one_kind_of_parameter_is_enough(missing: str) -> None:
    parameters = [(n, p) for n, p in Small().named_parameters() if (n == "inner") == (missing == "others")]
    optimizer = MuonWithAdamW(parameters, lr=0.1)
    before = [p.detach().clone() for _, p in parameters]
    sum(p.square().sum() for _, p in parameters).backward()
    optimizer.step()
    assert all(not torch.equal(a, p) for a, (_, p) in zip(before, parameters, strict=True))


def test_a_step_is_a_step_of_each_part() -> None:
    model, optimizer, _ = build()
    twin = Small()
    alone = [
        torch.optim.Muon([twin.inner], lr=0.05, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([twin.embed_tokens, twin.bias, twin.lm_head], lr=0.05, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for step in range(3):
        for m in (model, twin):
            m.zero_grad()
            m.loss(step).backward()
        optimizer.step()
        for part in alone:
            part.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=0, atol=0)


def test_a_closure_is_evaluated_once_and_its_loss_returned() -> None:
    model, optimizer, _ = build()
    calls: list[float] = []

    def closure() -> torch.Tensor:
        loss = model.loss(0)
        loss.backward()
        calls.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == calls[0]
    assert len(calls) == 1


def test_gradients_of_both_parts_are_cleared() -> None:
    model, optimizer, _ = build()
    model.loss(0).backward()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_schedule_reaches_both_parts() -> None:
    model, optimizer, schedule = build(steps_of_schedule=4)
    train(model, optimizer, schedule, range(3))
    rates = [group["lr"] for part in optimizer.parts for group in part.param_groups]
    assert rates == [pytest.approx(0.05 / 4)] * 2
    train(model, optimizer, schedule, range(3, 4))  # the rate is 0 after this step
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, schedule, range(4, 5))
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    model, optimizer, schedule = build()
    expected = train(model, optimizer, schedule, range(8))

    first, its_optimizer, its_schedule = build()
    losses = train(first, its_optimizer, its_schedule, range(4))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (first, its_optimizer, its_schedule)], file)
    file.seek(0)
    second, optimizer_of_second, schedule_of_second = build()
    for part, state in zip((second, optimizer_of_second, schedule_of_second), torch.load(file), strict=True):
        part.load_state_dict(state)
    losses += train(second, optimizer_of_second, schedule_of_second, range(4, 8))

    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), second.parameters(), strict=True))
    # a fresh optimizer on the same weights goes elsewhere: the state matters
    third, fresh, its_schedule = build()
    third.load_state_dict(first.state_dict())
    its_schedule.load_state_dict(torch.load(io.BytesIO(file.getvalue()))[2])
    assert train(third, fresh, its_schedule, range(4, 8)) != losses[4:]


def test_after_loading_a_schedule_still_reaches_both_parts() -> None:
    model, optimizer, schedule = build()
    train(model, optimizer, schedule, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.007
    assert {group["lr"] for part in optimizer.parts for group in part.param_groups} == {0.007}


def test_it_trains_a_tiny_qwen3() -> None:
    model = tiny_model().train()
    optimizer = MuonWithAdamW(model.named_parameters(), lr=5e-3)
    ids = torch.randint(8, 110, (4, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    states = chain.from_iterable(part.state.values() for part in optimizer.parts)
    assert all("momentum_buffer" in state or "exp_avg" in state for state in states)
