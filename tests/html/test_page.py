"""The HTML page: self-contained, escaped, and with what the browser of examples needs."""

import json
import re

import pytest
import torch

import kvbench
from kvbench.cli.main import main
from kvbench.html import page, samples


def data_of(text):
    return json.loads(re.search(r'id="samples-data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    small = ["method=full,streamingllm", "kv_size=24", "sinks=4", "dataset=tiny/needle,tiny/code", "length=256"]
    assert main(["report", "samples=1", f"results={folder}", f"output={folder}/page.html", *small]) == 0
    return (folder / "page.html").read_text()


def test_nothing_is_fetched(written):
    assert not re.search(r'(src|href)\s*=\s*["\']?(https?:)?//', written)
    assert "default-src 'none'" in written


def test_every_section_is_there(written):
    for heading in ("tables", "figures", "claims", "audit", "samples", "runs"):
        assert f'<h2 id="{heading}">' in written
    assert "think/2" in written
    assert "uncomp/10" in written


def test_examples_show_answers_and_what_was_kept(written):
    found = data_of(written)
    assert [s["task"] for s in found] == ["tiny/needle", "tiny/code"]
    full, streaming = found[0]["methods"]
    assert len(full["kept"]) == len(found[0]["tokens"]) == 256
    assert set(full["kept"]) == {"9"}
    assert streaming["kept"] == "9" * 4 + "0" * (256 - 24) + "9" * 20


def test_shades_are_the_share_of_layers_and_heads():
    model, _ = kvbench.load_model("tiny")
    ids = torch.arange(40) % 50 + 5
    (cache,) = kvbench.prefill(model, ids, [{"method": "snapkv", "kv_size": 12, "window": 4}])
    shades = samples.shades(cache)
    counts = torch.zeros(40)
    for layer in cache.layers:
        for head in layer.kept_positions():
            counts[head.long()] += 1
    assert torch.equal(shades, (9 * counts / (6 * 4)).round().long())
    assert shades[-4:].tolist() == [9, 9, 9, 9]


def test_text_from_data_cannot_become_markup():
    evil = "</script><img src=x onerror=alert(1)>"
    text = page.build(evil, [("a", evil, page.rows([evil], [[evil]], ["x"]))], [{"tokens": [evil]}])
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert data_of(text) == [{"tokens": [evil]}]


def test_bad_requests(capsys):
    assert main(["report", "samples=few"]) == 2
    assert "samples=few" in capsys.readouterr().err
    assert main(["report", "page.html"]) == 2
    assert "key=value" in capsys.readouterr().err
