"""Rewards: each formula by hand, composition in YAML and on the command line, schedules as functions of the step."""

from __future__ import annotations

import math

import pytest
import yaml
from jsonargparse import ArgumentParser

from parallel_r1.reward import rewards as R
from parallel_r1.structure.grammar import parse
from parallel_r1.types import Judged, Problem

PROBLEM = Problem("p", "1 + 1?", "2", "easy")
BLOCK = "<Parallel><Path>one and one is 2</Path><Path>count up from one: 2</Path></Parallel><Summary>it is 2</Summary>"
TWINS = "<Parallel><Path>it is 2</Path><Path>it is 2</Path></Parallel><Summary>2</Summary>"
SPLIT = "<Parallel><Path>it is 2</Path><Path>no, 3</Path></Parallel><Summary>2</Summary>"
BROKEN = "<Parallel><Path>it is 2</Path></Parallel>"

S2 = "{class_path: Alternate, init_args: {rewards: [{class_path: Accuracy}, {class_path: Tiered}], steps: [8, 2]}}"
PAPER = {
    "stage 1": "{class_path: Gate, init_args: {terms: [{class_path: Accuracy}, {class_path: UsesParallel}]}}",
    "S1": "{class_path: Accuracy}",
    "S2": S2,
    "scaffold": f"{{class_path: Switch, init_args: {{at_step: 200, before: {S2}, after: {{class_path: Accuracy}}}}}}",
    "parallel only": "{class_path: UsesParallel}",
    "diversity": "{class_path: Sum, init_args: {terms: [{class_path: Accuracy}, {class_path: PathDiversity}], "
    "weights: [1.0, 0.2]}}",
    "efficiency": "{class_path: Sum, init_args: {terms: [{class_path: Accuracy}, {class_path: Efficiency}], "
    "weights: [1.0, 0.2]}}",
}


def judged(text: str = "2", correct: bool = True, finished: bool = True, total: int = 10, critical: int = 10) -> Judged:
    return Judged(PROBLEM, text, parse(text), correct, finished, total, critical)


def total(reward: R.Reward, *samples: Judged, step: int = 0) -> list[float]:
    return reward.score(samples, step).total


