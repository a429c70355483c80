"""Exact numbers: small ones as fractions, large ones by residues, everything else declined, always at once."""

from __future__ import annotations

import time
from fractions import Fraction
from math import factorial

import pytest

from parallel_r1.reward.exact import evaluate, residues, same_number
from parallel_r1.reward.normalize import clean


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7,425,000", 7425000),
        (".5", Fraction(1, 2)),
        (r"\frac12", Fraction(1, 2)),
        ("3 1/2", Fraction(7, 2)),
        (r"-3\frac{1}{2}", Fraction(-7, 2)),
        (r"3\cdot\frac{1}{2}", Fraction(3, 2)),
        (r"3\frac{5}{2}", Fraction(15, 2)),  # no mixed number: the fraction is improper
        ("1.2e-3", Fraction(12, 10_000)),
        (r"1.2 \times 10^{5}", 120_000),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r"0.\dot{1}4\dot{2}", Fraction(142, 999)),
        ("0.121212...", Fraction(12, 99)),
        ("-2^2", -4),
        ("(-2)^2", 4),
        ("2^3^2", 512),
        ("2^{-3}", Fraction(1, 8)),
        ("8^{1/3}", 2),
        (r"\sqrt[3]{-27}", -3),
        (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)),
        ("5!", 120),
        ("6!!", 48),
        (r"\binom{5}{2}", 10),
        ("(2+3)4", 20),
        ("6/2/3", 1),
        (r"\frac{10!}{3!7!}", 120),
    ],
)
def test_written_numbers(text: str, value: int | Fraction):
    assert evaluate(clean(text)) == value


@pytest.mark.parametrize(
    "text", ["x", "", "1 2", r"\sqrt{2}", r"\frac{1}{0}", "0^0", "2x", "1..2", "(1", "(1/2)!", "1+", r"\pi"]
)
def test_what_is_no_rational_number_is_declined(text: str):
    assert evaluate(clean(text)) is None


def test_large_numbers_compare_exactly():
    big = evaluate("2^{100000}")
    assert same_number(big, evaluate("4^{50000}"))
    assert not same_number(big, evaluate("2^{100000}+1"))
    assert not same_number(evaluate(r"\frac{1}{2004!}"), evaluate(r"\frac{1}{2006!}"))
    assert not same_number(evaluate(r"\frac{1}{2004!}"), Fraction(0))
    assert same_number(evaluate("2^{5000}/2^{4999}"), Fraction(2))
    assert evaluate("1000!") == residues(Fraction(factorial(1000)))


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}",
        "9^9^9^9",
        "(10^6)!",
        "((9!)!)!",
        "1^" * 900 + "1",
        "(" * 900,
        "-" * 900 + "1",
        "9" * 1900,
    ],
)
def test_hostile_numbers_are_declined_at_once(text: str):
    start = time.process_time()
    assert evaluate(text) is None
    assert time.process_time() - start < 0.2


def test_powers_out_of_reach_of_any_machine_still_compare():
    assert same_number(evaluate("2^{10^9}"), evaluate("4^{5\\cdot10^8}"))
    assert not same_number(evaluate("2^{10^9}"), evaluate("2^{10^9+1}"))
    assert same_number(evaluate("1e999999999"), evaluate("10^{999999999}"))
