"""The embedded task "doors": small word problems on which thinking in parallel pays, generated from a seed.

    Joy has 4 coins. Doors C K. M: key. A: G +4. C: B +3. ... Coins at the key?

Every door opens a corridor of rooms; ` C: B +3.` says that room C leads to room B, where 3 coins lie. The links are
listed shuffled. One corridor ends at the key, the others are shut, and a corridor that no door opens ends at a key as
well, so that walking back from the key is a coin flip. The answer is the start plus the coins on the way to the key.

Why parallel pays: which door is right shows only at the end of its corridor. One stream must try door after door; paths
try all of them at once, so that a right answer takes fewer critical tokens (it does NOT take fewer tokens in all).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from parallel_r1.structure.grammar import TAGS, render_block
from parallel_r1.types import Problem

NAMES = ("Tom", "Ann", "Sam", "Eve", "Max", "Joy", "Ben", "Liz")
ROOMS = "ABCDEFGHIJKLMNOPQRST"
MOST_COINS = 32  # no count on the way is larger: keeps the vocabulary of numbers small
LARGEST_GIFT = 4
ROOMS_OF_TIER: dict[str, tuple[int, ...]] = {"easy": (1, 2, 3), "hard": (4,), "harder": (5,)}

Tier = Literal["easy", "hard", "harder"]
Style = Literal["parallel", "sequential", "late"]
Split = Literal["train", "val", "test", "predict"]

# what a token is in this task: a room with or without colon, a number with or without plus, a word, a sign
PIECE = re.compile("|".join(map(re.escape, TAGS)) + r"| ?[A-Z](?![a-z]):?| ?\+?\d+| ?[A-Za-z]+[:?]?| ?[^\sA-Za-z\d]|\s")


@dataclass(frozen=True)
class Corridor:
    """rooms: names in walking order; gifts: coins found on entering rooms[1:]; end: what stands in the last room."""

    rooms: tuple[str, ...]
    gifts: tuple[int, ...]
    end: Literal["key", "shut"]

    def links(self) -> list[str]:
        steps = zip(self.rooms, self.rooms[1:], self.gifts, strict=False)
        return [f" {a}: {b} +{coins}." for a, b, coins in steps] + [f" {self.rooms[-1]}: {self.end}."]

    def walk(self, coins: int) -> str:
        """The reasoning of somebody who walks this corridor with `coins` in hand."""
        text = ""
        for room, following, gift in zip(self.rooms, self.rooms[1:], self.gifts, strict=False):
            coins += gift
            text += f" {room}: {following} +{gift} = {coins}"
        return f"{text} {self.rooms[-1]}: " + (f"key found {coins}" if self.end == "key" else "shut stuck")


@dataclass(frozen=True)
class Maze:
    """start: coins at first; doors: the corridors that a door opens, in the order listed; hidden: the others."""

    start: int
    doors: tuple[Corridor, ...]
    hidden: tuple[Corridor, ...]

    @property
    def answer(self) -> int:
        return self.start + sum(next(c for c in self.doors if c.end == "key").gifts)

    def links(self) -> list[str]:
        return [link for corridor in self.doors + self.hidden for link in corridor.links()]

    def identity(self) -> str:
        """The same for every wording: neither the order of doors and links nor the name counts."""
        key = repr((self.start, sorted(c.rooms[0] for c in self.doors), sorted(self.links())))
        return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()

    def question(self, rng: random.Random) -> str:
        links = self.links()
        rng.shuffle(links)
        doors = "".join(f" {corridor.rooms[0]}" for corridor in self.doors)
        return f"{rng.choice(NAMES)} has {self.start} coins. Doors{doors}.{''.join(links)} Coins at the key?"

    def demonstration(self, style: Style, rng: random.Random) -> str:
        """A right response: path i takes door i; one stream tries the doors in random order until it has the key."""
        answer = f"\nFinal Answer: {self.answer}"
        paths = [f" {i}{corridor.walk(self.start)}" for i, corridor in enumerate(self.doors, 1)]
        block = render_block(paths, f" found {self.answer}")
        if style == "parallel":
            return block + answer
        order = list(self.doors)
        rng.shuffle(order)
        tried = order[: [c.end for c in order].index("key") + 1]
        stream = "".join(corridor.walk(self.start) for corridor in tried)
        return f"{stream}{answer}" if style == "sequential" else f"{stream}{block}{answer}"


def make_maze(rng: random.Random, tier: Tier, doors: int) -> Maze:
    """Draw a maze: `doors` corridors with a door, one without that ends at a key, perhaps others (easy only)."""
    length = rng.choice(ROOMS_OF_TIER[tier])
    fewest = doors + 1
    most = max(fewest, 15 // (length + 1)) if tier == "easy" else fewest
    count = rng.randint(fewest, most)
    names = rng.sample(ROOMS, count * (length + 1))
    ends: list[Literal["key", "shut"]] = ["shut"] * doors + ["key"]
    ends += [rng.choice(("key", "shut")) for _ in range(count - fewest)]
    ends[rng.randrange(doors)] = "key"
    corridors = [
        Corridor(
            tuple(names[i * (length + 1) : (i + 1) * (length + 1)]),
            tuple(rng.randint(1, LARGEST_GIFT) for _ in range(length)),
            end,
        )
        for i, end in enumerate(ends)
    ]
    opened = corridors[:doors]
    rng.shuffle(opened)
    return Maze(rng.randint(1, MOST_COINS - LARGEST_GIFT * length), tuple(opened), tuple(corridors[doors:]))


def split_of(identity: str) -> Split:
    """The split a problem belongs to, by its identity alone: 10 % val, 10 % test, the rest train."""
    return {0: "val", 1: "test"}.get(int(identity[:8], 16) % 10, "train")


def make_problems(
    tier: Tier,
    split: Split,
    size: int,
    doors: int = 2,
    shares: Sequence[float] = (0.5, 0.5, 0.0),
    seed: int = 0,
) -> list[Problem]:
    """`size` different problems of one tier and split; the same arguments give the same list.

    shares: of the styles parallel, sequential, late among the demonstrations.
    meta["critical_budget"]: critical tokens of a perfect parallel response, end-of-sequence token included.
    """
    return list(_made(tier, split, size, doors, tuple(shares), seed))


@lru_cache(maxsize=16)  # the stages of a curriculum share their validation problems
def _made(tier: Tier, split: Split, size: int, doors: int, shares: tuple[float, ...], seed: int) -> tuple[Problem, ...]:
    rng = random.Random(f"doors/{tier}/{split}/{doors}/{seed}")
    return tuple(_draw(rng, tier, split, size, doors, shares))


def _draw(
    rng: random.Random, tier: Tier, split: Split, size: int, doors: int, shares: Sequence[float]
) -> Iterator[Problem]:
    seen: set[str] = set()
    while len(seen) < size:
        maze = make_maze(rng, tier, doors)
        identity = maze.identity()
        if identity in seen or split_of(identity) != split:
            continue
        seen.add(identity)
        style: Style = rng.choices(("parallel", "sequential", "late"), shares)[0]
        yield Problem(
            id=identity,
            question=maze.question(rng),
            answer=str(maze.answer),
            tier=tier,
            demonstration=maze.demonstration(style, rng),
            meta={"critical_budget": critical_budget(maze)},
        )


def critical_budget(maze: Maze) -> int:
    """Critical tokens of a perfect parallel response: all but the shorter paths, plus the end-of-sequence token."""
    paths = [len(PIECE.findall(f"<Path> {i}{c.walk(maze.start)}</Path>")) for i, c in enumerate(maze.doors, 1)]
    whole = len(PIECE.findall(maze.demonstration("parallel", random.Random(0)))) + 1
    return whole - sum(paths) + max(paths)


def vocabulary() -> list[str]:
    """Every piece that a problem or a response of this task can hold, in a fixed order."""
    rooms = [f" {room}{mark}" for room in ROOMS for mark in ("", ":")]
    numbers = [f" {n}" for n in range(MOST_COINS + 1)] + [f" +{n}" for n in range(1, LARGEST_GIFT + 1)]
    words = [" has", " coins", " Doors", " Coins", " at", " the", " key", " key?", " shut", " stuck", " found"]
    return ["\n", ".", " =", "Final", " Answer:", *words, *NAMES, *numbers, *rooms]
