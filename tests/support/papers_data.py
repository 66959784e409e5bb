"""A folder model of random weights, and small files of every dataset that the papers' tables read."""

import csv
import json
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvbench
from kvbench.tasks.longbench import TASKS, task_names

EXAMPLES = 3
WORDS = "the city of paris has a river and seven bridges . a river runs to the sea ."


def model(folder: Path, context: int = 8192) -> Path:
    """A Llama of four layers with random weights, and the tiny model's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=721,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    embedded = Path(kvbench.__file__).parent / "models" / "embedded" / "tiny"
    shutil.copy(embedded / "tokenizer.json", folder / "tokenizer.json")
    settings = json.loads((embedded / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m['content'] }} . {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder


def data(root: Path) -> Path:
    """Every dataset, a few lines each."""
    lines(root / "gsm8k_test.jsonl", [{"question": f"{WORDS} How many? {i}", "answer": f"#### {i}"} for i in range(3)])
    options = {"Correct Answer": "a", **{f"Incorrect Answer {i}": f"b{i}" for i in (1, 2, 3)}}
    table(root / "gpqa_main.csv", [{"Question": f"{WORDS} Which? {i}", **options} for i in range(EXAMPLES)])
    theorems = [
        {"Question": f"{WORDS} {i}?", "Answer": i, "Answer_type": "integer", "Picture": None} for i in range(EXAMPLES)
    ]
    (root / "theoremqa_test.json").write_text(json.dumps(theorems))
    truth = [
        {"Question": f"What? {i}", "Best Answer": "A river", "Correct Answers": "A river"} for i in range(EXAMPLES)
    ]
    table(root / "TruthfulQA.csv", truth)
    turn = {"questions": [{"input_text": "What?"}], "answers": [{"input_text": "a river"}]}
    stories = [{"id": f"s{i}", "story": f"{WORDS} {i}", **turn} for i in range(EXAMPLES)]
    (root / "coqa-dev-v1.0.json").write_text(json.dumps({"data": stories}))
    requested = [
        {
            "question": f"what {i}",
            "answers": [f"answer{i}"],
            "ctxs": [{"title": f"t{i}", "text": f"{WORDS} answer{i}", "isgold": True}],
        }
        for i in range(12)
    ]
    lines(root / "nq_open_oracle.jsonl", requested)
    for name in ("xsum", "cnn_dailymail"):
        article = "article" if name == "cnn_dailymail" else "document"
        summary = "highlights" if name == "cnn_dailymail" else "summary"
        rows = [{article: f"{WORDS} {i}", summary: f"a river {i}"} for i in range(8)]
        lines(root / f"{name}_test.jsonl", rows[:EXAMPLES])
        lines(root / f"{name}_train.jsonl", rows)
    for name in ("wikitext103", "wikitext2", "ptb"):
        for part in ("test", "train"):
            text(root / name / f"{part}.txt", f"{WORDS} " * 200)
    text(root / "paul_graham" / "essay.txt", f"{WORDS} " * 30)
    return longbench(root, "longbench")


def longbench(root: Path, folder: str, wanted: tuple[str, ...] = task_names("en")) -> Path:
    """Examples of LongBench's tasks in ``folder``, and prompts of our own in place of its official ones."""
    for name in wanted:
        rows = [
            {
                "input": f"what is {i}?",
                "context": f"{WORDS} {i}",
                "answers": ["a river"],
                "all_classes": ["a river", "a sea"] if TASKS[name].metric == "classification" else None,
                "length": 10,
                "_id": f"{folder}-{name}-{i}",
            }
            for i in range(EXAMPLES)
        ]
        lines(root / folder / f"{name}.jsonl", rows)
    text(root / "longbench" / "dataset2prompt.json", json.dumps(dict.fromkeys(TASKS, "{context} {input}")))
    text(root / "longbench" / "dataset2maxlen.json", json.dumps(dict.fromkeys(TASKS, 4)))
    return root


def lines(path: Path, rows: list[dict]) -> None:
    text(path, "".join(json.dumps(row) + "\n" for row in rows))


def table(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
