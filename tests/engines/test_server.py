"""engine=openai against a stub: rows, differences, resuming, and one message for each way to fail."""

import json
import time

import pytest
from support.stub_server import MODEL, completion, serving

from kvbench.cli.main import main

pytest.importorskip("openai")
pytestmark = pytest.mark.e2e("asks a server")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """The client waits a moment before it asks again, where the server does not say how long."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01, raising=False)


def words(stub, results, *more, label="a"):
    return [
        "run",
        "engine=openai",
        f"url={stub.url if hasattr(stub, 'url') else stub}",
        f"served={MODEL}",
        f"label={label}",
        "model=tiny",
        "dataset=tiny/needle",
        "length=128",
        "limit=10",
        f"results={results}",
        *more,
    ]


def test_rows_of_two_servers_stand_in_one_table_with_paired_differences(tmp_path, capsys):
    with serving(lambda question: (200, completion("42", first={" 42": -0.1, " 7": -3.0}))) as stub:
        assert main(words(stub, tmp_path)) == 0
        assert len(stub.asked) == 10
        assert stub.asked[0]["temperature"] == 0 and stub.asked[0]["max_tokens"] > 0
    with serving(lambda question: (200, completion("", first={" 7": -0.2, " 42": -0.6}))) as stub:
        assert main(words(stub, tmp_path, label="b")) == 0
        capsys.readouterr()
        # everything is answered: the server is not asked again, and need not run
    assert main(words(stub, tmp_path, "--json", label="b")) == 0
    found = json.loads(capsys.readouterr().out)
    a, b = found["rows"]
    assert found["baseline"] == "a" and (a["label"], b["label"]) == ("a", "b")
    assert b["delta"] == pytest.approx(b["mean"] - a["mean"])
    assert b["first"] == {"same": 0.0, "change": pytest.approx(-0.5), "n": 10} and b["empty"] == 10
    assert main(words(stub, tmp_path, "baseline=b", label="b")) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("a ") and "Δ: paired difference to b" in out
    assert main(words(stub, tmp_path, "baseline=c", label="b")) == 2
    assert "baseline=c is no row on these prompts: a, b" in capsys.readouterr().err


def test_stored_results_are_listed_and_shown_as_an_engines(tmp_path, capsys):
    with serving(lambda question: (200, completion("42"))) as stub:
        assert main(words(stub, tmp_path)) == 0
    capsys.readouterr()
    assert main(["list", "runs", f"results={tmp_path}", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["runs"]
    assert cell["label"] == "a" and cell["kind"] == "engine" and cell["n"] == 10
    assert main(["show", cell["id"], f"results={tmp_path}"]) == 0
    assert "measured with" in capsys.readouterr().out


def test_chat_asks_with_the_message_alone(tmp_path):
    with serving(lambda question: (200, completion("42"))) as stub:
        assert main(words(stub, tmp_path, "prompt=chat", "model.chat_template={{ messages[0].content }}")) == 0
    assert all(set(question["messages"][0]) == {"role", "content"} for question in stub.asked)


QWEN = "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


@pytest.mark.parametrize(("more", "thinks"), [((), False), (("max_new_tokens=1024",), True)])
def test_short_answers_of_a_chat_are_asked_for_without_a_thought(tmp_path, more, thinks):
    with serving(lambda question: (200, completion("42"))) as stub:
        arguments = words(stub, tmp_path, "prompt=chat", f"model.chat_template={QWEN}", *more)
        assert main(arguments) == 0
    switches = [question.get("chat_template_kwargs") for question in stub.asked]
    assert switches == 10 * [None if thinks else {"enable_thinking": False}]


def test_thoughts_are_no_answers_and_those_that_are_cut_are_told(tmp_path, capsys):
    def answer(question):
        return 200, completion("<think>42?" if len(stub.asked) <= 4 else "<think>hm</think>\n\n42")

    with serving(answer) as stub:
        assert main(words(stub, tmp_path, "parallel=1")) == 0
    assert "a: 40 % of the answers end inside their thought, and score as empty ones" in capsys.readouterr().out
    assert main(words(stub, tmp_path, "--json")) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["cut_thoughts"] == 0.4 and row["empty"] == 0
    (lines,) = [path.read_text() for path in tmp_path.rglob("samples*.jsonl")]
    assert lines.count("<think>") == 10


def test_a_thought_that_a_server_gives_apart_is_stored_with_its_answer(tmp_path, capsys):
    def answer(question):
        body = completion("42" if len(stub.asked) > 4 else None)
        body["choices"][0]["message"]["reasoning_content"] = "41?"
        return 200, body

    with serving(answer) as stub:
        arguments = words(stub, tmp_path, "prompt=chat", "parallel=1", f"model.chat_template={QWEN}")
        assert main([*arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["cut_thoughts"] == 0.4
    (lines,) = [path.read_text() for path in tmp_path.rglob("samples*.jsonl")]
    assert lines.count('"<think>41?"') == 4 and lines.count('"<think>41?</think>42"') == 6


@pytest.mark.parametrize("chat", [(), ("prompt=chat", "model.chat_template={{ messages[0].content }}")])
def test_null_is_an_error_of_its_answer_and_no_score(tmp_path, capsys, chat):
    with serving(lambda question: (200, completion(None if len(stub.asked) == 3 else "42"))) as stub:
        assert main(words(stub, tmp_path, "parallel=1", *chat)) == 1
        assert "answered a prompt with null in place of a text (1 of 10 prompts)" in capsys.readouterr().err
        assert len(stub.asked) == 10
        # the other answers are stored, and this one is asked for again
        assert main(words(stub, tmp_path, "parallel=1", *chat)) == 0
        assert len(stub.asked) == 11


def test_a_system_message_and_the_models_stops_are_sent(tmp_path):
    with serving(lambda question: (200, completion("42"))) as stub:
        template = "model.chat_template={{ messages[-1].content }}"
        assert main(words(stub, tmp_path, "prompt=chat", "system=Be brief.", template, "model.stop=[END]")) == 0
    first = stub.asked[0]
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert "Be brief." not in first["messages"][1]["content"] and "END" in first["stop"]


def test_a_server_that_is_too_slow_is_one_message(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvbench.engines.server.RETRIES", 0)

    def answer(question):
        if len(stub.asked) > 2:
            time.sleep(1.5)
        return 200, completion("42")

    with serving(answer) as stub:
        assert main(words(stub, tmp_path, "parallel=1", "timeout=1")) == 1
    assert "did not answer within 1.0 s: raise timeout=, or lower parallel=" in capsys.readouterr().err
    with serving(lambda question: (200, completion("42"))) as stub:
        assert main(words(stub, tmp_path)) == 0
        assert len(stub.asked) == 8


def test_a_key_from_the_environment_is_sent_and_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBENCH_API_KEY", "hush-hush")
    with serving(lambda question: (200, completion("42"))) as stub:
        assert main(words(stub, tmp_path)) == 0
    assert all(
        headers.get("Authorization", headers.get("authorization")) == "Bearer hush-hush" for headers in stub.headers
    )
    assert not any("hush-hush" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def failing_after(count, failure):
    """Return answers that are good ``count`` times, and then what ``failure`` says."""
    seen = []

    def answer(question):
        seen.append(question)
        return (200, completion("42")) if len(seen) <= count else failure

    return answer


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ((401, {"error": {"message": "bad key"}}), "refused the key (401): set KVBENCH_API_KEY"),
        ((404, {"error": {"message": "no model"}}), "knows no such page or model (Error code: 404"),
        ((429, {"error": {"message": "slow down"}}), "was asked too often"),
        ((500, {"error": {"message": "out of blocks"}}), "failed (500: Error code: 500"),
        ((0, None), "no answer from http://127.0.0.1:"),
        ((200, b"<html>"), "answered something else than JSON"),
        ((200, {"choices": []}), "answered without a choice"),
        ((200, {"choices": [None], "model": MODEL}), "answered something else than JSON of OpenAI's form"),
        ((200, completion("42", model="other")), "changed its model from stub to other in the middle"),
    ],
    ids=["401", "404", "429", "500", "cut", "html", "empty", "null", "other model"],
)
def test_a_failure_in_the_middle_keeps_what_is_measured_and_the_same_command_goes_on(
    failure, message, tmp_path, capsys, monkeypatch
):
    # the client waits longer before each further try
    monkeypatch.setattr("kvbench.engines.server.RETRIES", 1)
    with serving(failing_after(4, failure)) as stub:
        assert main(words(stub, tmp_path, "parallel=1")) == 1
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    with serving(lambda question: (200, completion("42"))) as stub:
        assert main(words(stub, tmp_path)) == 0
        assert len(stub.asked) == 6


def test_a_failure_that_passes_is_not_noticed(tmp_path):
    replies = iter([(429, {}), (500, {}), (0, None)])
    with serving(lambda question: next(replies, (200, completion("42")))) as stub:
        assert main(words(stub, tmp_path, "parallel=1")) == 0
        assert len(stub.asked) == 13


def test_a_refused_prompt_ends_its_task_alone(tmp_path, capsys):
    def answer(question):
        if len(stub.asked) == 3:
            return 400, {"error": {"message": "prompt is too long"}}
        return 200, completion("42")

    with serving(answer) as stub:
        arguments = words(stub, tmp_path, "parallel=1")
        arguments[arguments.index("dataset=tiny/needle")] = "dataset=tiny/needle,tiny/code"
        assert main(arguments) == 1
    err = capsys.readouterr().err
    assert "a on tiny/needle: " in err and "refused a prompt (Error code: 400" in err
    assert "(1 of 10 prompts)" in err
    # all other prompts of both tasks are answered
    assert len(stub.asked) == 20


def test_an_answer_on_which_a_metric_of_ones_own_fails_costs_itself_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(prediction, reference):\n    return 1 / (reference != '3')\n")
    rows = [json.dumps({"prompt": f"say {n}", "answers": [f"{n}"]}) for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    with serving(lambda question: (200, completion("42"))) as stub:
        arguments = words(stub, tmp_path / "r", "path=rows.jsonl", "metric=mine.py:f")
        arguments[arguments.index("dataset=tiny/needle")] = "dataset=file"
        arguments.remove("length=128")
        assert main(arguments) == 1
        assert "mine.py:2: ZeroDivisionError: division by zero (1 of 6 answers)" in capsys.readouterr().err
        assert len(stub.asked) == 6
        # the other five are stored, and not asked again
        assert main(arguments) == 1
        assert len(stub.asked) == 7


def test_a_server_without_log_probabilities_is_asked_without(tmp_path):
    def answer(question):
        if "logprobs" in question:
            return 400, {"error": {"message": "logprobs is not supported"}}
        return 200, completion("42")

    with serving(answer) as stub:
        assert main(words(stub, tmp_path)) == 0
        # at most all four questions that were asked at once are asked again
        assert 11 <= len(stub.asked) <= 14


def test_another_served_model_is_named(tmp_path, capsys):
    with serving(lambda question: (200, completion("42"))) as stub:
        arguments = [word.replace("served=stub", "served=llama") for word in words(stub, tmp_path)]
        assert main(arguments) == 2
    assert "served=llama: http://127.0.0.1:" in capsys.readouterr().err


def test_one_label_of_two_models_makes_two_rows(tmp_path, capsys):
    for served in ("stub", "other"):
        with serving(lambda question: (200, completion("42", model="m")), served=served) as stub:
            assert main([word.replace("served=stub", f"served={served}") for word in words(stub, tmp_path)]) == 0
    capsys.readouterr()
    assert main([*words(stub, tmp_path), "--json"]) == 0
    assert [row["label"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["a (stub)", "a (other)"]


def test_a_task_that_withholds_its_question_is_asked_with_it(tmp_path, capsys):
    with serving(lambda question: (200, completion("42"))) as stub:
        arguments = [*words(stub, tmp_path, "lengths=1024", "max_new_tokens=8"), "--plan"]
        arguments.remove("length=128")
        arguments[arguments.index("dataset=tiny/needle")] = "dataset=ruler/niah_single_1"
        assert main(arguments) == 0
    assert "10 of 10 to do" in capsys.readouterr().out


def test_no_server_is_one_message(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvbench.engines.server.RETRIES", 1)
    with serving(lambda question: (200, completion("42"))) as stub:
        url = stub.url
    assert main(words(url, tmp_path)) == 1
    err = capsys.readouterr().err
    assert "no answer from" in err and "is the server running, and the url= right?" in err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("method=snapkv", "method= is not possible with engine=openai: an engine compresses its own cache"),
        ("query_aware=false", "query_aware=false is not possible with an engine"),
        ("gguf=x.gguf", "gguf= is not a key of engine=openai"),
        ("kl=true", "kl= is not a key of engine=openai: a server gives no distributions"),
        ("fidelity=true", "kl= is not a key of engine=openai: a server gives no distributions"),
        ("engine=vllm", "engine"),
        ("url=127.0.0.1", "url=127.0.0.1 is no address"),
        ("url=http://127.0.0.1:abc/v1", "url=http://127.0.0.1:abc/v1 is no address"),
        ("parallel=0", "parallel=0 is not possible"),
        ("kv_ratio=0.5", "kv_ratio"),
        ("min_new_tokens=1", "min_new_tokens= is not possible with engine=openai: OpenAI's interface has no such"),
        ("logger=wandb", "rows of engines are not logged"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_reason(word, message, tmp_path, capsys):
    key = word.partition("=")[0]
    base = [other for other in words("http://127.0.0.1:9/v1", tmp_path) if not other.startswith(f"{key}=")]
    assert main([*base, word]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    ["ftp://me:secret@host/v1", "http://me:sec/secret@host/v1", "http://me:secret@host:port/v1", "http://:secret@/v1"],
)
def test_a_password_in_a_wrong_address_is_not_printed(url, tmp_path, capsys):
    assert main(words(url, tmp_path)) == 2
    with pytest.raises(SystemExit):
        main([f"url={url}"])
    err = capsys.readouterr().err
    assert err.count("***@") >= 2 and "secret" not in err


@pytest.mark.parametrize("status", [401, 404, 429, 500])
def test_a_password_in_the_address_is_neither_printed_nor_stored(status, tmp_path, capsys):
    with serving(lambda question: (status, completion(None))) as stub:
        secret = stub.url.replace("://", "://me:s@secret@")
        assert main(words(secret, tmp_path)) == 1
    assert main(words(secret, tmp_path)) == 1  # nothing answers now
    out, err = capsys.readouterr()
    assert err.count("http://***@127.0.0.1") >= 2 and "secret" not in out + err
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("***@" in path.read_text("utf-8", "replace") for path in stored)
    assert not any(b"secret" in path.read_bytes() for path in stored)
