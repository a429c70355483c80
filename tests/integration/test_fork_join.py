"""Isolated paths on real vLLM: what it samples is what the trainer computes under the layout of the whole response.

Gaps are measured with the trainer's own forward pass, packed as in an update. With the splice off the same measure
shows a large gap, so it can fail. One engine runs at a time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import tiny_model, write_tiny_model

from parallel_r1.modules.batching import Row, collate_pack, packs
from parallel_r1.policy import Policy, PolicySource, load_policy
from parallel_r1.rollout.engine import Branching, Request, Sampling
from parallel_r1.rollout.transformers_engine import TransformersEngine
from parallel_r1.rollout.vllm_engine import VLLMEngine
from parallel_r1.rollout.weights import full_weights
from parallel_r1.structure.tokens import TagIds, segments
from parallel_r1.types import SEGMENT_KINDS, Rollout

pytestmark = pytest.mark.integration

TAGS = TagIds(2, 3, 4, 5, 6, 7)
PLAN = Branching(TAGS, "longest", paths=(2, 5), max_blocks=3, max_path_tokens=16, max_summary_tokens=10)
# few words and much heat, so that a random model opens and closes blocks often
SAMPLING = Sampling(1.5, eos_ids=(1,), banned=tuple(range(24, 110)))
TOLERANCE = 1e-4


def some_requests(problems: int = 4, group: int = 8, tokens: int = 280) -> list[Request]:
    """Every third problem names the tags; the first response of each group is made to start with a block."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for p in range(problems):
        prompt = torch.randint(8, 110, (5 + 11 * p,), generator=generator).tolist()
        if p % 3 == 2:
            prompt = [TAGS.parallel, TAGS.path, *prompt, TAGS.end_path, TAGS.end_parallel, 9]
        out += [
            Request(tuple(prompt), tokens, 100 * p + g, (20, TAGS.parallel) if g == 0 else ()) for g in range(group)
        ]
    return out


def gaps(policy: Policy, rollouts: list[Rollout], plan: Branching = PLAN) -> dict[str, float]:
    """max |log-probability of the trainer - of the engine| by kind of segment."""
    out = dict.fromkeys(SEGMENT_KINDS, 0.0)
    with torch.no_grad():
        for part in packs([Row(rollout) for rollout in rollouts], 4096, policy.can_pack):
            pack = collate_pack(part, TAGS, "unseen", plan.positions)
            difference = (policy.score(pack, SAMPLING.temperature).logprobs - pack.engine_logprobs).abs()
            for k, kind in enumerate(SEGMENT_KINDS):
                out[kind] = max([out[kind], *difference[pack.kind == k].tolist()])
    return out


def shapes(rollouts: list[Rollout]) -> tuple[set[int], set[int]]:
    """Numbers of blocks, and of paths a block, that occur."""
    blocks, paths = set(), set()
    for rollout in rollouts:
        parts = [s for s in segments(rollout.response_ids, TAGS) if s.kind == "path"]
        numbers = {part.block for part in parts}
        blocks.add(len(numbers))
        paths |= {sum(part.block == number for part in parts) for number in numbers}
    return blocks, paths


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("branching") / "qwen3", seed=1)


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(folder, PolicySource(name=str(folder)))


@pytest.fixture(scope="module")
def running(folder):
    engine = VLLMEngine(max_model_len=512, kv_cache_bytes=64 << 20)
    engine.start(folder, "longest")
    yield engine
    engine.close()


@pytest.fixture
def engine(running, policy):
    """The engine with the weights of `policy` and nothing cached."""
    running.sync(policy.weights())
    return running


def test_what_is_sampled_is_what_is_trained(engine, policy):
    requests = some_requests(6)
    rollouts = engine.generate_branching(requests, SAMPLING, PLAN)
    assert max(gaps(policy, rollouts).values()) <= TOLERANCE
    blocks, paths = shapes(rollouts)
    assert blocks >= {0, 1, 2, 3}
    assert paths == {2, 3, 4, 5}
    assert {r.finished for r in rollouts} == {True, False}
    assert sum(r.cuts for r in rollouts) > 10
    assert all(len(r.response_ids) <= q.max_tokens for r, q in zip(rollouts, requests, strict=True))
    again = engine.generate_branching(requests, SAMPLING, PLAN)  # the cache of the first call is still there
    assert max(gaps(policy, again).values()) <= TOLERANCE
    assert [r.response_ids for r in again] == [r.response_ids for r in rollouts]


def test_with_the_splice_off_the_gap_is_large(engine, policy, monkeypatch):
    from parallel_r1.rollout.vllm_branching import Splicer

    spliced = Splicer._request
    monkeypatch.setattr(Splicer, "_request", lambda self, *a: spliced(self, *a[:4], (), *a[5:]))
    found = gaps(policy, engine.generate_branching(some_requests(), SAMPLING, PLAN))
    assert found["summary"] > 0.1
    monkeypatch.undo()
    engine.sync(policy.weights())
    assert max(gaps(policy, engine.generate_branching(some_requests(), SAMPLING, PLAN)).values()) <= TOLERANCE


