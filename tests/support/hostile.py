"""Methods that misbehave, each in its own way, and why each is refused."""

import builtins
import os
import random
import re
import secrets
import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from kvbench.kv import ops
from kvbench.kv.observation import Needs
from kvbench.methods.core.base import Selector
from kvbench.methods.keynorm import KeyNorm
from kvbench.methods.snapkv import SnapKV

kept = []  # what methods stash where nobody looks
MODES = {}  # mode -> (what it does with (stage, cache, obs), why it is refused; None: it harms only itself)
RESULTS = {}  # the same of (stage, its compressed cache, the dense cache, obs), which returns another cache


def by_storage(t):
    t.untyped_storage().copy_(t.mul(2).untyped_storage())


def by_numpy(t):
    t.numpy()[:] = 1


IN_PLACE = {
    "centred": ("keys", lambda t: t.sub_(t.mean(1, keepdim=True))),
    "zeroed": ("keys", lambda t: t.zero_()),
    "scaled": ("values", lambda t: t.mul_(1.001)),
    "by data": ("keys", lambda t: t.data.mul_(2)),
    "by numpy": ("values", by_numpy),
    "by storage": ("keys", by_storage),
    "by a view": ("values", lambda t: t.view(-1)[::2].neg_()),
    "in another order": ("values", lambda t: t.data.copy_(t.flip(1))),
    "nan": ("keys", lambda t: t.fill_(torch.nan)),
    "resized": ("keys", lambda t: t.resize_(1)),
    "swapped": ("keys", lambda t: t.set_(torch.ones(3))),
    "moved": ("positions", lambda t: t.add_(1)),
    "last queries": ("last_q", lambda t: t.zero_()),
    "first queries": ("first_q", lambda t: t.zero_()),
    "column sums": ("colsums", lambda t: t.zero_()),
    "hidden states": ("hidden", lambda t: t.zero_()),
    "frequencies": ("inv_freq", lambda t: t.data.mul_(2)),
}


def in_place(name, how):
    def act(stage, cache, obs):
        (s,) = cache.segments
        own_value = {"keys": s.k, "values": s.v, "positions": s.positions}
        how(own_value[name] if name in own_value else getattr(obs, name))

    return act


for mode, (what, how) in IN_PLACE.items():
    MODES[mode] = in_place(what, how), f"hostile changes what it is handed in place: {what} of layer 1; clone first"
MODES["resized"] = MODES["swapped"] = in_place(*IN_PLACE["resized"]), "IndexError"


def mode(why=None, of=MODES):
    def add(act):
        of[act.__name__.replace("_", " ")] = act, why
        return act

    return add


def result(why=None):
    return mode(why, RESULTS)


@mode()
def changes_it_later(stage, cache, obs):
    kept.append(cache.segments[0])
    for s in kept[:-1]:
        s.k.zero_(), s.v.zero_()


@mode()
def spoils_what_is_computed_once(stage, cache, obs):
    obs.scratch[ops.dense, cache.heads] = obs.scratch[KeyNorm] = None
    obs.colsums_q[8] = None


@mode("ZeroDivisionError: division by zero")
def raises(stage, cache, obs):
    raise ZeroDivisionError("division by zero")


@mode("hostile would end the program: SystemExit 0")
def exits(stage, cache, obs):
    sys.exit(0)


@mode("hostile would end the program: GeneratorExit")
def ends(stage, cache, obs):
    raise GeneratorExit


@mode()
def sets_what_is_global(stage, cache, obs):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.default_generator.manual_seed(0)  # torch.manual_seed, without what it does for GPUs


def replacing(owner, name):
    def act(stage, cache, obs):
        def wrong(*args, **kwargs):
            raise IndexError("not what others called")

        setattr(owner, name, wrong)

    return act


REPLACED = {
    "torch.topk": (torch, "topk"),
    "torch.Tensor.sum": (torch.Tensor, "sum"),  # which the class inherits
    "torch.nn.functional.softmax": (torch.nn.functional, "softmax"),
    "transformers.models.llama.modeling_llama.LlamaAttention.forward": (LlamaAttention, "forward"),
    "transformers.models.llama.modeling_llama.rotate_half": (modeling_llama, "rotate_half"),
    "kvbench.kv.ops.select": (ops, "select"),
    "kvbench.kv.ops.len": (ops, "len"),  # which is built in
    "kvbench.methods.snapkv.SnapKV.scores": (SnapKV, "scores"),
    "builtins.sorted": (builtins, "sorted"),
}