def build(text: str, *arguments: str) -> R.Reward:
    """Through jsonargparse, the way a configuration does it."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(R.Reward, "reward")
    config = parser.parse_args([f"--reward={text}", *arguments])
    return parser.instantiate(config).reward


# -- terms


def test_accuracy_is_plus_or_minus_one_and_a_cut_response_is_never_right():
    samples = judged(), judged(correct=False), judged(finished=False)
    assert total(R.Accuracy(), *samples) == [1.0, -1.0, -1.0]
    assert total(R.Tiered(), judged(BLOCK, finished=False)) == [-1.0]
    assert total(R.Efficiency(), judged(finished=False, critical=5)) == [0.0]


def test_format_asks_for_grammar_and_uses_parallel_for_a_block():
    samples = judged(), judged(BLOCK), judged(BROKEN), judged(BLOCK + BROKEN)
    assert total(R.Format(), *samples) == [1.0, 1.0, -1.0, -1.0]
    assert total(R.UsesParallel(), *samples) == [-1.0, 1.0, -1.0, 1.0]


def test_diversity_is_undefined_without_paths_zero_for_twins_and_earned_only_where_right():
    samples = judged(), judged(TWINS), judged(BLOCK), judged(BLOCK, correct=False)
    scores = R.PathDiversity().score(samples, 0)
    none, twins, different, wrong = scores.terms["path_diversity"]
    assert none is None
    assert twins == 0.0
    assert 0.0 < different <= 1.0
    assert wrong == 0.0
    assert scores.total == [0.0, 0.0, different, 0.0]


def test_efficiency_is_what_parallel_paths_save():
    samples = judged(total=100, critical=60), judged(correct=False, total=100, critical=60), judged(total=0, critical=0)
    scores = R.Efficiency().score(samples, 0)
    assert scores.terms["efficiency"] == [pytest.approx(0.4), 0.0, None]
    assert scores.total == [pytest.approx(0.4), 0.0, 0.0]


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (500, -1.0)])
def test_length_is_the_soft_overlong_punishment(tokens: int, value: float):
    assert total(R.Length(max_tokens=100, buffer=20), judged(total=tokens)) == [pytest.approx(value)]


def test_verification_is_the_share_of_paths_that_bear_the_summary_out():
    samples = judged(), judged(TWINS), judged(SPLIT), judged(TWINS, correct=False)
    assert R.Verification().score(samples, 0).terms["verification"] == [None, 1.0, 0.5, 0.0]


# -- combinators


def test_tiered_pays_the_block_only_where_the_answer_is_right():
    samples = judged(BLOCK), judged(), judged(BLOCK, correct=False), judged(correct=False)
    assert total(R.Tiered(), *samples) == [1.2, 1.0, -1.0, -1.0]


def test_gate_asks_for_all_terms():
    gate = R.Gate([R.Accuracy(), R.UsesParallel()])
    samples = judged(BLOCK), judged(), judged(BLOCK, correct=False), judged(correct=False)
    scores = gate.score(samples, 0)
    assert scores.total == [1.0, -1.0, -1.0, -1.0]
    assert scores.terms == {"accuracy": [1.0, 1.0, -1.0, -1.0], "uses_parallel": [1.0, -1.0, 1.0, -1.0]}


def test_sum_weighs_and_an_undefined_term_adds_nothing():
    reward = R.Sum([R.Accuracy(), R.PathDiversity()], [1.0, 0.5])
    scores = reward.score([judged(), judged(TWINS), judged(BLOCK, correct=False)], 0)
    assert scores.total == [1.0, 1.0, -1.0]
    assert total(R.Sum([R.Accuracy(), R.Format()]), judged()) == [2.0]


def test_alternate_follows_its_windows_from_the_step_alone():
    reward = R.Alternate([R.Accuracy(), R.Tiered()], [8, 2])
    seen = [total(reward, judged(BLOCK), step=step)[0] for step in range(25)]
    assert seen == ([1.0] * 8 + [1.2] * 2) * 2 + [1.0] * 5
    # In any order, from any start: a resumed run continues exactly.
    assert [total(reward, judged(BLOCK), step=step)[0] for step in (19, 3, 8)] == [1.2, 1.0, 1.2]


def test_switch_changes_at_its_step():
    reward = R.Switch(3, before=R.Tiered(), after=R.Accuracy())
    assert [total(reward, judged(BLOCK), step=step)[0] for step in range(5)] == [1.2, 1.2, 1.2, 1.0, 1.0]


def test_names_of_terms_are_distinct_and_do_not_depend_on_values():
    reward = R.Sum([R.Length(100, 10), R.Length(50, 10), R.Gate([R.Accuracy(), R.Format()])])
    for tokens in (0, 45, 1000):
        assert list(reward.score([judged(total=tokens)], 0).terms) == ["length", "length_2", "accuracy", "format"]
    assert list(reward.score([], 0).terms) == ["length", "length_2", "accuracy", "format"]
    assert reward.score([], 0).total == []


# -- any function, any class


def two_a_token(sample: Judged, step: int) -> float:
    return 2.0 * sample.total_tokens + step


def not_a_number(sample: Judged, step: int) -> float:
    return math.nan


class Bonus(R.Term):
    def __init__(self, bonus: float = 1.0) -> None:
        self.bonus = bonus

    def value(self, sample: Judged) -> float:
        return self.bonus


def test_a_function_is_a_reward_by_its_import_path():
    reward = build(f"{{class_path: FromCallable, init_args: {{function: {__name__}.two_a_token}}}}")
    scores = reward.score([judged(total=3)], 4)
    assert scores.total == [10.0]
    assert scores.terms == {"two_a_token": [10.0]}


def breaks(sample, step):
    return 1 / (sample.total_tokens - 3)


@pytest.mark.parametrize(
    ("function", "cause"), [("not_a_number", "it returned nan"), ("breaks", "ZeroDivisionError: division by zero")]
)
def test_a_function_that_fails_names_the_sample_or_scores_it(function: str, cause: str):
    function = globals()[function]
    samples = [judged(total=3), judged(total=4)][: 1 if function is not_a_number else 2]
    named = rf"{function.__name__} failed on a response to problem {samples[0].problem.id} .*{cause}.*on_error=score"
    with pytest.raises(RuntimeError, match=named):
        R.FromCallable(function).score(samples, 0)
    scores = R.FromCallable(function, on_error="score", error_score=-2.0).score(samples, 0)
    assert scores.total == [-2.0, 1.0][: len(samples)]
    assert scores.terms[f"{function.__name__}_errors"] == [1.0, 0.0][: len(samples)]


def test_a_class_of_ones_own_is_a_reward_by_its_import_path():
    assert total(build(f"{{class_path: {__name__}.Bonus, init_args: {{bonus: 3}}}}"), judged()) == [3.0]


# -- configuration


@pytest.mark.parametrize("name", PAPER)
def test_each_reward_of_the_paper_is_one_line_of_yaml(name: str):
    assert isinstance(yaml.safe_load(PAPER[name]), dict)
    reward = build(PAPER[name])
    right_with, right_without, wrong = judged(BLOCK, total=20, critical=10), judged(), judged(BLOCK, correct=False)
    got = {step: total(reward, right_with, right_without, wrong, step=step) for step in (0, 9, 10, 199, 200, 209)}
    accuracy, tiered = [1.0, 1.0, -1.0], [1.2, 1.0, -1.0]
    if name in ("stage 1", "S1", "parallel only"):
        expected = {"stage 1": [1.0, -1.0, -1.0], "S1": accuracy, "parallel only": [1.0, -1.0, 1.0]}[name]
        assert set(map(tuple, got.values())) == {tuple(expected)}
    elif name == "S2":
        assert got == {0: accuracy, 9: tiered, 10: accuracy, 199: tiered, 200: accuracy, 209: tiered}
    elif name == "scaffold":
        assert got == {0: accuracy, 9: tiered, 10: accuracy, 199: tiered, 200: accuracy, 209: accuracy}
    elif name == "efficiency":
        assert got[0] == [pytest.approx(1.1), 1.0, -1.0]
    else:
        assert 1.0 < got[0][0] <= 1.2
        assert got[0][1:] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["Accuracy"], [1.0, 1.0, -1.0]),
        (["Gate", "--reward.terms=[Accuracy,UsesParallel]"], [1.0, -1.0, -1.0]),
        (["Gate", "--reward.terms+=Accuracy", "--reward.terms+=UsesParallel"], [1.0, -1.0, -1.0]),
        (["Tiered", "--reward.with_block=1.5"], [1.5, 1.0, -1.0]),
        (["Sum", "--reward.terms=[Accuracy,UsesParallel]", "--reward.weights=[1,0.5]"], [1.5, 0.5, -0.5]),
        (["Switch", "--reward.at_step=1", "--reward.before=UsesParallel", "--reward.after=Accuracy"], [1.0, -1.0, 1.0]),
        (["Length", "--reward.max_tokens=12", "--reward.buffer=4"], [-0.5, -0.5, -0.5]),
    ],
)
def test_rewards_compose_on_the_command_line(arguments: list[str], expected: list[float]):
    reward = build(*arguments)
    assert total(reward, judged(BLOCK), judged(), judged(BLOCK, correct=False)) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: R.Length(100, 200), r"Length\.buffer = 200.*max_tokens = 100"),
        (lambda: R.Length(0, 1), r"Length\.max_tokens = 0"),
        (lambda: R.Gate([]), r"Gate\.terms is empty"),
        (lambda: R.Sum([R.Accuracy()], [1.0, 2.0]), r"Sum\.weights has 2 entries for 1 terms"),
        (lambda: R.Sum([R.Accuracy()], [math.inf]), r"Sum\.weights .* finite"),
        (lambda: R.Alternate([R.Accuracy()], [8, 2]), r"Alternate\.steps has 2 entries for 1 rewards"),
        (lambda: R.Alternate([R.Accuracy(), R.Tiered()], [8, 0]), r"Alternate\.steps = \[8, 0\]"),
        (lambda: R.Switch(-1, R.Accuracy(), R.Tiered()), r"Switch\.at_step = -1"),
        (lambda: R.Accuracy(-1.0, 1.0), r"Accuracy\.right = -1\.0 must be .* above Accuracy\.wrong = 1\.0"),
        (lambda: R.Tiered(with_block=math.nan), r"Tiered\.with_block = nan"),
        (lambda: R.FromCallable(3), r"FromCallable\.function = 3 is not callable"),
    ],
)
def test_a_bad_value_is_refused_with_key_and_remedy(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
