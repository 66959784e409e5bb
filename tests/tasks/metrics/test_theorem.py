import json
import math
import random

import pytest
from support import metric_reference as slow
from support.data import data_path

from kvbench.tasks.metrics.arithmetic import evaluate_first, read_numbers
from kvbench.tasks.metrics.theorem import find_announced_answer, is_close, parse_reference, theorem_match
from kvbench.tasks.rows import read_rows


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("no number", None),
        ("42", 42),
        ("-42.", -42),
        ("−0.5", -0.5),
        (".5", 0.5),
        ("1,234,567.5", 1234567.5),
        ("3.5e-8", 3.5e-8),
        ("3.5 × 10^{-8} m", 3.5e-8),
        ("3.5 \\times 10^{-8}\\text{ m}", 3.5e-8),
        ("2 * 10**3", 2000),
        ("1/3", 1 / 3),
        ("$\\frac{1}{3}$", 1 / 3),
        ("\\dfrac{\\sqrt{3}}{\\frac{4}{2}}", math.sqrt(3) / 2),
        ("2\\pi", 2 * math.pi),
        ("\\frac{\\pi}{4}", math.pi / 4),
        ("3π/2 rad", 1.5 * math.pi),
        ("e^2", math.e**2),
        ("2^3^2", 512),
        ("-2^2", -4),
        ("(1+2)*3", 9),
        ("5!/3!", 20),
        ("25%", 0.25),
        ("about 7 apples", 7),
        ("i.e. 7", 7),
        ("7 (approximately)", 7),
        ("7 +", 7),
        ("sqrt(16)", 4),
        ("ln(1)", 0),
        ("1/0", None),
        ("log(0)", None),
        ("(-8)^(1/3)", None),
        ("10^1000", None),
        ("1e999", None),
        ("9" * 5000, None),
    ],
)
def test_evaluate(text, value):
    assert evaluate_first(text) == (None if value is None else pytest.approx(value, rel=1e-12))


