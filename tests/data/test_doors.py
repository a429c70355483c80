"""The embedded task: splits, identity, right demonstrations, budgets, and what may not give the key away."""

from __future__ import annotations

import random
import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.data.doors import (
    LARGEST_GIFT,
    MOST_COINS,
    PIECE,
    ROOMS,
    Corridor,
    Maze,
    Tier,
    critical_budget,
    make_maze,
    make_problems,
    split_of,
)
from parallel_r1.reward.grading import grade
from parallel_r1.structure.grammar import parse
from parallel_r1.structure.tokens import TagIds, token_counts
from parallel_r1.tiny import doors_tokenizer
from parallel_r1.types import Problem

KINDS: list[tuple[Tier, int]] = [("easy", 2), ("easy", 3), ("hard", 2), ("hard", 3), ("harder", 2)]
SEEDS = st.integers(0, 2**32)
TOKENIZER = doors_tokenizer()
TAGS = TagIds.from_tokenizer(TOKENIZER)

#   C -+3-> B -+1-> M: key      K -+2-> A -+4-> D: shut      and, without a door,  E -+1-> F -+1-> G: key
MAZE = Maze(
    start=4,
    doors=(Corridor(("K", "A", "D"), (2, 4), "shut"), Corridor(("C", "B", "M"), (3, 1), "key")),
    hidden=(Corridor(("E", "F", "G"), (1, 1), "key"),),
)


def test_a_maze_in_words() -> None:
    question = MAZE.question(random.Random(0))
    assert re.fullmatch(r"\w+ has 4 coins\. Doors K C\.( \w: [\w +]+\.){9} Coins at the key\?", question)
    expected = ["K: A +2", "A: D +4", "D: shut", "C: B +3", "B: M +1", "M: key", "E: F +1", "F: G +1", "G: key"]
    assert sorted(re.findall(r" (\w: [^.]+)\.", question)) == sorted(expected)


def test_demonstrations_by_hand() -> None:
    block = (
        "<Parallel>"
        "<Path> 1 K: A +2 = 6 A: D +4 = 10 D: shut stuck</Path>"
        "<Path> 2 C: B +3 = 7 B: M +1 = 8 M: key found 8</Path>"
        "</Parallel><Summary> found 8</Summary>"
    )
    assert MAZE.answer == 8
    assert MAZE.demonstration("parallel", random.Random(0)) == block + "\nFinal Answer: 8"
    streams = {MAZE.demonstration("sequential", random.Random(seed)) for seed in range(20)}
    wrong, right = " K: A +2 = 6 A: D +4 = 10 D: shut stuck", " C: B +3 = 7 B: M +1 = 8 M: key found 8"
    assert streams == {
        f"{right}\nFinal Answer: 8",
        f"{wrong}{right}\nFinal Answer: 8",
    }  # in either order, until the key
    late = {MAZE.demonstration("late", random.Random(seed)) for seed in range(20)}
    assert late == {stream.replace("\nFinal Answer: 8", f"{block}\nFinal Answer: 8") for stream in streams}


def test_budget_by_hand() -> None:
    # <Parallel> </Parallel> 2; <Summary> found 8 </Summary> 4; a new line, Final Answer: 8 makes 4; the end 1; a path
    # <Path> 2 + (C: B +3 = 7) 5 + 5 + (M: key found 8) 4 + </Path> = 17 against 16 of the shut one (D: shut stuck)
    assert critical_budget(MAZE) == 2 + 4 + 4 + 1 + 17


@pytest.mark.parametrize("shares", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["parallel", "sequential", "late"])
def test_the_verifier_takes_every_style_of_demonstration(shares: tuple[int, int, int]) -> None:
    problems = make_problems("hard", "train", 50, shares=shares)
    assert all(verdict.correct for verdict in grade([(p.answer, p.demonstration) for p in problems]))


