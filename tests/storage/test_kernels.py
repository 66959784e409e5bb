"""Triton's kernels give the numbers of plain PyTorch, compile for GPUs that are not here, and stay out of the way."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.grids import grid

from kvbench.base.errors import UsageError
from kvbench.kv.segment import Segment
from kvbench.storage import kernels
from kvbench.storage.kernels import SWITCH
from kvbench.storage.row_segments import Ragged, flatten_rows
from kvbench.store.provenance import collect_provenance

pytestmark = pytest.mark.e2e("compiles kernels")

REASON = "triton is not installed (extra gpu: 290 MB, too much for the tests' environment)"
HAVE = importlib.util.find_spec("triton") is not None
triton = pytest.mark.skipif(not HAVE, reason=REASON)
TritonError = importlib.import_module("triton.errors").TritonError if HAVE else RuntimeError
HERE = Path(__file__).parent


def child(command, **env):
    arguments = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=580, env=arguments)
    return done, done.stdout + done.stderr


@triton
@pytest.mark.timeout(600)
def test_numbers_are_those_of_plain_pytorch():
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = ["-m", "pytest", "-x", "-p", "no:cacheprovider", str(HERE / "kernel_cases.py")]
    done, message = child(command, **interpreted)
    assert done.returncode == 0, message
    assert " passed" in message and "skipped" not in message


COMPILE = """
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kvbench.storage.kernels import exact, packed, softmax

BLOCKS = dict(T=1, R=4, D=128, BLOCK_R=16, BLOCK_D=128, BLOCK_N=64, PRODUCT=tl.bfloat16)
WHOLE = dict(key_channels=None, value_channels=None, starts=None, lengths=None)
# numbers that are 1 are compiled in when a kernel is launched
ONES = dict(longest=1, heads=1, queries=1, k_row=1, v_row=1)
KIVI, TOKENS = (3, 32, 32, 12, 64, 1, 0), (4, 32, 64, 32, 2, 0, 1)
FLOATS, CODES = ("split_out", "split_lse", "lse"), ("k_codes", "v_codes")
HALVES = ("query", "keys", "values", "k_ring", "v_ring")

def kind(name):
    if name in HALVES: return "*bf16"
    if name in ("out", *FLOATS): return "*fp32"
    if name in CODES: return "*u8"
    if name in ("k_scale", "k_low", "v_scale", "v_low"): return "*fp16"
    if name.endswith("channels") or name == "starts": return "*i64"
    if name in ("lengths", "counts"): return "*i32"
    return "fp32" if name == "scale" else "i32"

