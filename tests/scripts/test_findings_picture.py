"""The numbers of the findings' picture are those of the committed suite."""

import findings_picture
import pytest

pytestmark = pytest.mark.e2e("reads the samples of the whole suite")


def test_the_committed_numbers_follow_from_the_committed_samples():
    made = findings_picture.files_of_numbers(findings_picture.read_findings(findings_picture.FOLDER))
    for name, text in made.items():
        assert (findings_picture.RESULTS / name).read_text(encoding="utf-8") == text
