import difflib

import pytest
from fuzzywuzzy import fuzz
from fuzzywuzzy.StringMatcher import StringMatcher
from support import metric_reference as slow

from kvbench.base.example import Example
from kvbench.tasks.metrics import metric, score
from kvbench.tasks.metrics.code import code_sim, edit_sim, fuzz_ratio

MATCHERS = {"levenshtein": StringMatcher, "difflib": difflib.SequenceMatcher}


@pytest.mark.parametrize("backend", MATCHERS)
def test_ratio_equals_fuzzywuzzy_under_that_backend(backend, monkeypatch):
    monkeypatch.setattr(fuzz, "SequenceMatcher", MATCHERS[backend])
    seen = set()
    for a, b in slow.pairs(300, 300):
        seen.add(fuzz_ratio(a, b, backend))
        assert fuzz_ratio(a, b, backend) == fuzz.ratio(a, b), (a, b)
    assert len(seen) > 50


def test_backends_differ_and_installation_does_not_matter(monkeypatch):
    a, b = "\tint cba = abc;", "\tint abc = cba;"
    monkeypatch.setattr(fuzz, "SequenceMatcher", difflib.SequenceMatcher)
    assert code_sim(a, b) == round(100 * slow.indel_ratio(a, b)) / 100
    assert code_sim(a, b, backend="difflib") != code_sim(a, b)


def test_levenshtein_equals_a_slow_copy():
    for a, b in slow.pairs(150, 60, seed=5):
        assert fuzz_ratio(a, b, "levenshtein") == slow.fuzz_ratio(a, b)
        assert edit_sim(a, b) == pytest.approx(slow.indel_ratio(a.strip(), b.strip()), abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "line"),
    [
        ("```python\n# comment\n// other\nx = 1\ny = 2", "x = 1"),
        ("\n\n\tx = 1\n", "\tx = 1"),
        ("url = 'http://a'\nx = 1", "x = 1"),
        ("\n \nx = 1", " "),  # a blank line is a line
        ("# nothing but a comment", ""),
        ("", ""),
    ],
)
def test_first_line_of_code(prediction, line):
    for reference in ("x = 1", "\tx = 1;", "print(x)"):
        assert code_sim(prediction, reference) == slow.fuzz_ratio(line, reference) / 100


@pytest.mark.parametrize("lead", ["", "\n", "\n\n", "   \n", "\n    \n", "\r\n", "\t\n", "# note\n \n"])
@pytest.mark.parametrize("name", ["code_sim", "code_sim_difflib"])
def test_the_mended_rule_skips_blank_lines(name, lead):
    code_line = "    return self.total / self.count"
    example = Example("a", "p", (code_line,), 8)
    mended = metric(name).mended
    assert score(mended, lead + code_line, example) == 1.0
    # only empty lines and a comment alone are skipped by the published rule
    assert (score(name, lead + code_line, example) == 1.0) == (not lead.strip("\n"))
    assert score(mended, " \n", example) == 0.0


def test_code_sim_by_hand():
    assert code_sim("abcd", "abxd") == 0.75
    assert code_sim("abc", "xyz") == 0.0
    assert code_sim("", "x = 1") == 0.0
    assert code_sim("x" * 5000, "x" * 5000) == 1.0


def test_edit_sim_reads_the_whole_answer():
    assert edit_sim(" 4 7 1\n", "4 7 1") == 1.0
    assert edit_sim("ab\ncd", "ab") == pytest.approx(4 / 7)
    assert edit_sim("", "471") == 0.0


def test_unknown_backend():
    with pytest.raises(ValueError, match="levenshtein or difflib"):
        code_sim("a", "b", backend="auto")
