"""Today's families on small random models: the full cache answers as transformers does, and methods pass the audit."""

import shutil
from contextlib import nullcontext

import pytest
import torch
from support.runs import run_json
from transformers import AutoConfig, AutoModelForCausalLM

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.engine.likelihood import teacher_force
from kvbench.engine.patches import group_by_batch
from kvbench.models import embedded
from kvbench.models.interface import cache_shape
from kvbench.models.traits import TESTED

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
ORIGINAL = {"rope_theta": 10_000.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "llama 3.1, past its original context": (
        "llama",
        {"max_position_embeddings": 256, "rope_parameters": SCALED | ORIGINAL},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "mistral nemo": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi4-mini, a part of each head rotated": (
        "phi3",
        {
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3 128k, past its original context": (
        "phi3",
        {"sliding_window": None, "max_position_embeddings": 256, "rope_parameters": LONG | ORIGINAL},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
METHODS = ["snapkv", "h2o", "streamingllm", "tova", "adakv", "pyramidkv", "think recent=8", "kivi group=4 residual=8"]
METHODS += ["snapkv+think recent=8", "h2o variant=orig", "q8_0 group=16", "turboquant", "refreekv"]
N, NEW = 60, 12


def build(family, **more):
    torch.manual_seed(0)
    config = {
        **SMALL,
        **({"original_max_position_embeddings": 32} if "rope_parameters" in more and family == "phi3" else {}),
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config | more)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3)  # attention far from uniform
    return model


def prompt():
    return torch.randint(5, 120, (1, N), generator=torch.Generator().manual_seed(1))


def answer_of(model, ids, new=NEW):
    """What transformers answers with its own cache."""
    out = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


def entry(written):
    method, *knobs = written.split()
    sized = method.split("+")[0] in ("snapkv", "h2o", "streamingllm", "tova", "adakv", "pyramidkv")
    window = sized and method.split("+")[0] not in ("streamingllm", "tova")
    numbers = {k: v if k == "variant" else int(v) for k, v in (knob.split("=") for knob in knobs)}
    return {"method": method, **({"kv_size": 24} if sized else {}), **({"window": 8} if window else {}), **numbers}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_full_cache_answers_as_transformers_does_and_methods_keep_their_promises(name):
    family, more = FAMILIES[name]
    model, ids = build(family, **more), prompt()
    wanted = answer_of(model, ids)
    with nullcontext() if family in TESTED else pytest.warns(UserWarning, match="Untested family"):
        full, *caches = kvbench.prefill(model, ids, ["full", *map(entry, METHODS)])
    assert kvbench.generate(model, [full], NEW) == [wanted]
    for cache in caches:
        assert audit(cache, cache_shape(model)).payload > 0
    answers = kvbench.generate(model, caches, NEW)
    assert all(len(answer) == NEW for answer in answers)


def test_a_rotation_that_would_change_in_the_middle_of_an_answer_is_refused():
    family, more = FAMILIES["phi3 128k, past its original context"]
    model = build(family, **more)
    short = prompt()[0, :25]
    (cache,) = kvbench.prefill(model, short, ["full"])
    assert kvbench.generate(model, [cache], 7) == [answer_of(model, short[None], 7)]
    with pytest.raises(UsageError, match=r"more than 32 tokens .*LongRoPE.* 25 \+ 8: .*in the middle of the answer"):
        kvbench.generate(model, [cache], 8)
    with pytest.raises(UsageError, match=r"25 \+ 20"):
        kvbench.extend(model, cache, prompt()[0, :20])
    with pytest.raises(UsageError, match=r"25 \+ 20"):
        teacher_force(model, [cache], prompt()[0, :20], 20)


def test_a_run_refuses_prompts_whose_answers_would_cross_it_and_answers_the_others(tmp_path, capsys):
    folder = tmp_path / "phi3"
    turn = {"original_max_position_embeddings": 140, "rope_theta": 10_000.0}
    config = {**SMALL, "vocab_size": 1024, "max_position_embeddings": 512, "sliding_window": None}
    scaled = {"rope_parameters": LONG | turn, "original_max_position_embeddings": 140}
    AutoConfig.for_model("phi3", **config, **scaled).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.path() / name, folder)
    arguments = [f"model={folder}", "weights=random", "dataset=tiny/needle", "limit=1", "method=snapkv"]
    status, report = run_json(capsys, *arguments, "length=64,140,256", f"results={tmp_path / 'r'}")
    cells = {(row["method"].split()[0], c["task"]): c for row in report["rows"] for c in row["cells"]}
    refused = {task for (_, task), c in cells.items() if c["status"] == "refused"}
    assert status == 1 and len(cells) == 6 and len(refused) == 1
    assert all("LongRoPE" in c["reason"] for (_, task), c in cells.items() if task in refused)
    assert all(c["n"] == 1 for (_, task), c in cells.items() if task not in refused)


def test_prompts_of_both_rotations_are_no_rows_of_one_batch():
    family, more = FAMILIES["phi3 128k, past its original context"]
    model = build(family, **more)
    caches = [c for n in (20, 60) for c in kvbench.prefill(model, prompt()[0, :n], ["full", "think"])]
    assert group_by_batch(caches) == [[0, 1], [2, 3]]
    alone = [kvbench.generate(model, [c], 8)[0] for c in caches]
    assert kvbench.generate(model, caches, 8) == alone
    assert alone[0] == answer_of(model, prompt()[:, :20], 8) and alone[2] == answer_of(model, prompt(), 8)


def test_no_method_rotates_keys_of_a_model_whose_rotation_depends_on_the_length():
    family, more = FAMILIES["phi3 128k, past its original context"]
    with pytest.raises(UsageError, match=r"rotary positions \(longrope\) change with the length"):
        kvbench.prefill(build(family, **more), prompt(), [{"method": "streamingllm", "mode": "rolled"}])
