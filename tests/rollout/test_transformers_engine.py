"""The transformers engine against the definition: one full forward pass a response, nothing cached, nothing batched."""

from dataclasses import replace

import pytest
import torch
from conftest import tiny_model

from parallel_r1.rollout.engine import Request, Sampling
from parallel_r1.rollout.transformers_decode import sample_tokens
from parallel_r1.rollout.transformers_engine import TransformersEngine
from parallel_r1.rollout.weights import full_weights
from parallel_r1.types import Rollout


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def engine(tiny_model_dir):
    engine = TransformersEngine()
    engine.start(tiny_model_dir)
    yield engine
    engine.close()


def some_requests(count: int, tokens: int = 24) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + 7 * i % 31 for i in range(count)]
    return [
        Request(tuple(torch.randint(8, 110, (n,), generator=generator).tolist()), tokens - i % 5, 100 + i)
        for i, n in enumerate(lengths)
    ]


@torch.no_grad()
def logits_of(model, rollout: Rollout) -> torch.Tensor:
    """[response tokens, vocabulary]: what the model says before each token of the response."""
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    return model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].float()


def largest_gap(model, rollouts: list[Rollout], temperature: float = 1.0, banned: tuple[int, ...] = ()) -> float:
    """max |log-probability of the engine - that of a plain forward pass| over sampled tokens."""
    gap = 0.0
    for rollout in rollouts:
        logits = logits_of(model, rollout)
        logits[:, list(banned)] = float("-inf")
        ids, sampled = torch.tensor(rollout.response_ids), torch.tensor(rollout.sampled)
        logprobs = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        gap = max(gap, (logprobs - torch.tensor(rollout.logprobs))[sampled].abs().max().item())
    return gap


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_logprobs_are_those_of_the_sampled_distribution(engine, model, temperature):
    rollouts = engine.generate(some_requests(20), Sampling(temperature, eos_ids=(1,), banned=(2, 3, 40)))
    assert largest_gap(model, rollouts, temperature, (2, 3, 40)) < 2e-5
    assert largest_gap(model, rollouts, temperature * 1.1, (2, 3, 40)) > 1e-2  # the check can fail
    assert not {2, 3, 40} & {token for rollout in rollouts for token in rollout.response_ids}


def test_greedy_takes_the_likeliest_token_at_temperature_one(engine, model):
    rollouts = engine.generate(some_requests(20), Sampling(0.0))
    for rollout in rollouts:
        assert tuple(logits_of(model, rollout).argmax(-1).tolist()) == rollout.response_ids
    assert largest_gap(model, rollouts) < 2e-5


def test_greedy_never_takes_a_banned_token(engine, model):
    (free,) = engine.generate(some_requests(1), Sampling(0.0))
    banned = (free.response_ids[0],)
    (other,) = engine.generate(some_requests(1), Sampling(0.0, banned=banned))
    assert banned[0] not in other.response_ids
    assert largest_gap(model, [other], banned=banned) < 2e-5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_response_does_not_depend_on_the_batch(engine, tiny_model_dir, temperature):
    requests, sampling = some_requests(24), Sampling(temperature, eos_ids=(1, 20, 21))
    together = engine.generate(requests, sampling)
    backwards = engine.generate(requests[::-1], sampling)[::-1]
    small = TransformersEngine(max_batch_size=5)
    small.start(tiny_model_dir)
    alone = [engine.generate([request], sampling)[0] for request in requests]
    for rollouts in (backwards, alone, small.generate(requests, sampling)):
        assert [r.response_ids for r in rollouts] == [r.response_ids for r in together]


def test_the_seed_decides_and_the_global_state_does_not(engine):
    (request,) = some_requests(1)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = engine.generate([request, request, replace(request, seed=7)], Sampling())
    assert torch.equal(torch.get_rng_state(), before)
    assert first == again
    assert first.response_ids != other.response_ids


def test_samples_follow_the_distribution(engine, model):
    prompt, count = (10, 11, 12), 4000
    rollouts = engine.generate([Request(prompt, 1, seed) for seed in range(count)], Sampling(1.2))
    probability = (model(input_ids=torch.tensor([prompt])).logits[0, -1].float() / 1.2).softmax(-1)
    counts = torch.bincount(torch.tensor([r.response_ids[0] for r in rollouts]), minlength=110)
    # Pearson's statistic over the tokens expected five times or more: chi-squared with as many degrees of freedom.
    often = probability * count >= 5
    statistic = ((counts - probability * count) ** 2 / (probability * count))[often].sum().item()
    freedom = int(often.sum())
    assert freedom > 5
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_a_sampled_end_is_the_last_token_and_a_cut_is_marked(engine):
    rollouts = engine.generate(some_requests(40), Sampling(eos_ids=(1, 30, 31, 32, 33, 34, 35)))
    requests = some_requests(40)
    ends = {r.response_ids[-1] for r in rollouts if r.finished}
    assert len(ends) > 1  # several ids end a response
    assert {r.finished for r in rollouts} == {True, False}
    for request, rollout in zip(requests, rollouts, strict=True):
        assert not set(rollout.response_ids[:-1]) & {1, 30, 31, 32, 33, 34, 35}
        assert rollout.finished == (rollout.response_ids[-1] in {1, 30, 31, 32, 33, 34, 35})
        assert len(rollout.response_ids) == request.max_tokens or rollout.finished


