"""The compiled attention over packed tokens: the numbers of plain PyTorch, which serves where it cannot be had."""

import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvbench.cache.packed import BITS, quantise_channels, quantise_tokens, quantise_zero_point
from kvbench.cache.partly_packed import Codes, Residual
from kvbench.cache.segment import Segment
from kvbench.errors import UsageError
from kvbench.run.provenance import provenance
from kvbench.storage import native
from kvbench.storage.native import build
from kvbench.storage.packed_rows import CodedRows, exact, packed_logits, packed_weigh

compiled = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.setenv(build.SWITCH, "on")


def both(monkeypatch, fn):
    """What ``fn`` returns on the compiled path and on the plain one; the first must not fall back."""
    assert native.available()
    found = fn()
    monkeypatch.setenv(build.SWITCH, "off")
    want = fn()
    monkeypatch.setenv(build.SWITCH, "on")
    return found, want


def close(found, want, at=1e-5):
    """Equal to ``at`` of the largest number."""
    assert found.shape == want.shape and found.dtype == want.dtype
    assert (found - want).abs().max() <= at * max(want.abs().max().item(), 1.0)


def packings(u, h, n, c, bits):
    x = random(u, h, n, c, seed=bits) * random(c, seed=9).exp() + 0.5
    yield quantise_tokens(x, bits, 32)
    yield quantise_tokens(x, bits, 5)
    yield quantise_tokens(x, bits, 1, constant_scale=1.0)
    yield quantise_zero_point(x, bits)
    for group in (g for g in (1, 5, 32) if n % g == 0):
        yield quantise_channels(x, bits, group)


@compiled
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("u", "h", "group", "t", "n", "c"),
    [(1, 1, 1, 1, 1, 1), (2, 2, 4, 1, 96, 128), (3, 2, 2, 1, 65, 77), (1, 3, 1, 3, 160, 20), (2, 1, 8, 2, 35, 17)],
)
def test_products_equal_the_plain_ones(monkeypatch, bits, u, h, group, t, n, c):
    query, probs = random(u, h * group, t, c, seed=4), random(u, h * group, t, n, seed=5).softmax(dim=-1)
    for packed in packings(u, h, n, c, bits):
        assert native.logits(query.view(u, h, group * t, c), packed) is not None
        close(*both(monkeypatch, lambda p=packed: packed_logits(query, p, c**-0.5, None, exact)))
        close(*both(monkeypatch, lambda p=packed: packed_weigh(probs, p)))


@compiled
def test_products_equal_those_with_numbers_in_double_precision():
    x, query = random(1, 2, 64, 48), random(1, 8, 1, 48, seed=1)
    packed = quantise_channels(x, 3, 32)
    want = query.double() @ packed.dequantise(torch.float32).double().repeat_interleave(4, dim=1).transpose(2, 3)
    found = packed_logits(query, packed, 1.0, None, exact)
    assert (found - want).abs().max() < 1e-5


@compiled
def test_thin_keys_and_stand_ins(monkeypatch):
    channels = torch.stack([random(2, 24, seed=s).argsort(dim=-1)[:, :9].sort(dim=-1).values for s in (1, 2)])
    query, packed = random(2, 4, 1, 24), quantise_channels(random(2, 2, 64, 9, seed=3), 2, 32)
    close(*both(monkeypatch, lambda: packed_logits(query, packed, 0.2, channels, exact)))
    close(*both(monkeypatch, lambda: packed_logits(query, packed, 0.2, channels, lambda keys: keys.round())))
    assert not torch.allclose(
        packed_logits(query, packed, 0.2, channels, exact), packed_logits(query, packed, 0.2, channels, torch.round)
    )


