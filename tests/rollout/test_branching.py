"""The fork-join scheduler against an engine that says what it is told: no model, no tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.rollout.branching import Piece, Sampled, bans, number_of_paths, piece_seed, start_samples
from parallel_r1.rollout.engine import Branching, Request, RolloutEngine, Sampling, check_branching, require_mode
from parallel_r1.structure.tokens import TagIds, segments
from parallel_r1.types import Rollout

PAR, END_PAR, PATH, END_PATH, SUM, END_SUM = range(2, 8)
TAGS = TagIds(PAR, END_PAR, PATH, END_PATH, SUM, END_SUM)
EOS, X = 1, 9
SAMPLING = Sampling(eos_ids=(EOS,), banned=(50,))
PLAN = Branching(TAGS)
REQUEST = Request((20, PAR, 21), max_tokens=100, seed=5)  # the prompt names a tag, which means nothing

Script = Callable[[Piece], list[int]]


class FakeEngine:
    """Answers pieces from a script, cut at their budget. Keeps them until `run`, and answers in the order of `pick`."""

    def __init__(self, script: Script, pick: Callable[[int], int] = lambda waiting: 0) -> None:
        self.script, self.pick = script, pick
        self.pieces: list[Piece] = []
        self.waiting: list[tuple[Piece, Callable[[Sampled], None]]] = []
        self.done: dict[int, Rollout] = {}
        self.order: list[int] = []

    def submit(self, piece: Piece, then: Callable[[Sampled], None]) -> None:
        self.pieces.append(piece)
        self.waiting.append((piece, then))

    def finish(self, index: int, rollout: Rollout) -> None:
        assert index not in self.done
        self.done[index] = rollout
        self.order.append(index)

    def run(self, requests: list[Request], plan: Branching = PLAN, sampling: Sampling = SAMPLING) -> list[Rollout]:
        start_samples(requests, sampling, plan, self.submit, self.finish)
        while self.waiting:
            piece, then = self.waiting.pop(self.pick(len(self.waiting)))
            ids = self.script(piece)[: piece.max_tokens]
            assert not set(ids) & set(piece.banned)
            stops = [i for i, token in enumerate(ids) if token in piece.stops]
            ids = ids[: stops[0] + 1] if stops else ids
            assert stops or len(ids) == piece.max_tokens, "an engine stops at a stop or at the budget"
            then(Sampled(tuple(ids), tuple(-float(token) for token in ids)))
        return [self.done[i] for i in range(len(requests))]


def script(piece: Piece) -> list[int]:
    """Opens a block at once while it may, two words a path, one in the summary, then the end."""
    if piece.kind == "main":
        return [X, EOS] if PAR in piece.banned else [X, PAR]
    return [30 + piece.path, 30, END_PATH] if piece.kind == "path" else [40, END_SUM]


def respond(plan: Branching = PLAN, request: Request = REQUEST, using: Script = script) -> Rollout:
    return FakeEngine(using).run([request], plan)[0]


def test_one_block_by_hand() -> None:
    rollout = respond()
    assert rollout.response_ids == (
        *(X, PAR),
        *(PATH, 30, 30, END_PATH),
        *(PATH, 31, 30, END_PATH),
        *(END_PAR, SUM, 40, END_SUM),
        *(X, EOS),
    )
    inserted = {2, 6, 10, 11}  # <Path>, <Path>, </Parallel>, <Summary>
    assert [i for i, sampled in enumerate(rollout.sampled) if not sampled] == sorted(inserted)
    expected = [0.0 if i in inserted else -float(token) for i, token in enumerate(rollout.response_ids)]
    assert list(rollout.logprobs) == expected
    assert (rollout.finished, rollout.cuts, rollout.prompt_ids) == (True, 0, REQUEST.prompt_ids)


def test_a_path_goes_on_from_the_main_text_and_sees_no_sibling() -> None:
    engine = FakeEngine(script)
    engine.run([REQUEST])
    contexts = {(p.kind, p.path): p.context[len(REQUEST.prompt_ids) :] for p in engine.pieces}
    assert contexts[("path", 0)] == contexts[("path", 1)] == (X, PAR, PATH)
    assert contexts[("summary", -1)][-2:] == (END_PAR, SUM)
    assert all(p.prompt_length == 3 and p.context[:3] == REQUEST.prompt_ids for p in engine.pieces)


def test_each_token_records_what_was_banned_there() -> None:
    rollout = respond()
    tags = set(TAGS.all())
    first, path, summary, last = (set(rollout.banned[i]) for i in (0, 3, 12, 14))
    assert first == {50} | tags - {PAR}
    assert path == {50, EOS} | tags - {END_PATH}
    assert summary == {50, EOS} | tags - {END_SUM}
    assert last == {50} | tags  # the last block is behind: no <Parallel> any more
    assert rollout.banned[2] == ()


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_after_the_last_block_the_text_goes_on_to_its_end(blocks: int) -> None:
    rollout = respond(replace(PLAN, max_blocks=blocks))
    assert rollout.response_ids.count(PAR) == blocks
    assert rollout.response_ids[-2:] == (X, EOS)
    assert rollout.finished


def test_no_block_where_none_is_allowed() -> None:
    assert respond(replace(PLAN, max_blocks=0)).response_ids == (X, EOS)


def test_the_number_of_paths_is_drawn_for_each_block_from_the_seed() -> None:
    plan = replace(PLAN, paths=(2, 5), max_blocks=4)
    requests = [replace(REQUEST, seed=seed, max_tokens=400) for seed in range(30)]
    counts = set()
    for request, rollout in zip(requests, FakeEngine(script).run(requests, plan), strict=True):
        paths = [s for s in segments(rollout.response_ids, TAGS) if s.kind == "path"]
        for block in range(4):
            n = sum(s.block == block for s in paths)
            assert n == number_of_paths(request.seed, block, (2, 5))
            counts.add(n)
    assert counts == {2, 3, 4, 5}


def endless(piece: Piece) -> list[int]:
    """Opens blocks and never ends anything by itself."""
    return [X, PAR] if piece.kind == "main" and PAR not in piece.banned else [X] * piece.max_tokens


def test_budgets_close_paths_and_summaries_by_force() -> None:
    rollout = respond(replace(PLAN, max_path_tokens=3, max_summary_tokens=4), using=endless)
    assert rollout.response_ids[:20] == (
        *(X, PAR),
        *(PATH, X, X, X, END_PATH),
        *(PATH, X, X, X, END_PATH),
        *(END_PAR, SUM, X, X, X, X, END_SUM),
        X,
    )
    assert rollout.cuts == 3
    assert not any(rollout.sampled[i] for i in (6, 11, 18))
    assert len(rollout.response_ids) == REQUEST.max_tokens
    assert not rollout.finished


def test_a_path_that_closes_itself_on_its_last_token_is_not_cut() -> None:
    rollout = respond(replace(PLAN, max_path_tokens=3, max_summary_tokens=2))
    assert rollout.cuts == 0


def test_paths_share_what_is_left() -> None:
    engine = FakeEngine(endless)
    (rollout,) = engine.run([REQUEST], replace(PLAN, paths=(3, 3)))
    # 2 of 100 are main; of the rest, 3 <Path>, 3 </Path> and 2 tags are inserted: 30 for each path, no summary
    assert [p.max_tokens for p in engine.pieces] == [100, 30, 30, 30]
    assert len(rollout.response_ids) == REQUEST.max_tokens
    assert rollout.response_ids[-2:] == (END_PAR, SUM)
    assert (rollout.finished, rollout.cuts) == (False, 3)


def test_a_block_that_does_not_fit_is_a_cut() -> None:
    rollout = respond(request=replace(REQUEST, max_tokens=9))  # 2 + (2 * 3 + 2) would be 10
    assert rollout.response_ids == (X, PAR)
    assert (rollout.finished, rollout.cuts) == (False, 0)
    assert len(respond(request=replace(REQUEST, max_tokens=10)).response_ids) == 10


def test_a_summary_at_the_limit_is_left_open() -> None:
    rollout = respond(replace(PLAN, max_path_tokens=1), request=replace(REQUEST, max_tokens=14), using=endless)
    assert rollout.response_ids[8:] == (END_PAR, SUM, X, X, X, X)
    assert (rollout.finished, rollout.cuts) == (False, 2)


def test_openings_are_inserted_and_counted() -> None:
    rollout = respond(replace(PLAN, paths=(2, 2), openings=((60,), (61,), (62,))))
    assert rollout.response_ids[2:5] == (PATH, 60, 30)
    assert rollout.response_ids[7:10] == (PATH, 61, 31)
    assert not rollout.sampled[3]
    assert rollout.sampled[4]


def test_a_forced_block() -> None:
    engine = FakeEngine(script)
    (rollout,) = engine.run([replace(REQUEST, prefix_ids=(X, PAR))])
    assert engine.pieces[0].kind == "path"
    assert rollout.response_ids[:3] == (X, PAR, PATH)
    assert not any(rollout.sampled[:3])


def test_a_plain_prefix_that_uses_up_the_limit() -> None:
    rollout = respond(request=replace(REQUEST, prefix_ids=(X, X), max_tokens=2))
    assert rollout == Rollout(REQUEST.prompt_ids, (X, X), (0.0, 0.0), (False, False), False, ((), ()))


def test_seeds_differ_and_depend_on_the_request_alone() -> None:
    plan = replace(PLAN, paths=(2, 4), max_blocks=3)
    requests = [replace(REQUEST, seed=seed, max_tokens=400) for seed in range(8)]

    def seeds(batch: list[Request]) -> dict[int, set[int]]:
        engine = FakeEngine(script)
        engine.run(batch, plan)
        return {r.seed: {p.seed for p in engine.pieces if p.sample == i} for i, r in enumerate(batch)}

    together = seeds(requests)
    assert together == seeds(requests[::-1])
    assert together[3] == seeds([requests[3]])[3]
    everything = [seed for some in together.values() for seed in some]
    assert len(set(everything)) == len(everything)
    assert all(0 <= seed < 2**31 for seed in everything)
    assert piece_seed(1, 0, "path", 0) != piece_seed(1, 0, "main", 0)


def noisy(piece: Piece) -> list[int]:
    """Any text that the piece allows, drawn from its seed."""
    rng = random.Random(piece.seed)
    words = [X, X, 10, 11, *piece.stops]
    out: list[int] = []
    while len(out) < piece.max_tokens and not (out and out[-1] in piece.stops):
        out.append(rng.choice([w for w in words if w not in piece.banned]))
    return out


PLANS = st.builds(
    Branching,
    tags=st.just(TAGS),
    paths=st.integers(2, 4).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, 5))),
    max_blocks=st.integers(0, 3),
    max_path_tokens=st.none() | st.integers(1, 8),
    max_summary_tokens=st.none() | st.integers(1, 8),
    openings=st.just(()) | st.just(((60,), (61, 62), (63,), (64,), (65,))),
)


@settings(deadline=None)
@given(plan=PLANS, limit=st.integers(1, 80), seed=st.integers(0, 999), order=st.randoms(use_true_random=False))
def test_any_order_of_answers_gives_the_same_well_formed_responses(
    plan: Branching, limit: int, seed: int, order: random.Random
) -> None:
    requests = [replace(REQUEST, seed=seed + i, max_tokens=limit) for i in range(4)]
    first = FakeEngine(noisy).run(requests, plan)
    shuffled = FakeEngine(noisy, lambda waiting: order.randrange(waiting)).run(requests, plan)
    assert first == shuffled
    for rollout in first:
        ids, sampled = rollout.response_ids, rollout.sampled
        assert len(ids) <= limit
        assert rollout.finished == (ids[-1] == EOS and sampled[-1])
        assert EOS not in ids[:-1]
        parts = segments(ids, TAGS)
        assert ids.count(PAR) <= plan.max_blocks
        for part in parts:
            inside = ids[part.start : part.end]
            if part.kind == "path":
                assert inside[-1] == END_PATH
                assert sum(sampled[part.start : part.end]) <= (plan.max_path_tokens or limit)
            if part.kind == "summary":
                assert inside[-1] == END_SUM or part.end == len(ids) == limit
                assert sum(sampled[part.start : part.end]) <= (plan.max_summary_tokens or limit)
        forced = [i for i, token in enumerate(ids) if token in (END_PATH, END_SUM) and not sampled[i]]
        assert rollout.cuts == len(forced)


def test_no_sample_waits_for_another() -> None:
    """The first sample's paths are answered last; all others come through meanwhile."""
    engine = FakeEngine(script)
    engine.pick = lambda n: next((i for i, (p, _) in enumerate(engine.waiting) if p.sample), 0)
    engine.run([replace(REQUEST, seed=seed) for seed in range(4)])
    assert engine.order[-1] == 0


