"""The worked examples of CONTRIBUTING.md: fenced blocks that name the file which they are."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def block(path):
    """Return the block whose fence names ``path``."""
    (text,) = re.findall(rf"^```\w+ {re.escape(path)}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return text