def walk(question: str) -> tuple[int, dict[str, int]]:
    """Solve a question from its words alone: the start, and for every door that leads to a key the coins there."""
    start = int(re.search(r"has (\d+) coins", question)[1])
    doors = re.search(r"Doors((?: [A-Z])+)\.", question)[1].split()
    links = {a: (b, int(coins)) for a, b, coins in re.findall(r" ([A-Z]): ([A-Z]) \+(\d+)\.", question)}
    ends = dict(re.findall(r" ([A-Z]): (key|shut)\.", question))
    found = {}
    for door in doors:
        room, coins = door, start
        while room in links:
            room, gift = links[room]
            coins += gift
        if ends[room] == "key":
            found[door] = coins
    return start, found


@pytest.mark.parametrize(("tier", "doors"), KINDS)
def test_a_question_has_one_answer_which_is_the_stated_one(tier: Tier, doors: int) -> None:
    for problem in make_problems(tier, "train", 100, doors):
        start, found = walk(problem.question)
        assert list(found.values()) == [int(problem.answer)]
        assert start < int(problem.answer) <= MOST_COINS


@pytest.mark.parametrize(("tier", "doors"), KINDS)
def test_demonstrations_are_well_formed_right_and_within_budget(tier: Tier, doors: int) -> None:
    for style, shares in (("parallel", (1, 0, 0)), ("sequential", (0, 1, 0)), ("late", (0, 0, 1))):
        for problem in make_problems(tier, "train", 60, doors, shares):
            response = parse(problem.demonstration)
            assert response.well_formed
            assert response.is_parallel == (style != "sequential")
            assert problem.demonstration.endswith(f"Final Answer: {problem.answer}")
            if style != "sequential":
                (block,) = response.blocks
                assert len(block.paths) == doors
                assert block.summary == f" found {problem.answer}"
                assert [p.endswith(f"found {problem.answer}") for p in block.paths].count(True) == 1
                assert (block.start == 0) == (style == "parallel")
            ids = [*TOKENIZER(problem.demonstration).input_ids, TOKENIZER.eos_token_id]
            total, critical = token_counts(ids, [True] * len(ids), TAGS)
            budget = problem.meta["critical_budget"]
            if style == "parallel":
                assert critical == budget < total
            elif style == "late":
                assert critical > budget


@pytest.mark.parametrize(("tier", "doors"), [("hard", 2), ("hard", 3)])
def test_one_stream_fits_the_budget_only_by_luck(tier: Tier, doors: int) -> None:
    """Why parallel pays: in one stream the budget is enough for one corridor, so one door in `doors` times."""
    within = 0
    problems = make_problems(tier, "train", 400, doors, (0, 1, 0))
    for problem in problems:
        within += len(TOKENIZER(problem.demonstration).input_ids) + 1 <= problem.meta["critical_budget"]
    assert within / len(problems) == pytest.approx(1 / doors, abs=0.08)  # 3 deviations of 400 are 0.075


# --------------------------------------------------------------------------- identity and splits


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, data=st.data())
def test_identity_is_independent_of_wording(seed: int, data: st.DataObject) -> None:
    maze = make_maze(random.Random(seed), "easy", 2)
    other = Maze(maze.start, maze.doors[::-1], tuple(data.draw(st.permutations(maze.hidden))))
    assert other.identity() == maze.identity()
    assert len({maze.question(random.Random(i)) for i in range(5)}) > 1  # the wording does differ


def test_identity_depends_on_everything_that_matters() -> None:
    key, shut, hidden = MAZE.doors[1], MAZE.doors[0], MAZE.hidden[0]
    others = [
        Maze(5, MAZE.doors, MAZE.hidden),  # the start
        Maze(4, (shut, Corridor(key.rooms, (3, 2), "key")), MAZE.hidden),  # a gift
        Maze(4, (shut, Corridor(("C", "B", "N"), (3, 1), "key")), MAZE.hidden),  # a room
        Maze(4, (shut, hidden), (key,)),  # which corridor has the door
        Maze(4, (Corridor(shut.rooms, shut.gifts, "key"), Corridor(key.rooms, key.gifts, "shut")), MAZE.hidden),  # ends
        Maze(4, MAZE.doors, ()),  # the hidden corridor
    ]
    assert len({maze.identity() for maze in [MAZE, *others]}) == 7


