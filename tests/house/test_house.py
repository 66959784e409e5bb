"""What keeps the package readable: no long file, no class name twice (layers and circles are import-linter's)."""

import ast
from collections import Counter
from pathlib import Path

FILES = sorted((Path(__file__).parents[2] / "kvbench").rglob("*.py"))


def test_no_file_is_longer_than_600_lines():
    assert [f.name for f in FILES if len(f.read_text("utf-8").splitlines()) > 600] == []


def test_no_class_name_is_used_twice():
    trees = [ast.parse(f.read_text("utf-8")) for f in FILES]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert len(names) > 200 and [name for name, count in names.items() if count > 1] == []