def test_evaluate_equals_python_on_random_arithmetic():
    rng = random.Random(0)

    def expression(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.choice([rng.randrange(1, 50), round(rng.uniform(0.1, 9), 2)]))
        pick = rng.random()
        if pick < 0.15:
            return f"-{expression(depth - 1)}"
        if pick < 0.4:
            return f"({expression(depth - 1)})"
        return f"{expression(depth - 1)}{rng.choice([' + ', '-', '*', ' / '])}{expression(depth - 1)}"

    tried = 0
    for _ in range(500):
        text = expression(4)
        try:
            right = eval(text)
        except ZeroDivisionError:
            continue
        assert evaluate_first(f"{text} kg") == pytest.approx(right, rel=1e-12), text
        tried += 1
    assert tried > 450


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text", ["(" * 5000, "-" * 5000, "[" * 5000, "{" * 5000, "\\frac{" * 800, "1^" * 2500, "sqrt" * 1200]
)
def test_hostile_answers_cost_little(text):
    for reference in ("7", "7.5", "[7, 8]", "(a)", "True"):
        assert theorem_match(f"The answer is {text}", reference) == 0.0
        assert theorem_match(f"\\boxed{{{text}", reference) == 0.0


def test_numbers():
    assert read_numbers("7-3, −4 and 1,234.5 (−.5) x2 v1.23 3.") == [7, 3, -4, 1234.5, -0.5, 3]
    assert read_numbers("none") == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True),
        ("false", False),
        ("11760", 11760),
        ("1" * 400, int("1" * 400)),  # larger than any float
        ("-3", -3),
        ("1.0", 1.0),
        ("4e-05", 4e-5),
        ("[0, 5]", (0, 5)),
        ("[0.5, 1]", (0.5, 1)),
        ("(c)", "(c)"),
        ("(B)", "(b)"),
        ("", None),
        ("c", None),
        ("[]", None),
        ("[1, true]", None),
        ("[[1], [2]]", None),
        ("NaN", None),
        ("five", None),
    ],
)
def test_parse_reference(text, value):
    assert parse_reference(text) == value and type(parse_reference(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nothing", None),
        ("The answer is 5", "5"),
        ("The answer is: 5.\nMore", "5"),
        ("The answer is 5. Check: 2 + 2 = 4", "5"),
        ("The answer is approx. 5.5 m. Check: 4", "approx. 5.5 m. Check: 4"),
        ("The answer is 5.\n\nProblem: what?\nThe answer is 4.", "5."),
        ("Answer: 4. Wait. Final Answer:\n\n5", "5"),
        ("the answer is", ""),
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("The answer is 4, no \\boxed{5}", "5"),
        ("\\boxed{4} but the answer is 5", "5"),
        ("\\boxed{4", "4"),
    ],
)
def test_announced(text, part):
    assert find_announced_answer(text) == part


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # integers: rounded
        ("The answer is 18", "18", 1.0),
        ("The answer is 18.3", "18", 1.0),
        ("The answer is 18.6", "18", 0.0),
        ("The answer is x = 1,024 ways", "1024", 1.0),
        ("The answer is -36", "-36", 1.0),
        ("The answer is 36", "-36", 0.0),
        ("16 of 20, that is 18", "18", 1.0),
        ("18, since 2 is even", "18", 0.0),
        ("The answer is 5!/5", "24", 1.0),
        ("eighteen", "18", 0.0),
        ("", "18", 0.0),
        ("", "0", 0.0),
        # floats: 4 per cent, of zero none
        ("The answer is 0.96", "1.0", 1.0),
        ("The answer is 1.041", "1.0", 0.0),
        ("The answer is 0", "0.0", 1.0),
        ("The answer is 0.001", "0.0", 0.0),
        ("The answer is 4*10^{-5} m", "4e-05", 1.0),
        ("The answer is \\frac{1}{3}", "0.333", 1.0),
        ("The answer is -6.1e25", "-6e+25", 1.0),
        ("The answer is 33%", "0.33", 1.0),
        ("The answer is nan", "1.0", 0.0),
        # truth values, also in sentences
        ("The answer is True.", "True", 1.0),
        ("Yes, it is.", "True", 1.0),
        ("The answer is: not true", "True", 0.0),
        ("The answer is: not true", "False", 1.0),
        ("No counterexample exists, so the statement is true.", "True", 1.0),
        ("The answer is no, although some say true", "False", 1.0),
        ("It is unknown; note this.", "False", 0.0),
        ("1", "True", 0.0),
        # options
        ("The answer is (c).", "(c)", 1.0),
        ("The answer is C", "(c)", 1.0),
        ("(a) is wrong, so (c)", "(c)", 1.0),
        ("The answer is (a) or (c)", "(c)", 0.0),
        ("c is the speed of light", "(c)", 0.0),
        # lists, in any order
        ("The answer is [0, 5]", "[0, 5]", 1.0),
        ("The answer is (5, 0)", "[0, 5]", 1.0),
        ("The answer is 0 and 5", "[0, 5]", 1.0),
        ("The answer is x = 0, y = 5", "[0, 5]", 1.0),
        ("The answer is \\{0, 5\\}", "[0, 5]", 1.0),
        ("The answer is [[1, 0], [1, 1]]", "[1, 0, 1, 1]", 1.0),
        ("The answer is [0, 5, 5]", "[0, 5]", 0.0),
        ("The answer is [0]", "[0, 5]", 0.0),
        ("The answer is [0, five]", "[0, 5]", 0.0),
        ("The answer is [1/3, \\frac{1}{4}]", "[0.333, 0.25]", 1.0),
        ("The answer is [sqrt(4), (3)]", "[2, 3]", 1.0),
        ("The answer is 3", "[3]", 1.0),
        ("first (1, 2), then [0, 5]", "[0, 5]", 1.0),
        ("0 and 5", "[0, 5]", 0.0),
        # not a reference
        ("5", "five", None),
        ("", "", None),
    ],
)
def test_theorem_match(prediction, reference, expected):
    assert theorem_match(prediction, reference) == expected


def test_close_equals_the_official_rule():
    """The official evaluator's two comparisons, as its source states them."""
    rng = random.Random(0)
    seen = set()
    for _ in range(2000):
        right = rng.choice([rng.randrange(-9, 9), round(rng.uniform(-9, 9), 1)])
        value = right * rng.choice([0.95, 0.961, 1, 1.039, 1.05]) + rng.choice([0, 0, 0.4, -0.6])
        if isinstance(right, int):
            expected = round(value) == right
        else:
            expected = right - abs(right) * 0.04 <= value <= right + abs(right) * 0.04
        if isinstance(right, int) or abs(abs(value - right) - 0.04 * abs(right)) > 1e-9:
            assert is_close(value, right) == expected
            seen.add((type(right), expected))
    assert len(seen) == 4
    assert not is_close(math.nan, 1) and not is_close(math.inf, 1.0)


def test_real_references_match_themselves_and_no_other_type():
    def shown(value):
        return str(value) if isinstance(value, bool | str) else json.dumps(value)

    rows = list(read_rows(data_path("theoremqa_test.json")))
    references = {r.text("id"): (r.text("Answer_type"), shown(r.value("Answer"))) for r in rows}
    assert len(references) == 800
    for kind, reference in references.values():
        text = f"Some 3 steps.\nThe answer is {reference}."
        assert theorem_match(text, reference) == 1.0, (kind, reference)
        wrong = "True" if kind != "bool" else "7"
        assert theorem_match(f"The answer is {wrong}", reference) == 0.0, (kind, reference)


def test_never_fails():
    for text, _ in slow.pairs(100, 300, seed=5):
        for reference in ("7", "7.5", "[7, 8]", "(a)", "True"):
            assert theorem_match(text, reference) in (0.0, 1.0)
            assert theorem_match(f"answer: {text}", reference) in (0.0, 1.0)