def test_a_summary_computes_two_tokens(engine):
    """`</Parallel><Summary>`: whatever the paths held is there already."""
    engine.generate_branching(some_requests(), SAMPLING, PLAN)
    assert engine.requests["summary"] > 10
    assert engine.computed["summary"] == 2 * engine.requests["summary"]
    assert engine.computed["closing"] <= 2 * engine.requests["closing"]


def test_a_response_does_not_depend_on_the_batch(engine):
    requests = some_requests()
    together = engine.generate_branching(requests, SAMPLING, PLAN)
    backwards = engine.generate_branching(requests[::-1], SAMPLING, PLAN)[::-1]
    alone = [engine.generate_branching([request], SAMPLING, PLAN)[0] for request in requests[:4]]
    ids = [r.response_ids for r in together]
    assert [r.response_ids for r in backwards] == ids
    assert [r.response_ids for r in alone] == ids[:4]


def test_greedy_text_is_that_of_the_oracle(engine, folder):
    oracle = TransformersEngine()
    oracle.start(folder, "longest")
    greedy = replace(SAMPLING, temperature=0.0)
    requests = some_requests()
    ours = engine.generate_branching(requests, greedy, PLAN)
    theirs = oracle.generate_branching(requests, greedy, PLAN)
    for a, b in zip(ours, theirs, strict=True):
        assert replace(a, logprobs=b.logprobs) == b
        assert a.logprobs == pytest.approx(b.logprobs, abs=TOLERANCE)


def test_a_sync_drops_segments_and_cache(engine, policy, folder):
    trainer = load_policy(folder, PolicySource(name=str(folder)))
    trainer.model.load_state_dict(tiny_model(seed=2).state_dict())
    engine.generate_branching(some_requests(), SAMPLING, PLAN)
    engine.sync(full_weights(trainer.model))
    rollouts = engine.generate_branching(some_requests(), SAMPLING, PLAN)
    assert max(gaps(trainer, rollouts).values()) <= TOLERANCE
    assert max(gaps(policy, rollouts).values()) > 0.1


def test_an_aborted_call_leaves_nothing_behind(engine, policy, monkeypatch):
    from parallel_r1.rollout.vllm_branching import Splicer

    def fail(self, sample):
        raise KeyboardInterrupt

    monkeypatch.setattr(Splicer, "finished", fail)  # when the first response is ready, others are half done
    with pytest.raises(KeyboardInterrupt):
        engine.generate_branching(some_requests(), SAMPLING, PLAN)
    monkeypatch.undo()
    assert engine._store.empty
    engine.sync(policy.weights())  # which fails while a block is held
    assert max(gaps(policy, engine.generate_branching(some_requests(), SAMPLING, PLAN)).values()) <= TOLERANCE


def test_what_would_be_computed_wrongly_is_refused(engine):
    from vllm import SamplingParams

    with pytest.raises(RuntimeError, match="asked for plain causal text"):
        engine.generate(some_requests(1), SAMPLING)
    with pytest.raises(RuntimeError, match="asked for branches at `index`"):
        engine.generate_branching(some_requests(1), SAMPLING, replace(PLAN, positions="index"))
    structured = Request((9,), 60, 0, (TAGS.parallel, TAGS.path, 9, TAGS.end_path, TAGS.end_parallel))
    with pytest.raises(ValueError, match="no keys and values"):
        engine.generate_branching([structured], SAMPLING, PLAN)
    with pytest.raises(RuntimeError, match="without lineage"):  # past our own door
        engine._engine.add_request("stray", {"prompt_token_ids": [9, 9]}, SamplingParams(max_tokens=1))
    engine._engine.abort_request(["stray"])
    assert len(engine.generate_branching(some_requests(1), SAMPLING, PLAN)) == 8


@pytest.mark.parametrize(
    ("kind", "positions", "options"),
    [
        ("llama", "longest", {"enable_prefix_caching": False}),
        ("qwen3", "index", {"kv_cache_bytes": 1400 << 10}),  # 43 blocks of 32 tokens for 32 responses of 280
        ("qwen2", "longest", {"kv_cache_bytes": 1400 << 10, "enable_prefix_caching": False}),
    ],
)
def test_other_models_positions_and_caches(running, tmp_path, monkeypatch, kind, positions, options):
    running.close()  # one engine at a time
    folder = write_tiny_model(tmp_path, kind, seed=1)
    engine = VLLMEngine(**{"max_model_len": 512, "kv_cache_bytes": 64 << 20, **options})
    engine.start(folder, positions)
    scheduler = engine._engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda r, *a, **k: (preempted.append(r), preempt(r, *a, **k)))
    try:
        plan = replace(PLAN, positions=positions)
        rollouts = engine.generate_branching(some_requests(), SAMPLING, plan)
        policy = load_policy(folder, PolicySource(name=str(folder)))
        assert max(gaps(policy, rollouts, plan).values()) <= TOLERANCE
        assert max(shapes(rollouts)[0]) >= 2
        assert bool(preempted) == ("kv_cache_bytes" in options)
        other = replace(plan, positions="longest" if positions == "index" else "index")
        assert max(gaps(policy, rollouts, other).values()) > 0.1  # the scheme matters
    finally:
        engine.close()


def test_other_architectures_are_named(tmp_path):
    from parallel_r1.rollout.structured_models import overrides

    with pytest.raises(ValueError, match="positions: index"):
        overrides("Gemma3ForCausalLM")
