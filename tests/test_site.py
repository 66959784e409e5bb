"""The documentation site: generated pages name all that there is, and docs/own.md prints what its method gives."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import processes

from kvbench.base.conf import entries, top_level
from kvbench.methods.core import registry

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))


def test_every_method_has_a_kind_a_formula_and_a_use():
    kinds = yaml.safe_load((ROOT / "scripts" / "method_pages.yaml").read_text("utf-8"))
    methods = {name: about for kind in kinds.values() for name, about in kind["methods"].items()}
    assert {"full", *methods} == set(registry.available())
    assert all(about["name"] and about["formula"] and about["when"] for about in methods.values())


def test_a_commented_file_becomes_a_table_of_its_options():
    import option_tables

    text = """# A cache.
cache:
  _target_: kvbench.Cache
  size: null   # tokens: all | some
               # of them

# How it is read
data:          # typed as data.root=
  root: null   # a folder
"""
    first, second = option_tables.sections(text)
    assert first.about == "A cache." and second.about == "How it is read"
    (size,), (root,) = first.options, second.options
    assert (size.name, size.default, size.meaning) == ("size", "null", "tokens: all | some of them")
    assert root.name == "data.root"
    assert "| `size` | `null` | tokens: all \\| some of them |" in option_tables.of_text(text)


@pytest.mark.e2e("imports what makes the site")
def test_lists_are_written_as_the_site_reads_them():
    markdown = pytest.importorskip("markdown")
    pytest.importorskip("mkdocs")
    import build_site

    text = "A walk.\n1. one\n   goes on\n2. two\n\nNotes.\n- * differs\n- second\n\n```text\nkept\n- as it is\n```\n"
    lists = build_site._lists(text)
    assert lists.endswith("```text\nkept\n- as it is\n```\n")
    html = markdown.markdown(lists.partition("```")[0])
    assert html.count("<li>") == 4 and html.count("<ul>") == html.count("<ol>") == 1 and "<li>* differs</li>" in html


def test_the_page_of_options_has_every_option_of_a_run():
    import option_tables

    page = option_tables.page()
    assert all(f"| `{name}" in page for name in top_level())


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_every_block_of_code_has_a_language_and_an_end(page):
    fences = re.findall(r"^```(.*)$", page.read_text("utf-8"), re.MULTILINE)
    assert all(fences[::2]) and not any(fences[1::2]) and len(fences) % 2 == 0


@pytest.mark.e2e("recomputes what the papers print")
def test_every_claim_stands_on_the_page_of_its_paper():
    import paper_pages

    pages = paper_pages.pages()
    verdicts = yaml.safe_load(paper_pages.LEDGER.read_text("utf-8"))["verdicts"]
    assert len(verdicts) > 30
    assert all(verdict["tested"] in pages[f"papers/{verdict['paper']}.md"] for verdict in verdicts)


@pytest.mark.e2e("starts a process")
def test_the_refused_method_of_own_md_is_refused_in_these_words(tmp_path):
    text = (ROOT / "docs" / "own.md").read_text("utf-8")
    blocks = re.findall(r"`my_methods/(\w+\.py)`\n+```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    words = ["run", "method=newest,strided", "dataset=tiny/needle", "limit=8"]
    environment = {**os.environ, "KVBENCH_METHODS": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = processes.run(*words, cwd=tmp_path, env=environment)
    (printed,) = re.findall(r"```text\n(newest .*?)^```", text, re.DOTALL | re.MULTILINE)
    for line in printed.splitlines():
        assert line in done.stdout


@pytest.mark.e2e("imports what makes the site")
def test_the_page_for_missing_pages_works_at_any_address():
    pytest.importorskip("mkdocs")
    import build_site

    made = (
        '<head><title>kvbench</title><link href="/site.css"><script>new URL("/",location)</script></head>'
        '<a href="/."></a><h1>404 - Not found</h1>'
        '<script id="__config" type="application/json">{"base": "/", "search": "/s.js"}</script>'
    )
    page = build_site.on_post_template(made, template_name="404.html", config=None)
    assert page.startswith("<head><script>") and "document.createElement('base')" in page
    assert 'href="/' not in page and 'href="site.css"' in page and 'href="index.html"' in page
    assert '{"base": ".", "search": "s.js"}' in page and "<h1>Page not found</h1>" in page
    assert build_site.on_post_template(made, template_name="sitemap.xml", config=None) == made


@pytest.mark.e2e("imports what makes the site")
def test_pages_that_a_command_wrote_say_what_they_are_for():
    pytest.importorskip("mkdocs")
    import build_site

    table = build_site._introduced("# think/2\n\n| a |\n", "results/tiny/think-2.md")
    assert "table 2 of [ThinK](../../docs/papers/think.md) as kvbench measures it" in table
    assert table.endswith("\n\n| a |\n")
    assert "as the paper prints it" in build_site._introduced("# vatp/5 — as printed\n", "results/tiny/vatp-5.md")
    tiny = build_site._introduced("# tiny-selection-more\n", "results/tiny/tiny-selection-more.md")
    assert tiny.startswith("# The tiny model: selection, more\n") and "(../tiny.md)" in tiny
    assert build_site._introduced("- counts $l_1$\n", "results/claims.md").startswith(
        "# Claims of the papers, tested\n"
    )
    assert build_site._introduced("# Other\n", "results/tables/ranking.md") == "# Other\n"


@pytest.mark.e2e("imports what makes the site")
def test_fields_of_a_docstring_are_a_list():
    pytest.importorskip("mkdocs")
    import build_site

    def made(html):
        return build_site.on_page_content(f'<div class="doc-contents">{html}</div>', page=None, config=None, files=None)

    assert made("<p>a: one\nmore: two\nand more</p>") == (
        '<div class="doc-contents"><ul><li><strong>a</strong>: one</li>'
        "<li><strong>more</strong>: two\nand more</li></ul></div>"
    )
    plain = "<p>A cache: it holds\ntokens: many</p><p>a: one</p>"
    assert made(plain) == f'<div class="doc-contents">{plain}</div>'
    assert build_site.on_page_content("<p>a: one\nb: two</p>", page=None, config=None, files=None).startswith("<p>")


@pytest.mark.e2e("imports what makes the site")
def test_sections_of_contributing_become_pages():
    pytest.importorskip("mkdocs")
    import build_site

    pages = build_site._contributing_pages()
    assert "| `kv/` |" in pages["architecture.md"] and "**From `method=` to a stage.**" in pages["architecture.md"]
    assert "**A selector**" in pages["add.md"]


@pytest.mark.e2e("builds the site")
def test_the_search_finds_methods_datasets_and_words_of_the_navigation_while_they_are_typed(tmp_path):
    """Runs the site's own search."""
    pytest.importorskip("mkdocs")
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, which runs the site's search")
    import build_site

    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    navigation = build_site._with_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    titles = " ".join(re.findall(r'"([^"]+)": ', json.dumps(navigation)))
    words = {*registry.available(), *entries("dataset"), *re.findall(r"\w[\w'-]*", titles)}
    # the home page has another title, and lunr leaves out "how"
    words -= {"Home", "how"}
    (worker,) = tmp_path.glob("assets/javascripts/workers/search.*.js")
    index = tmp_path / "search" / "search_index.json"
    queries = {word[:end] for word in words for end in range(1, len(word) + 1)}
    done = subprocess.run(
        [node, ROOT / "tests/support/site_search.js", worker, index],
        input="\n".join(sorted(queries)), text=True, capture_output=True, check=True,
    )  # fmt: skip
    pages = json.loads(done.stdout.splitlines()[-1])
    assert {query for query in queries if not pages[query]} == set()
    assert min(pages["snapkv"], pages["h2o"]) > 20
    locations = [entry["location"] for entry in json.loads(index.read_text("utf-8"))["docs"]]
    assert len(locations) > 500 and not any(location.startswith(build_site.TABLES) for location in locations)
