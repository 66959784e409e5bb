"""The equality of final answers: pairs by hand, the result that counts, and a process that never hangs a run."""

import os
import threading
import time

import pytest

from kvbench.base import extras
from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.example import Example
from kvbench.plan import cells
from kvbench.tasks import metrics
from kvbench.tasks.metrics import check_installed, math_equal, metric, score
from kvbench.tasks.metrics.math_equal import MathWorker, as_formula, find_last_boxed

EQUAL = [
    (r"\frac{1}{2}", r"\dfrac{2}{4}"),
    (r"\frac12", "0.5"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{3}{2}", r"1\frac{1}{2}"),
    ("1,234", "1234"),
    (r"32,\!348", "32{,}348"),
    (r"5 \times 10^3", "5000"),
    ("025", "25"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    ("1, 2", "2,1"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"),
    (r"x \in [-2,7]", "[-2, 7]"),
    (r"90^\circ", "90"),
    (r"50\%", "50"),
    (r"5.4 \text{ cents}", "5.4"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{(B)}", "B"),
    (r"3\sqrt{13}", r"\sqrt{117}"),
    ("x^2 + 2x + 1", "(x+1)^2"),
    ("y = 2x + 3", "y = 3 + 2x"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"),
]
DIFFERENT = [
    (r"\frac{1}{3}", "0.33"),
    (r"-\frac{1}{2}", r"\frac{1}{2}"),
    ("(1, 2)", "(2, 1)"),
    ("[1, 2]", "(1, 2)"),
    (r"\{1, 2\}", r"\{1, 3\}"),
    (r"90^\circ", r"91^\circ"),
    (r"5\%", r"50\%"),
    (r"\text{even}", r"\text{odd}"),
    ("p - q", "q - p"),
    ("1 + 2i", "1 - 2i"),
    ("3.14", r"\pi"),
]
# known limits, where math-verify 0.9 decides otherwise than a mathematician: units and bases are dropped, so that 5 cm
# equals 5 inches and 2516_8 equals 2516; 90^\circ differs from \frac{\pi}{2}, 50\% from 0.5 and e^{i\pi} from -1; the
# answer -1 < x < 3 differs from the reference (-1,3), though the answer (-1,3) equals the reference -1 < x < 3


def example(*references: str) -> Example:
    return Example("0", "prompt", references, 8)


@pytest.mark.parametrize(("reference", "result"), EQUAL)
def test_equal_results(reference, result):
    assert score("math_equal", f"So it is $\\boxed{{{result}}}$.", example(reference)) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "The answer is $18$. Check: 9 eggs at 2 dollars.",
        "The answer is: 18.\nNote that this took 3 steps.",
        "The answer is 18.\n\nQuestion: What is 2 + 3?\nThe answer is 5.",
        "So \\boxed{18}.\n\nProblem: What is 2 + 3?\nSo \\boxed{5}.",
    ],
)
def test_text_behind_the_final_answer_does_not_decide(text):
    assert score("math_equal", text, example("18")) == 1.0


@pytest.mark.parametrize(("reference", "result"), DIFFERENT)
def test_different_results(reference, result):
    assert score("math_equal", f"So it is $\\boxed{{{result}}}$.", example(reference)) == 0.0


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (r"\boxed{1} or rather \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{ x }", "x"),
        (r"\fbox{3}", None),
        (r"\fboxed{3} \boxed {4}", "4"),
        (r"\boxed{\boxed{5}}", "5"),
        # an answer that was cut off, and the words of the instruction
        (r"\boxed{6} and then \boxed{\frac{1}", "6"),
        (r"\boxed{7} inside \boxed{}", "7"),
        (r"\boxed{", None),
        ("no box", None),
    ],
)
def test_the_last_box_counts(text, result):
    assert find_last_boxed(text) == result


def test_a_result_is_one_formula():
    assert as_formula("1\n 2") == "$1 2$"
    assert as_formula(r"\$5 and $6$") == r"$\$5 and 6$"


def test_without_a_box_math_verify_looks_for_the_result():
    assert score("math_equal", "3 + 4 = 7. The final answer is $7$.", example("7")) == 1.0
    assert score("math_equal", "The answer is 3/4", example(r"\frac{3}{4}")) == 1.0
    # a box takes precedence over words
    assert score("math_equal", r"\boxed{7}. The final answer is $8$.", example("8")) == 0.0


@pytest.mark.parametrize(
    "text", ["", "\n", "...", r"\boxed{\frac{1}", r"\boxed{{{{}", r"\boxed{?}", "no idea", "\ud800", "\0", "(" * 5000]
)
def test_what_cannot_be_read_scores_zero(text):
    assert score("math_equal", text, example("7")) == 0.0


def test_a_reference_that_cannot_be_read_has_no_score():
    assert score("math_equal", r"\boxed{7}", example("$$")) is None
    assert score("math_equal", r"\boxed{7}", example("$$", "7")) == 1.0


@pytest.mark.e2e("math-verify gives up after five seconds")
def test_threads_score_too_and_huge_numbers_end():
    """math-verify's time limits use signals, which no other thread may have."""
    scores = {}

    def work(text):
        scores[text] = score("math_equal", text, example("7"))

    start = time.monotonic()
    threads = [threading.Thread(target=work, args=(text,)) for text in (r"\boxed{9^{9^{9^{9}}}}", r"\boxed{7.0}", "7")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(scores.values()) == [0.0, 1.0, 1.0] and time.monotonic() - start < 60


@pytest.mark.e2e("starts three processes")
def test_a_process_that_does_not_reply_is_replaced(monkeypatch):
    worker = MathWorker()
    assert worker.ask("$7$", "$7$") is True
    first = worker._process.pid
    monkeypatch.setattr(math_equal, "REPLY_S", 0.2)
    assert worker.ask("$9^{9^{9^{9}}}$", "$7$") is False and worker._process is None
    monkeypatch.undo()
    assert worker.ask("$7$", "$7$") is True and worker._process.pid != first
    # one that was ended by the system meanwhile costs no answer
    worker._process.kill()
    worker._process.wait()
    assert worker.ask("$7$", "$7$") is True
    worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_process_that_cannot_import_math_verify_says_so(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr4')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(KvbenchError, match=r"math_equal cannot use math-verify: ImportError: no antlr4"):
        MathWorker().ask("$7$", "$7$")


def test_the_version_of_math_verify_is_part_of_a_cells_identity(monkeypatch):
    assert metric("f1").identity() == {"name": "f1", "revision": 1}
    monkeypatch.setattr(metrics, "version", lambda name: f"{name} 9")
    assert metric("math_equal").identity() == {"name": "math_equal", "revision": 2, "math-verify": "math-verify 9"}


def test_a_missing_package_is_named_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(extras, "installed", lambda package: package != "math_verify")
    message = r"^metric math_equal needs the package math_verify, which is not installed: pip install -e '.\[math\]'$"
    with pytest.raises(UsageError, match=message):
        check_installed("math_equal")
    assert cells.check_installed is check_installed