def test_a_prefix_is_context_and_counts_towards_the_limit(engine, model):
    requests = [replace(r, prefix_ids=(50, 51, 52)) for r in some_requests(6)]
    rollouts = engine.generate(requests, Sampling())
    for request, rollout in zip(requests, rollouts, strict=True):
        assert rollout.response_ids[:3] == (50, 51, 52)
        assert rollout.sampled == (False,) * 3 + (True,) * (request.max_tokens - 3)
        assert len(rollout.response_ids) == request.max_tokens
    assert largest_gap(model, rollouts) < 2e-5
    # The same tokens as if the prefix had stood in the prompt.
    moved = [
        replace(r, prompt_ids=r.prompt_ids + r.prefix_ids, prefix_ids=(), max_tokens=r.max_tokens - 3) for r in requests
    ]
    assert [r.response_ids for r in engine.generate(moved, Sampling())] == [r.response_ids[3:] for r in rollouts]


def test_a_prefix_that_fills_the_limit_comes_back_unfinished(engine):
    full = Request((9, 9), 2, 0, (50, 1))
    rollouts = engine.generate([full, *some_requests(2)], Sampling(eos_ids=(1,)))
    assert rollouts[0] == Rollout((9, 9), (50, 1), (0.0, 0.0), (False, False), finished=False)
    assert engine.generate([full], Sampling()) == [rollouts[0]]
    assert engine.generate([], Sampling()) == []


def test_it_is_stale_until_synced_and_keeps_no_tie_to_the_trainer(engine, model):
    requests, trainer = some_requests(8), tiny_model(seed=1)
    assert largest_gap(trainer, engine.generate(requests, Sampling())) > 1e-2
    engine.sync(full_weights(trainer))
    assert engine.weight_version == 1
    rollouts = engine.generate(requests, Sampling())
    assert largest_gap(trainer, rollouts) < 2e-5
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.zero_()
    assert engine.generate(requests, Sampling()) == rollouts


def test_it_says_what_was_not_done(engine, tiny_model_dir, untied_model_dir, tmp_path):
    requests = some_requests(1)
    idle = TransformersEngine()
    for call in (lambda: idle.generate(requests, Sampling()), lambda: idle.sync([])):
        with pytest.raises(RuntimeError, match="call start first"):
            call()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        idle.start(tmp_path)
    engine.start(tiny_model_dir)
    with pytest.raises(RuntimeError, match="call sync before generate"):
        engine.generate(requests, Sampling())
    with pytest.raises(RuntimeError, match="left out 24 weights"):
        engine.sync(list(full_weights(tiny_model()))[:1])
    with pytest.raises(RuntimeError, match="call sync before generate"):
        engine.generate(requests, Sampling())
    engine.sync(full_weights(tiny_model()))
    with pytest.raises(ValueError, match="the engine holds 1024"):
        engine.generate([Request((5,) * 1000, 25, 0)], Sampling())
    engine.start(untied_model_dir)  # another architecture: loaded anew, its weights known
    engine.generate(requests, Sampling())
    engine.close()
    engine.close()


def test_a_folder_without_weights_gives_the_architecture_alone(tiny_model_dir, model, tmp_path):
    (tmp_path / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    engine = TransformersEngine(max_batch_size=4)
    engine.start(tmp_path)
    with pytest.raises(RuntimeError, match="call sync before generate"):
        engine.generate(some_requests(1), Sampling())
    engine.sync(full_weights(model))
    assert largest_gap(model, engine.generate(some_requests(6), Sampling())) < 2e-5


def test_the_inverse_distribution_never_lands_on_what_cannot_happen():
    logits = torch.tensor([[0.0, 0.0, 1.0, -50.0, 2.0, 0.0]]).repeat(4, 1)
    noise = torch.tensor([0.0, 0.2, 0.5, 1 - 2**-53], dtype=torch.float64)
    chosen, logprobs = sample_tokens(logits, noise, Sampling(banned=(0, 5)))
    # Left are 1, 2, 4 with weights 1, e, e^2 of 11.1: the steps end at 0.09, 0.33, 1.
    assert chosen.tolist() == [1, 2, 4, 4]
    weights = torch.tensor([1.0, 2.718282, 7.389056, 7.389056])
    assert torch.allclose(logprobs, (weights / 11.107338).log(), atol=1e-6)