@mode("hostile replaces what every module does by a hook after it")
def hooks_all_modules(stage, cache, obs):
    torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)


for replaced, (owner, name) in REPLACED.items():
    MODES[f"replaces {replaced}"] = replacing(owner, name), re.escape(f"hostile replaces {replaced}, with which other")


class Zeros(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 0 if function is torch.Tensor.sum else result


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@mode("hostile replaces all functions of torch by a TorchFunctionMode that it does not leave")
def enters_a_mode(stage, cache, obs):
    Zeros().__enter__()


@mode("hostile replaces all functions of torch by a TorchDispatchMode that it does not leave")
def enters_a_dispatch_mode(stage, cache, obs):
    Dispatched().__enter__()


@mode("hostile replaces all functions of torch by a TorchFunctionMode")
def sets_the_default_device(stage, cache, obs):
    torch.set_default_device("meta")


@mode()
def leaves_autocast_on(stage, cache, obs):
    torch.set_autocast_enabled("cpu", True)


@mode("hostile replaces an attention function of transformers")
def replaces_an_attention_function(stage, cache, obs):
    ALL_ATTENTION_FUNCTIONS._global_mapping["kvbench"] = None


@mode("hostile replaces torch.nn.modules.activation.SiLU.forward")
def replaces_a_layer(stage, cache, obs):
    torch.nn.SiLU.forward = lambda self, x: x * 0


@mode("hostile would end the program: SystemExit by os._exit")
def ends_at_once(stage, cache, obs):
    os._exit(0)


@mode("hostile would end the program: SystemExit by os._exit")
def ends_at_once_by_another_name(stage, cache, obs):
    sys.modules[os.name]._exit(0)


@mode("sys.stdout is not the method's to close")
def closes_a_stream(stage, cache, obs):
    sys.stdout.close()


@mode("sys.__stderr__ is not the method's to close")
def closes_the_first_stream(stage, cache, obs):
    sys.__stderr__.close()


@mode()
def puts_another_stream_in_its_place(stage, cache, obs):
    sys.stderr = sys.stdout = None


@mode("hostile changes its own options while it runs")
def forgets_its_knobs(stage, cache, obs):
    object.__setattr__(stage, "kv_size", 32)


@mode()
def hoards(stage, cache, obs):
    kept.append((cache, obs))


@result("'NoneType' object has no attribute")
def nothing(stage, honest, cache, obs):
    return None


@result("has no attribute")
def another_type(stage, honest, cache, obs):
    return honest.segments[0].k


@result("layer 1 keeps 128 tokens per head of 128, but the method declares exactly 64")
def all_of_it(stage, honest, cache, obs):
    return cache


@result("is a view that keeps")
def views(stage, honest, cache, obs):
    (s,) = cache.segments
    few = replace(s, k=s.k[:, :64], v=s.v[:, :64], positions=s.positions[:, :64])
    return replace(cache, segments=(few,))


@result("payload bytes")
def half_precision(stage, honest, cache, obs):
    (s,) = honest.segments
    return replace(honest, segments=(replace(s, k=s.k.half(), v=s.v.half()),))


@result("overhead bytes")
def hides_a_copy_in_its_state(stage, honest, cache, obs):
    (s,) = honest.segments
    return replace(honest, segments=(replace(s, state={"copy": s.k.clone()}),))


@result("shares its storage")
def values_are_keys(stage, honest, cache, obs):
    (s,) = honest.segments
    return replace(honest, segments=(replace(s, v=s.k),))


def placed(honest, change):
    (s,) = honest.segments
    return replace(honest, segments=(replace(s, positions=change(s.positions.clone())),))


ORDER = "does not hold distinct prompt positions 0..127 in order"


@result(ORDER)
def twice_the_same(stage, honest, cache, obs):
    return placed(honest, lambda p: p[:, :1].expand_as(p).contiguous())


@result(ORDER)
def unsorted(stage, honest, cache, obs):
    return placed(honest, lambda p: p.flip(1))


@result(ORDER)
def beyond_the_prompt(stage, honest, cache, obs):
    return placed(honest, lambda p: p + 100)


@result(ORDER)
def before_the_prompt(stage, honest, cache, obs):
    return placed(honest, lambda p: p - 100)


OTHERS = "that are not those of the prompt at the positions it names"


def chosen(cache, scores):
    """Keep the 64 tokens with the best scores [n]."""
    return ops.select(cache, scores.topk(64).indices.sort().values[None])


@result()
def draws_from_torch(stage, honest, cache, obs):
    return chosen(cache, torch.rand(obs.n))


@result()
def draws_from_python_and_numpy(stage, honest, cache, obs):
    return chosen(cache, torch.tensor([random.random() + np.random.rand() for _ in range(obs.n)]))


TWICE = r"keeps something else of the same prompt when it computes it twice \(layer 1\)"


@result(TWICE)
def remembers_the_prompts_before(stage, honest, cache, obs):
    kept.append(obs.layer)
    scores = torch.arange(obs.n)
    return chosen(cache, scores if kept.count(obs.layer) % 2 else -scores)


@result(TWICE)
def draws_from_the_system(stage, honest, cache, obs):
    return chosen(cache, torch.tensor([secrets.randbelow(1000) for _ in range(obs.n)]))


@result()
def says_that_it_merges(stage, honest, cache, obs):
    (s,) = honest.segments
    object.__setattr__(stage, "changes", "halves keys")
    return replace(honest, segments=(replace(s, k=s.k / 2),))


@result(OTHERS)
def the_first_under_the_positions_of_the_last(stage, honest, cache, obs):
    first = ops.select(cache, torch.arange(64)[None]).segments[0]
    return replace(honest, segments=(replace(first, positions=honest.segments[0].positions),))


@result(f"holds values {OTHERS}")
def values_of_other_heads(stage, honest, cache, obs):
    (s,) = honest.segments
    return replace(honest, segments=(replace(s, v=s.v.flip(0)),))


@result(f"holds keys {OTHERS}")
def keys_that_nobody_computed(stage, honest, cache, obs):
    (s,) = honest.segments
    return replace(honest, segments=(replace(s, k=s.k + 1),))


@result()
def on_another_device(stage, honest, cache, obs):
    (s,) = honest.segments
    return replace(honest, segments=(replace(s, k=s.k.to("meta")),))


@result("different lengths")
def fewer_values(stage, honest, cache, obs):
    (s,) = honest.segments
    return replace(honest, segments=(replace(s, v=s.v[:, :-1].clone()),))


@result("payload bytes")
def more_heads(stage, honest, cache, obs):
    (s,) = honest.segments
    k, v, p = (torch.cat([t, t]) for t in (s.k, s.v, s.positions))
    return replace(honest, segments=(replace(s, k=k, v=v, positions=p),))


@result("holds no token at all|keeps 0 tokens")
def no_tokens(stage, honest, cache, obs):
    return ops.select(cache, torch.zeros(1, 0, dtype=torch.int64))


@result()
def no_segments(stage, honest, cache, obs):
    return replace(honest, segments=())


@result("says that it has read 999 tokens")
def read_more_than_there_was(stage, honest, cache, obs):
    return replace(honest, seen=999)


@dataclass(frozen=True, kw_only=True)
class Hostile(Selector):
    """Keeps the last tokens, and does from its second layer on what ``mode`` says."""

    id = "hostile"

    mode: str = ""

    def needs(self, n):
        return Needs(last_q=8, first_q=8, colsums=True, hidden=True)

    def compress(self, cache, obs):
        act, _ = MODES.get(self.mode, (None, None))
        if act and obs.layer >= 1:
            act(self, cache, obs)
        budget = self.budget(len(cache.segments[0].positions[0]), obs.layer, obs.n_layers)
        actual = ops.select(cache, torch.arange(obs.n)[None, -budget:])
        change, _ = RESULTS.get(self.mode, (None, None))
        return change(self, actual, cache, obs) if change and obs.layer >= 1 else actual