def build(channels, kernel, **constants):
    names = kernel.arg_names
    if kernel is not softmax._merge:
        constants |= dict.fromkeys(("C", "CV", "BLOCK_C", "BLOCK_CV"), channels)
    types = {n: "constexpr" if n in constants else kind(n) for n in names}
    source = ASTSource(kernel, types, {(names.index(n),): x for n, x in constants.items()})
    return len(compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"])
"""


CALLS = (
    (128, "exact._attend, **BLOCKS, **WHOLE, **ONES, CAUSAL=True"),
    (64, "exact._attend, **BLOCKS, CAUSAL=False"),
    (64, "packed._attend, **BLOCKS, K_FORM=KIVI, V_FORM=TOKENS"),
    (64, "packed._attend, **BLOCKS, K_FORM=TOKENS, V_FORM=TOKENS, rows=1, heads=1, queries=1"),
    (128, "softmax._merge, D=128, BLOCK_S=16, BLOCK_D=128"),
)


@triton
@pytest.mark.timeout(600)
def test_kernels_compile_to_machine_code(tmp_path):
    # the interpreter runs code that the compiler refuses
    script = "\n".join([COMPILE, *(f"print('bytes', build({c}, {call}))" for c, call in CALLS)])
    done, message = child(["-c", script], TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, message
    sizes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("bytes")]
    assert len(sizes) == len(CALLS) and min(sizes) > 1000


def test_the_switch(monkeypatch):
    monkeypatch.setenv(SWITCH, "off")
    assert not kernels.enabled() and not kernels.serves(torch.device("cuda"))
    monkeypatch.setenv(SWITCH, "no")
    with pytest.raises(UsageError, match=r"KVBENCH_KERNELS=no: must be on \(kernels where there are any\) or off"):
        kernels.enabled()


def test_a_cpu_is_left_to_plain_pytorch(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernels.serves(torch.device("cpu"))
    x = torch.zeros(1, 1, 1, 16)
    assert kernels.attend(x, [], (x, x), 1.0) is None


def test_without_triton_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "installed", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not kernels.serves(torch.device("cpu")) and not kernels._works.__wrapped__(torch.device("cuda"))


@triton
@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler"), TritonError("out of resource: shared")])
def test_a_device_that_runs_no_kernel_is_left_to_plain_pytorch_with_a_warning(monkeypatch, error):
    from kvbench.storage.kernels import exact

    def refuse(*_):
        raise error

    monkeypatch.setattr(exact, "attend", refuse)
    with pytest.warns(RuntimeWarning, match=rf"on cpu is by plain PyTorch.*\({error}\); KVBENCH_KERNELS=off does"):
        assert not kernels._works.__wrapped__(torch.device("cpu"))


@triton
@grid("longest", [1, 15, 256, 1000, 16384, 10**6])
@grid("programs", [1, 8, 64, 5000])
@grid("token_bytes", [32, 256, 512, 1024, 4096])
def test_splits_cover_every_token_once(longest, programs, token_bytes):
    from kvbench.storage.kernels.softmax import LEAST_SPAN, MOST_SPLITS, TILE_BYTES, cut_runs

    cut = cut_runs(longest, programs, token_bytes, 132)
    assert (cut.count - 1) * cut.span < longest <= cut.count * cut.span and 1 <= cut.count <= MOST_SPLITS
    assert cut.span % cut.block == 0 and cut.block in (16, 32, 64)
    assert cut.block == 16 or cut.block * token_bytes <= TILE_BYTES
    assert cut.count == 1 or (cut.span >= LEAST_SPAN and (cut.count - 1) * programs < 2 * 132)


def test_provenance_says_which_attention_it_was(monkeypatch):
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    for on_gpu, on_cpu, name in ((False, False, "plain"), (True, False, "triton"), (False, True, "c")):
        monkeypatch.setattr(kernels, "serves", lambda device, found=on_gpu: found)
        monkeypatch.setattr(kernels.on_cpu, "installed", lambda found=on_cpu: found)
        assert collect_provenance(model, 1)["attention"] == name
    monkeypatch.setenv(SWITCH, "off")
    assert collect_provenance(model, 1)["attention"] == "plain"


@pytest.mark.parametrize("counts", [[[5, 5], [3, 3], [0, 0]], [[5, 6], [3, 3], [0, 1]], [[7], [4], [2]]])
def test_counts_of_rows(counts):
    actual = kernels._counts_on_device(counts, torch.device("cpu"))
    assert actual.tolist() == counts and actual.dtype == torch.int32 and actual.is_contiguous()


def test_rows_of_ragged_heads_move_up():
    lengths = [[2, 0, 3], [1, 1, 1], [4, 2, 5]]
    stored, start = [], 0
    for row in lengths:
        k = torch.arange(start, start + sum(row)).float().view(1, -1, 1)
        stored.append(Segment(k, -k, torch.zeros(1, k.shape[1]).int(), torch.tensor(row, dtype=torch.int32)))
        start += sum(row)
    segment = flatten_rows(stored)
    assert isinstance(segment, Ragged) and segment.starts.tolist() == [[0, 2, 2], [5, 6, 7], [8, 12, 14]]
    remaining = segment.rows(torch.tensor([0, 2]))
    assert remaining.k[:, 0].tolist() == [*range(5), *range(8, 19)] == (-remaining.v[:, 0]).tolist()
    assert (remaining.starts.tolist(), remaining.longest) == ([[0, 2, 2], [5, 9, 11]], 5)
    padded = remaining.padded()
    assert padded.valid.sum(dim=-1).tolist() == [[2, 0, 3], [4, 2, 5]]
    assert padded.k[1, 2, :, 0].tolist() == [14, 15, 16, 17, 18] and padded.k[0, 2, :3, 0].tolist() == [2, 3, 4]