def from_words(problem: Problem) -> str:
    """The identity of a problem as read off its words, whatever order they come in."""
    head, *links = re.split(r"(?<=\.)", problem.question.removesuffix(" Coins at the key?"))
    doors, *links = links
    return repr((re.search(r"\d+", head)[0], sorted(doors.removesuffix(".").split()[1:]), sorted(links)))


@pytest.mark.parametrize(("tier", "doors"), KINDS)
def test_splits_share_no_problem_in_any_wording(tier: Tier, doors: int) -> None:
    found = {split: make_problems(tier, split, 150, doors) for split in ("train", "val", "test")}
    for split, problems in found.items():
        assert all(split_of(problem.id) == split for problem in problems)
        assert len({problem.id for problem in problems}) == len({from_words(p) for p in problems}) == 150
        assert all(problem.tier == tier for problem in problems)
    everything = [from_words(problem) for problems in found.values() for problem in problems]
    assert len(set(everything)) == 450


def test_other_seeds_of_one_split_stay_in_it() -> None:
    for seed in (1, 2):
        assert all(split_of(problem.id) == "val" for problem in make_problems("easy", "val", 50, seed=seed))


def test_split_shares() -> None:
    rng = random.Random(0)
    splits = [split_of(f"{rng.getrandbits(64):016x}") for _ in range(4000)]
    # 3 deviations of a share of 0.1 in 4,000 draws are 0.014
    assert splits.count("val") / 4000 == pytest.approx(0.1, abs=0.015)
    assert splits.count("test") / 4000 == pytest.approx(0.1, abs=0.015)


def test_the_same_arguments_give_the_same_list() -> None:
    first = make_problems("hard", "train", 30, 2, (0.5, 0.3, 0.2), seed=5)
    assert make_problems("hard", "train", 30, 2, (0.5, 0.3, 0.2), seed=5) == first
    assert make_problems("hard", "train", 10, 2, (0.5, 0.3, 0.2), seed=5) == first[:10]
    others = [make_problems("hard", "train", 30, 2, seed=6), make_problems("hard", "val", 30, 2, seed=5)]
    assert not {p.id for other in others for p in other} & {p.id for p in first}


