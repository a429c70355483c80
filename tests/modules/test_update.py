"""The update: however it is cut, packed or ordered, the gradient is one; and it is that of each response by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hosts import Host, some_groups
from torch import Tensor

from parallel_r1.methods import Objective
from parallel_r1.modules.batching import Row, collate
from parallel_r1.modules.update import plan
from parallel_r1.objective import policy_loss
from parallel_r1.policy import Policy, PolicySource, load_policy

GROUPS = some_groups()


@pytest.fixture
def policy(tiny_model_dir: Path) -> Policy:
    loaded = load_policy(tiny_model_dir, PolicySource(name=str(tiny_model_dir)))
    with torch.no_grad():
        for p in loaded.model.parameters():  # gentler than the fixture's weights: ratios stay near 1
            p.mul_(0.5)
    return loaded


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).norm() <= tolerance * b[name].norm() + 1e-12, name


def one_at_a_time(policy: Policy, groups: list[list[Row]], structure: str) -> tuple[float, dict[str, Tensor]]:
    """Plain GRPO, token mean, on policy: each response in a padded batch of its own, whole logits."""
    rows = [row for group in groups for row in group]
    trained = sum(sum(row.rollout.sampled) for row in rows)
    total = 0.0
    for row in rows:
        batch = collate([row], policy.tags, policy.pad_id, structure)
        logprobs, _ = policy.logprobs(batch)
        loss = policy_loss(logprobs, logprobs.detach(), batch.advantages, batch.loss_mask).loss / trained
        loss.backward()
        total += loss.item()
    gradient = {n: p.grad.clone() for n, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    return total, gradient


@pytest.mark.parametrize("structure", ["seen", "unseen", "sequential"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_with_shared_prompts_is_one_response_at_a_time(
    tiny_model_dir: Path, structure: str, attention: str
) -> None:
    policy = load_policy(tiny_model_dir, PolicySource(name=str(tiny_model_dir), attn_implementation=attention))
    loss, gradient = one_at_a_time(policy, GROUPS, structure)
    host = Host(policy, structure)
    done = host.run(GROUPS, Objective())
    assert host.passes == 1
    assert done["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert_same(host.gradient, gradient, 1e-5)


OBJECTIVES = [
    Objective(),
    Objective(loss="dapo", old_logprobs="engine", entropy_coef=0.02, dual_clip=3.0),
    Objective(loss="gspo", advantage="rloo", old_logprobs="engine", clip_low=0.2, clip_high=0.3),
    Objective(loss="cispo", aggregation="sequence_mean", mismatch="sequence_truncate"),
    Objective(loss="dr_grpo", mismatch="token_mask", kl_coef=0.1, kl="k2"),
]


def gradient_of(policy: Policy, groups: list[list[Row]], objective: Objective, max_tokens: int = 10_000) -> Host:
    host = Host(policy, "unseen", max_tokens)

    def shifted(pack):
        scores = policy.score(pack)
        return scores._replace(logprobs=scores.logprobs - 0.1)

    host.done = host.run(groups, objective, reference=shifted)
    return host


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.loss)
def test_how_a_step_is_cut_does_not_matter(policy: Policy, objective: Objective) -> None:
    whole = gradient_of(policy, GROUPS, objective)
    assert whole.passes == 1
    assert torch.stack([g.norm() for g in whole.gradient.values()]).norm() > 1e-4
    for max_tokens, passes in ((250, 2), (80, 7)):
        cut = gradient_of(policy, GROUPS, objective, max_tokens)
        assert cut.passes == passes
        assert_same(cut.gradient, whole.gradient, 1e-5)
        for key, value in whole.done.items():
            assert cut.done[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.loss)
def test_the_order_of_responses_does_not_matter(policy: Policy, objective: Objective) -> None:
    whole = gradient_of(policy, GROUPS, objective)
    turned = gradient_of(policy, [group[::-1] for group in GROUPS[::-1]], objective)
    assert_same(turned.gradient, whole.gradient, 1e-5)


def test_gradients_of_cuts_agree_to_1e_6_in_float64(policy: Policy) -> None:
    policy.model.double()
    whole = gradient_of(policy, GROUPS, OBJECTIVES[1])
    for max_tokens in (250, 80):
        assert_same(gradient_of(policy, GROUPS, OBJECTIVES[1], max_tokens).gradient, whole.gradient, 1e-6)


def test_responses_without_advantage_are_measured_but_cost_no_gradient(policy: Policy) -> None:
    flat = [[replace(row, advantage=0.0) for row in GROUPS[0]], *GROUPS[1:]]
    host = Host(policy)
    step = plan(host, [row for group in flat for row in group], Objective().settled(64))
    assert (len(step.active), len(step.idle)) == (8, 4)
    done = host.run(flat, Objective())
    _, gradient = one_at_a_time(policy, flat, "seen")
    assert_same(host.gradient, gradient, 1e-5)
    # their tokens count in the mean and in the gap
    assert done["rollout_logprob_gap/mean"] == pytest.approx(
        Host(policy).run(GROUPS, Objective())["rollout_logprob_gap/mean"]
    )


def test_nothing_to_train_on_still_steps(policy: Policy) -> None:
    host = Host(policy)
    assert host.run([], Objective())["policy/grad_norm"] == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in host.gradient.values())
    assert host.run([[replace(row, advantage=0.0) for row in GROUPS[0]]], Objective())["policy/grad_norm"] == 0


def test_several_steps_clip_against_the_policy_that_sampled(policy: Policy) -> None:
    host = Host(policy, lr=0.05)
    done = host.run(GROUPS, Objective(), mini_batches=3, epochs=2)
    assert done["policy/ratio/max"] > 1.0 > done["policy/ratio/min"]
    assert done["policy/approx_kl"] > 0
    assert done["policy/clip_fraction"] > 0
    assert done["policy/clip_fraction"] == pytest.approx(
        done["policy/clip_fraction_low"] + done["policy/clip_fraction_high"]
    )
    one = Host(policy).run(GROUPS, Objective())
    assert (one["policy/ratio/min"], one["policy/ratio/max"], one["policy/approx_kl"]) == (1.0, 1.0, 0.0)


def test_the_gap_is_measured_against_the_policy_before_it_moves(policy: Policy) -> None:
    """Whatever the number of steps, and by segment."""
    before = Host(policy).run(GROUPS, Objective())
    names = [f"rollout_logprob_gap{kind}/{s}" for kind in ("", "/main", "/path", "/summary") for s in ("mean", "max")]
    after = Host(policy, lr=0.05).run(GROUPS, Objective(), mini_batches=3, epochs=2)
    for name in names:
        assert after[name] == pytest.approx(before[name], rel=1e-5), name
    assert before["rollout_logprob_gap/max"] > before["rollout_logprob_gap/mean"] > 0.1


def test_the_engines_log_probabilities_can_be_the_old_ones(policy: Policy) -> None:
    done = Host(policy).run(GROUPS, Objective(old_logprobs="engine"))
    assert done["policy/ratio/max"] > 1.1
    assert done["rollout_mismatch/ratio/max"] == 1.0


def test_mismatch_is_reported_before_correction(policy: Policy) -> None:
    plain = Host(policy).run(GROUPS, Objective())
    masked = Host(policy).run(GROUPS, Objective(mismatch="token_mask", mismatch_low=0.9, mismatch_high=1.1))
    for name in ("mean", "min", "max"):
        assert masked[f"rollout_mismatch/ratio/{name}"] == plain[f"rollout_mismatch/ratio/{name}"]
    assert plain["rollout_mismatch/masked_fraction"] == 0
    assert masked["rollout_mismatch/masked_fraction"] > 0.3


def test_gradient_checkpointing_changes_nothing(tiny_model_dir: Path) -> None:
    hosts = []
    for on in (False, True):
        source = PolicySource(name=str(tiny_model_dir), gradient_checkpointing=on)
        loaded = load_policy(tiny_model_dir, source)
        loaded.model.train()
        host = Host(loaded, "unseen")
        host.run(GROUPS, Objective())
        hosts.append(host)
    assert_same(hosts[1].gradient, hosts[0].gradient, 1e-6)
