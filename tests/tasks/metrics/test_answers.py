import random
from decimal import Decimal

import pytest
from support import metric_reference as slow
from support.data import data_path

from kvbench.tasks.metrics.answers import find_chosen_letter, find_last_number, gsm8k, letter
from kvbench.tasks.rows import read_rows


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", None),
        ("no number: none", None),
        ("The answer is: 18", "18"),
        ("18.", "18"),
        ("$1,450,000.50 a year.", "1450000.5"),
        ("\\$1{,}200", "1200"),
        ("-3", "-3"),
        ("−3 degrees", "-3"),
        ("-$7", "-7"),
        ("a loss of -.5", "-0.5"),
        ("10 - 3", "3"),
        ("7-3", "3"),
        ("x2", "2"),
        ("1, 2 and 3", "3"),
        ("1,2345", "2345"),
        ("12,345,678", "12345678"),
        ("25%", "25"),
        ("3/4", "0.75"),
        ("6 / 4 cups", "1.5"),
        ("1/0", None),
        ("1.2e3", "1200"),
        ("2E-2 m", "0.02"),
        ("5e", "5"),
        ("**42**", "42"),
        ("10 eggs ($2 each)", "2"),
        ("١٢", None),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_last_number(text, number):
    assert find_last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("First 16 - 3 = 13.\nThe answer is: 18", "18", 1.0),
        ("The answer is: $18.00.", "18", 1.0),
        ("The answer is: 1,200 dollars", "1,200", 1.0),
        ("The answer is: 1200", "1,200", 1.0),
        ("Total: 18. The answer is: 17", "18", 0.0),
        ("The answer is: 17. Check: 18", "18", 0.0),
        ("The answer is: 18. Check: 17", "18", 1.0),
        ("It is 18", "18", 1.0),
        ("18: so it is", "18", 1.0),
        ("#### 18\nNote that this took 3 steps.", "18", 1.0),
        ("#### 1. Count the eggs\n16 - 3 = 13\n#### 2. Sell them\nThe answer is 26.", "26", 1.0),
        ("#### 18\nThe answer is 17 if \\boxed{16}", "18", 1.0),
        ("So \\boxed{18}. The answer is 17?", "18", 1.0),
        ("The last \\boxed{18} is open: \\boxed{17", "18", 1.0),
        ("The total is \\boxed{\\$1{,}200 \\text{ in 2 days}}", "1200", 1.0),
        ("The answer is 17? No. The answer is 18.", "18", 1.0),
        ("**Answer:** $18.00 for 9 eggs", "18", 1.0),
        ("The answer is:\n\n**18**\nThis took 3 steps.", "18", 1.0),
        ("The answer is 9 * 2 = 18.", "18", 1.0),
        ("The answer is 18 (9 * 2 = 18, of 20 eggs)", "18", 1.0),
        ("The answer is the sum of 9 and 9, which is 18.", "18", 1.0),
        ("The answer is 18 dollars. She sells 9 eggs at 2", "18", 1.0),
        ("So, the answer is 18.\n\nThe last line must be:\nThe answer is: N", "18", 1.0),
        ("9 * 2 = 18\n\nQuestion: Tom has 5 apples.", "18", 1.0),
        ("The answer is 18.\n\nQ: Tom has 5.\nA: The answer is 5.", "18", 1.0),
        ("He works from 8:30 to 16:30. The answer is 8", "8", 1.0),
        ("The answer is 10:30", "10", 0.0),
        ("The answer is 10:30", "30", 0.0),
        ("The answer is: -18", "18", 0.0),
        ("The answer is: 18 or 19", "18", 0.0),
        ("The answer is: eighteen", "18", 0.0),
        ("", "18", 0.0),
        ("18", "unknown", None),
    ],
)
def test_gsm8k(prediction, reference, expected):
    assert gsm8k(prediction, reference) == expected


def test_gsm8k_on_texts_of_known_answers():
    rng = random.Random(0)

    def written(value):
        shown = rng.choice([f"{value}", f"{value:,}", f"{value}.0", f"{value:,}.00", f"{value}e0"])
        if rng.random() < 0.3:
            shown = f"-${shown[1:]}" if shown.startswith("-") else f"${shown}"
        return shown + rng.choice(["", ".", "%", " apples", "\n", ")", "!", " km."])

    def any_value():
        return rng.choice([0, rng.randrange(-20, 20), rng.randrange(10**6), -rng.randrange(10**9)])

    for _ in range(1000):
        before = [written(any_value()) for _ in range(rng.randrange(4))]
        value = any_value()
        text = " is: ".join([" and ".join(before), f"{' + '.join(before)} = {written(value)}"])
        assert find_last_number(text) == value, text
        assert gsm8k(text, f"{value:,}") == 1.0, text
        assert gsm8k(text, str(value + 1)) == 0.0, text
        assert gsm8k(f"{text} so: none", str(value)) == 1.0


def test_every_gsm8k_reference_is_scored_by_value():
    rows = list(read_rows(data_path("gsm8k_test.jsonl")))
    for row in rows:
        reference = row.text("answer").split("####")[1].strip()
        value = int(reference.replace(",", ""))
        assert gsm8k(f"12 : so\nThe answer is: {value:,}.", reference) == 1.0
        assert gsm8k(f"The answer is: {value + 1}", reference) == 0.0


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("", None),
        ("B", "B"),
        (" (c)\n", "C"),
        ("**D**.", "D"),
        ("\\boxed{A}", "A"),
        ("The answer is (C), not (A).", "C"),
        ("(A) is wrong. Answer: B", "B"),
        ("Answer:\n\nC. 3 m/s", "C"),
        ("The correct answer is: option D", "D"),
        ("the answer is $\\mathbf{B}$", "B"),
        ("answer is a matter of taste", None),
        ("Both (b) and (c) hold", "B"),
        ("C) because of A", "C"),
        ("A good question; B it is", "B"),
        ("I choose A", "A"),
        ("A", "A"),
        ("D-glucose", None),
        ("Dr. Brown", None),
        ("E", None),
        ("Ä B", "B"),
        ("Answer: C\n\nQuestion: what?\nAnswer: B", "C"),
        ("The answer is A? No. The answer is C.", "C"),
        ("Answer: B. Wait, the right answer is: (d)? No, the answer is D", "D"),
    ],
)
def test_chosen_letter(text, chosen):
    assert find_chosen_letter(text) == chosen
    for right in "ABCD":
        assert letter(text, right) == float(right == chosen)


def test_letter_needs_an_option():
    assert letter("A", "E") is None
    assert letter("A", "") is None
    assert letter("a", " a ") == 1.0


def test_letter_never_fails():
    for text, _ in slow.pairs(200, 200, seed=3):
        assert letter(text, "A") in (0.0, 1.0)