@compiled
def test_views_of_a_growing_buffer_and_foreign_layouts(monkeypatch):
    query = random(2, 4, 1, 40)
    for packed in packings(2, 2, 160, 40, 4):
        view = packed.tokens(0, 60 if packed.axis == "token" else 160 // packed.group // 2 * packed.group)
        close(*both(monkeypatch, lambda v=view: packed_logits(query, v, 0.2, None, exact)))
        turned = packed.map(lambda t: t.transpose(0, -1).contiguous().transpose(0, -1))
        assert native.logits(query.view(2, 2, 2, 40), turned) is None
        close(packed_logits(query, turned, 0.2, None, exact), packed_logits(query, packed, 0.2, None, exact))


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_left_to_plain_pytorch_which_does_not_round_logits(dtype):
    query, packed = random(1, 8, 1, 64).to(dtype), quantise_channels(random(1, 2, 64, 64, seed=3), 4, 32)
    assert native.logits(query.view(1, 2, 4, 64), packed) is None
    assert native.weigh(query.view(1, 2, 4, 64), packed) is None
    keys = packed.dequantise(dtype).float().repeat_interleave(4, dim=1)
    found = packed_logits(query, packed, 0.125, None, exact)
    torch.testing.assert_close(found, 0.125 * (query.float() @ keys.transpose(2, 3)), atol=1e-5, rtol=1e-5)


class Kivi:
    """Keys by channel in groups of 8, values by token; either thin where channels are given."""

    keys = Residual(0, 16, 8)
    values = Residual(5, 1, 1)

    def __init__(self, bits):
        self.bits = bits

    def pack_keys(self, x):
        return quantise_channels(x, self.bits, 8)

    def pack_values(self, x):
        return quantise_tokens(x, self.bits, 8)


def segment(coder, h, n, d, thin, seed):
    k, v = random(h, n, d, seed=seed), random(h, n, d, seed=seed + 50)
    channels = [random(h, d, seed=seed + s).argsort(dim=-1)[:, : d // 2].sort(dim=-1).values for s in (7, 8)]
    old_k, old_v = coder.keys.packed(n), coder.values.packed(n)
    first = [k[:, :old_k], v[:, :old_v]]
    if thin:
        first = [x.gather(2, c[:, None].expand(-1, x.shape[1], -1)) for x, c in zip(first, channels, strict=True)]
    codes = Codes(coder.pack_keys(first[0]), coder.pack_values(first[1]))
    given = {"key_channels": channels[0].int(), "value_channels": channels[1].int()} if thin else {}
    positions = torch.arange(n, dtype=torch.int32).expand(h, n)
    return Segment(k[:, old_k:], v[:, old_v:], positions, codes=codes, **given)


@compiled
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize(
    ("lengths", "h", "group", "t", "d"),
    [
        ((40,), 2, 4, 1, 32),
        ((3, 40, 17), 1, 2, 1, 20),
        ((64, 60), 2, 1, 3, 33),
        ((9,), 1, 8, 2, 64),
        ((2,), 1, 1, 1, 8),
    ],
)
def test_steps_of_rows_equal_the_plain_ones(monkeypatch, bits, thin, lengths, h, group, t, d):
    coder = Kivi(bits)

    def steps():
        rows = CodedRows([segment(coder, h, n, d, thin, s) for s, n in enumerate(lengths)], coder, 30, at_once=t)
        found = []
        for i in range(8):
            rows.add(random(len(lengths), h, t, d, seed=100 + i), random(len(lengths), h, t, d, seed=200 + i))
            found.append(rows.attend(random(len(lengths), h * group, t, d, seed=300 + i), d**-0.5))
            if i == 5 and len(lengths) > 1:
                rows.keep(torch.tensor([1]))
                lengths_left = (lengths[1],)
                rows.add(random(len(lengths_left), h, t, d, seed=99), random(len(lengths_left), h, t, d, seed=98))
                found.append(rows.attend(random(1, h * group, t, d, seed=97), d**-0.5))
                break
        return found, rows.k.held(0)[0].codes

    (found, codes), (want, plain_codes) = both(monkeypatch, steps)
    assert torch.equal(codes, plain_codes)
    for one, other in zip(found, want, strict=True):
        close(one, other)


@compiled
def test_a_row_alone_gives_the_same_bits():
    coder = Kivi(4)
    segments = [segment(coder, 2, n, 24, False, n) for n in (40, 55)]
    k, v, q = (random(2, heads, 1, 24, seed=s) for s, heads in enumerate((2, 2, 6)))
    together, alone = CodedRows(segments, coder, 4), CodedRows(segments[:1], coder, 4)
    together.add(k, v)
    alone.add(k[:1], v[:1])
    assert torch.equal(together.attend(q, 0.2)[:1], alone.attend(q[:1], 0.2))


@compiled
def test_values_that_are_not_numbers_are_not_hidden(monkeypatch):
    coder = Kivi(4)
    rows = CodedRows([segment(coder, 1, 40, 16, False, 0)], coder, 4)
    rows.add(random(1, 1, 1, 16), random(1, 1, 1, 16))
    query = random(1, 2, 1, 16)
    query[0, 1, 0, 3] = torch.nan
    out = native.attend(
        query, 0.2, (rows.k.old(), rows.v.old()), (rows.k.ring, rows.v.ring), (None, None), [[41], [32], [35]]
    )
    assert out[0, 0].isfinite().all() and out[0, 1].isnan().all()


@compiled
def test_many_threads_give_the_bits_of_one():
    x = quantise_channels(random(2, 8, 512, 64), 2, 32)
    query, before = random(2, 8, 4, 64), torch.get_num_threads()
    one = native.logits(query, x)
    try:
        torch.set_num_threads(4)
        assert torch.equal(native.logits(query, x), one)
    finally:
        torch.set_num_threads(before)


BUILD = """
import sys
from pathlib import Path
from types import SimpleNamespace
from kvbench.storage.native import build
build.load(build.find_compiler(), Path(sys.argv[1])).packed_attend
print("loaded")
"""


@compiled
def test_processes_that_build_at_once(tmp_path):
    folder = tmp_path / "native"
    folder.mkdir(mode=0o700)
    command = [sys.executable, "-c", BUILD, str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate(timeout=240)[0] for p in running] == ["loaded\n"] * 2
    (made,) = folder.iterdir()
    assert made.name.startswith("packed-") and made.stat().st_mode & 0o777 == 0o700
    stamp = made.stat().st_mtime_ns
    build.load(build.find_compiler(), folder)
    assert made.stat().st_mtime_ns == stamp


@compiled
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_torn_library_or_one_that_others_may_write_is_built_again(tmp_path, mode):
    compiler = build.find_compiler()
    path = tmp_path / f"packed-{build._key(compiler, build.SOURCE)}.so"
    path.write_bytes(b"torn or planted")
    path.chmod(mode)
    assert build.load(compiler, tmp_path).packed_attend
    assert path.stat().st_mode & 0o777 == 0o700 and path.stat().st_size > 1000


@compiled
def test_a_folder_that_others_may_write_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = build.cache_folder()
    assert folder == tmp_path / "kvbench" / "native" and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    assert build.cache_folder() is None
    folder.chmod(0o700)
    link = tmp_path / "linked"
    (link / "kvbench").mkdir(parents=True)
    (link / "kvbench" / "native").symlink_to(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(link))
    assert build.cache_folder() is None
    assert build.load(build.find_compiler(), None).packed_attend


@pytest.fixture
def forgotten():
    build.library.cache_clear()
    yield
    build.library.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_without_a_compiler_plain_pytorch_serves(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    query, packed = random(1, 2, 1, 16), quantise_channels(random(1, 2, 32, 16), 4, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.available()
        found = packed_logits(query, packed, 1.0, None, exact)
    want = query @ packed.dequantise(torch.float32).transpose(2, 3)
    close(found, want)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forgotten")
def test_a_failed_build_warns_once(monkeypatch, tmp_path):
    fake = tmp_path / "c++"
    fake.write_text(
        "#!/bin/sh\necho 'packed.cpp:1: error: no such thing' >&2\necho '   1 | here' >&2\nexit 1\n", encoding="utf-8"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    query, packed = random(1, 2, 1, 16), quantise_channels(random(1, 2, 32, 16), 4, 32)
    with pytest.warns(RuntimeWarning, match=r"plain PyTorch, .*packed\.cpp:1: error: no such thing"):
        packed_logits(query, packed, 1.0, None, exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed_logits(query, packed, 1.0, None, exact)
    assert list(build.cache_folder().iterdir()) == []


def test_the_switch(monkeypatch):
    monkeypatch.setenv(build.SWITCH, "off")
    assert not native.available()
    query, packed = random(1, 1, 2, 16), quantise_channels(random(1, 1, 32, 16), 4, 32)
    assert native.logits(query, packed) is None and native.weigh(random(1, 1, 2, 32), packed) is None
    monkeypatch.setenv(build.SWITCH, "maybe")
    with pytest.raises(UsageError, match=r"KVBENCH_NATIVE=maybe: must be on .* or off"):
        native.available()


@compiled
def test_the_code_compiles_without_this_machines_instructions(tmp_path):
    made = tmp_path / "plain.so"
    command = [*build.find_compiler(), *build.FLAGS, "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-variable"]
    done = subprocess.run([*command, str(build.SOURCE), "-o", str(made)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    code = ctypes.CDLL(str(made))
    query, packed, out = random(1, 1, 3, 20), quantise_tokens(random(1, 1, 37, 20), 3, 8), torch.empty(1, 1, 3, 37)
    at = [ctypes.c_void_p(t.data_ptr()) for t in (query, out)]
    assert code.packed_logits(native._coded(packed), at[0], *native._numbers(1, 1, 3, 37), at[1], 1) == 0
    close(out, query @ packed.dequantise(torch.float32).transpose(2, 3))


def test_the_source_is_part_of_the_package():
    assert build.SOURCE.is_file() and build.SOURCE.parent == Path(native.__file__).parent
    assert os.access(build.SOURCE, os.R_OK)


@pytest.mark.parametrize(("device", "on"), [("cpu", True), ("cpu", False), ("cuda", True)])
def test_provenance_says_how_packed_caches_were_read(monkeypatch, device, on):
    monkeypatch.setenv(build.SWITCH, "on" if on else "off")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setenv("KVBENCH_KERNELS", "off")  # probing them would need a GPU
    found = provenance(SimpleNamespace(device=torch.device(device), dtype=torch.float32), 1)["packed"]
    assert found == ("compiled" if device == "cpu" and on and build.find_compiler() else "plain")