def test_a_maze_drawn_twice_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats are too rare to wait for, so the generator is made to draw each of a few mazes three times."""
    rng = random.Random(0)
    pool = [maze for _ in range(40) for maze in [make_maze(rng, "easy", 2)] * 3]
    monkeypatch.setattr("parallel_r1.data.doors.make_maze", lambda *_: pool.pop(0))
    found = [problem.id for problem in make_problems("easy", "train", 20)]
    assert len(found) == len(set(found)) == 20


def test_shares_decide_the_styles() -> None:
    def counts(shares: tuple[float, float, float]) -> tuple[int, int, int]:
        demonstrations = [p.demonstration for p in make_problems("easy", "train", 400, shares=shares)]
        parallel = sum(text.startswith("<Parallel>") for text in demonstrations)
        sequential = sum("<Parallel>" not in text for text in demonstrations)
        return parallel, sequential, len(demonstrations) - parallel - sequential

    assert counts((1.0, 0.0, 0.0)) == (400, 0, 0)
    assert counts((0.0, 0.0, 1.0)) == (0, 0, 400)
    for found, share in zip(counts((0.6, 0.25, 0.15)), (0.6, 0.25, 0.15), strict=True):
        assert found / 400 == pytest.approx(share, abs=0.075)


# --------------------------------------------------------------------------- shape, and no short cut


@pytest.mark.parametrize(
    ("tier", "doors", "lengths"),
    [("easy", 2, {1, 2, 3}), ("easy", 3, {1, 2, 3}), ("hard", 2, {4}), ("hard", 3, {4}), ("harder", 2, {5})],
)
def test_tiers_differ_in_the_length_of_corridors(tier: Tier, doors: int, lengths: set[int]) -> None:
    rng, seen = random.Random(0), set()
    for _ in range(200):
        maze = make_maze(rng, tier, doors)
        corridors = maze.doors + maze.hidden
        (length,) = {len(corridor.gifts) for corridor in corridors}  # one length a maze: it tells corridors apart least
        seen.add(length)
        rooms = [room for corridor in corridors for room in corridor.rooms]
        assert len(set(rooms)) == len(rooms) <= len(ROOMS)
        assert all(1 <= gift <= LARGEST_GIFT for corridor in corridors for gift in corridor.gifts)
        assert [corridor.end for corridor in maze.doors].count("key") == 1
        assert "key" in [corridor.end for corridor in maze.hidden]
        assert len(maze.doors) == doors
        assert tier == "easy" or len(maze.hidden) == 1
        assert max(maze.start + sum(corridor.gifts) for corridor in corridors) <= MOST_COINS
    assert seen == lengths


@pytest.mark.parametrize("doors", [2, 3])
def test_neither_order_nor_coins_nor_names_tell_the_door_of_the_key(doors: int) -> None:
    rng, n = random.Random(0), 2000
    place, first_link, richer, name = [0] * doors, 0, 0, 0
    for _ in range(n):
        maze = make_maze(rng, "hard", doors)
        key = next(i for i, corridor in enumerate(maze.doors) if corridor.end == "key")
        right, hidden = maze.doors[key], maze.hidden[0]
        place[key] += 1
        question = maze.question(rng)
        first_link += question.index(f" {right.rooms[-1]}: key") < question.index(f" {hidden.rooms[-1]}: key")
        richer += (sum(right.gifts) > sum(hidden.gifts)) + 0.5 * (sum(right.gifts) == sum(hidden.gifts))
        name += right.rooms[0] < hidden.rooms[0]
    # 4 deviations of a share of 1/2 in 2,000 draws are 0.045
    for count in place:
        assert count / n == pytest.approx(1 / doors, abs=0.045)
    for count in (first_link, richer, name):
        assert count / n == pytest.approx(0.5, abs=0.045)


def test_a_hidden_corridor_looks_like_any_other_but_for_its_door() -> None:
    """Give the door to the hidden corridor instead, and the words are those of a maze just as likely."""
    key, hidden = MAZE.doors[1], MAZE.hidden[0]
    swapped = Maze(MAZE.start, (MAZE.doors[0], hidden), (key,))
    one, other = MAZE.question(random.Random(1)), swapped.question(random.Random(2))

    def links(question: str) -> list[str]:
        return sorted(re.findall(r" [A-Z]: [^.]+\.", question))

    assert links(one) == links(other)
    assert re.search(r"Doors[^.]*", one)[0] == "Doors K C"
    assert re.search(r"Doors[^.]*", other)[0] == "Doors K E"


@settings(deadline=None)
@given(seed=SEEDS, kind=st.sampled_from(KINDS))
def test_pieces_cover_every_character(seed: int, kind: tuple[Tier, int]) -> None:
    """The budget counts pieces, so none may be lost between them."""
    rng = random.Random(seed)
    maze = make_maze(rng, *kind)
    for text in (maze.question(rng), *(maze.demonstration(s, rng) for s in ("parallel", "sequential", "late"))):
        assert "".join(PIECE.findall(text)) == text


def test_budget_is_the_best_of_all_paths_by_brute_force() -> None:
    rng = random.Random(3)
    for tier, doors in product(("easy", "hard"), (2, 3)):
        maze = make_maze(rng, tier, doors)
        text = maze.demonstration("parallel", rng)
        block = parse(text).blocks[0]
        lengths = [len(TOKENIZER(f"<Path>{path}</Path>").input_ids) for path in block.paths]
        outside = len(TOKENIZER(text).input_ids) - sum(lengths)
        assert critical_budget(maze) == outside + max(lengths) + 1