def test_bans_keep_each_segment_in_its_place() -> None:
    assert set(bans("main", True, SAMPLING, PLAN)) == {50, END_PAR, PATH, END_PATH, SUM, END_SUM}
    assert END_PATH not in bans("path", False, SAMPLING, PLAN)


@pytest.mark.parametrize(
    ("prefix", "plan", "message"),
    [
        ((PAR, PATH, 9), PLAN, r"request 0 has a prefix with control tags at \[0, 1\]"),
        ((9, END_SUM), PLAN, "without tags, or one with `<Parallel>` as its last token"),
        ((PAR,), replace(PLAN, max_blocks=0), "allow a block"),
        ((), replace(PLAN, paths=(1, 2)), "two or more paths"),
        ((), replace(PLAN, paths=(3, 2)), "the fewest first"),
        ((), replace(PLAN, openings=((60,),)), "1 openings for up to 2 paths"),
    ],
)
def test_what_cannot_be_sampled_is_refused(prefix: tuple[int, ...], plan: Branching, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_branching([replace(REQUEST, prefix_ids=prefix)], plan)


def test_an_engine_serves_what_it_was_started_for() -> None:
    require_mode(None, None)
    require_mode("index", "index")
    for started, asked in ((None, "index"), ("longest", "index"), ("longest", None)):
        with pytest.raises(RuntimeError, match="call start with the other `branching`"):
            require_mode(started, asked)


def test_an_engine_without_branches_says_which_have_them() -> None:
    class Plain(RolloutEngine):
        start = sync = generate = close = None  # type: ignore[assignment]

    with pytest.raises(NotImplementedError, match=r"Plain cannot isolate paths: .* choose VLLMEngine"):
        Plain().generate_branching([], SAMPLING, PLAN)
