"""The contract's plain parts: seeds, the checks of requests, the record of a response."""

import dataclasses
import itertools
import math
import re

import pytest

from parallel_r1.modules.responder import Generation
from parallel_r1.rollout.engine import Request, Sampling, check_requests, make_rollout, request_seed


def test_seeds_differ_by_run_iteration_and_sample_and_stay_in_range():
    seeds = [request_seed(s, i, n) for s in range(3) for i in range(20) for n in range(100)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) > len(seeds) - 10  # 6,000 draws of 2**31 collide 0.008 times on average
    # Neighbours are unrelated: half of the 31 bits differ.
    flips = [(a ^ b).bit_count() for a, b in itertools.pairwise(seeds)]
    assert 15 < sum(flips) / len(flips) < 16


def test_a_seed_is_the_same_on_every_machine_and_never_changes():
    # Old runs must stay repeatable, so these are the values of the day it was written.
    cases = {(0, 0, 0): 151986117, (1, 2, 3): 2053051431, (12, 3, 0): 706074597, (1, 23, 0): 1668254622}
    assert {case: request_seed(*case) for case in cases} == cases


@pytest.mark.parametrize("temperature", [-1.0, 0.001, math.nan])
def test_temperatures_that_vllm_would_change_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature is"):
        Sampling(temperature)


@pytest.mark.parametrize(
    ("request_", "sampling", "said"),
    [
        (Request((), 4, 0), Sampling(), "request 0 has an empty prompt"),
        (Request((5,), 0, 0), Sampling(), "request 0 allows max_tokens=0 for a response with a prefix of 0 tokens"),
        (Request((5,), 2, 0, (1, 2, 3)), Sampling(), "max_tokens=2 for a response with a prefix of 3 tokens"),
        (Request((5,) * 13, 4, 0), Sampling(), "13 prompt + 4 response (max_tokens) = 17 tokens, the engine holds 16"),
        (Request((5,), 4, 2**31), Sampling(), "request 0 has seed 2147483648"),
        (Request((5, 10), 4, 0), Sampling(), "request 0: ids span 5..10, the model's vocabulary is 0..9"),
        (Request((5,), 4, 0, (-1,)), Sampling(), "request 0: ids span -1..5"),
        (Request((5,), 4, 0), Sampling(eos_ids=(1, 12)), "sampling.eos_ids: ids span 1..12"),
        (Request((5,), 4, 0), Sampling(banned=(99,)), "sampling.banned: ids span 99..99"),
        (Request((5,), 4, 0), Sampling(banned=tuple(range(10))), "nothing is left to sample"),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name_and_size(request_, sampling, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check_requests([request_], sampling, context=16, vocab_size=10)


def test_a_request_that_just_fits_passes():
    check_requests([Request((9,) * 12, 4, 2**31 - 1, (0,) * 4)], Sampling(), context=16, vocab_size=10)


def test_a_forced_prefix_leads_the_response_and_was_not_sampled():
    rollout = make_rollout(Request((5, 6), 9, 0, (7, 8)), [3, 1], [-0.5, -0.25], finished=True)
    assert rollout.prompt_ids == (5, 6)
    assert rollout.response_ids == (7, 8, 3, 1)
    assert rollout.logprobs == (0.0, 0.0, -0.5, -0.25)
    assert rollout.sampled == (False, False, True, True)
    assert rollout.finished


def test_what_would_bias_the_ratio_is_no_option():
    """Cutting the distribution (top_p, top_k, min_p) makes what is trained differ from what was sampled."""
    names = {field.name for kind in (Sampling, Generation) for field in dataclasses.fields(kind)}
    assert {"temperature", "banned"} <= names
    assert not names & {"top_p", "top_k", "min_p", "repetition_penalty"}
