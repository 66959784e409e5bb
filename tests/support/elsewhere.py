"""A GPU that is not there: tensors that say they are on cuda:0 and are computed on the CPU. Whatever mixes devices
fails as it would on a real one, and ``waits`` tells where the processor would have to wait for the device."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kvbench.engine import prefill, prompt_layer
from kvbench.models import interface
from kvbench.storage import kernels

DEVICE = torch.device("cuda:0")
INDEXING = {"aten::index": 1, "aten::index_put_": 2, "aten::index_put": 2, "aten::_index_put_impl_": 2}
"""Operations whose indices may be on the CPU, by how many of their arguments may not."""
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2")


class Elsewhere(torch.Tensor):
    """Of the meta device for PyTorch's own code, of ``DEVICE`` for everybody else."""

    @staticmethod
    def __new__(cls, inner):
        how = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), device="meta", **how)

    def __init__(self, inner):
        self.inner = inner

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)

    def __repr__(self):
        return f"Elsewhere({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, [])


def _far(x):
    return isinstance(x, Elsewhere)


def _mapped(function, x):
    """``x`` with ``function`` of each of its tensors: what operations take and give is at most lists of them."""
    if isinstance(x, torch.Tensor):
        return function(x)
    if type(x) in (list, tuple):
        return type(x)([_mapped(function, part) for part in x])
    return x


def _tensors(args):
    tensors = []
    for x in args:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
        elif isinstance(x, list | tuple):
            tensors += _tensors(x)
    return tensors


def _run(func, args, kwargs, waits):
    name, requested = func._schema.name, kwargs.get("device")
    inputs = _tensors((*args, *kwargs.values()))
    distant, near = [x for x in inputs if _far(x)], [x for x in inputs if not _far(x)]
    moves = name in ("aten::copy_", "aten::_to_copy")
    to = (
        _far(args[0])
        if name == "aten::copy_"
        else bool(distant)
        if requested is None
        else torch.device(requested).type != "cpu"
    )
    if distant and near and not moves:
        same = args[:1] + args[2:3] if name in INDEXING else inputs
        if len({_far(x) for x in same if isinstance(x, torch.Tensor) and (x.dim() or _far(x))}) > 1:
            shapes = [("cuda" if _far(x) else "cpu", *x.shape) for x in inputs]
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {shapes}")
    if (moves and inputs and to != _far(inputs[-1])) or (distant and name.endswith(WAITING)):
        waits.append(name)
    if distant and name in INDEXING:
        index = [x for x in args[1] if x is not None]
        waits.extend(name for x in index if not _far(x) or x.dtype == torch.bool)
    if requested is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}

    def unwrapped(x):
        return x.inner if _far(x) else x

    inner = {key: _mapped(unwrapped, x) for key, x in kwargs.items()}
    actual = func(*_mapped(unwrapped, tuple(args)), **inner)
    wrapped = {id(x.inner): x for x in distant}

    def back(x):
        return wrapped.get(id(x)) if id(x) in wrapped else Elsewhere(x)

    return _mapped(back, actual) if to else actual


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, self.waits)


class _Calls(TorchFunctionMode):
    """What reaches no operation: tensors made of Python's numbers, and numbers made of tensors."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        built = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        if built and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            self.waits.append("tensor")
            del kwargs["device"]
            with _disable_current_modes():
                return Elsewhere(func(*args, **kwargs))
        if func is torch.Tensor.tolist and _far(args[0]):
            self.waits.append("tolist")
            return args[0].inner.tolist()
        return func(*args, **kwargs)


def _product(a, b, *, out_dtype=None):
    """PyTorch's own on a CPU has no ``out_dtype``."""
    return torch.einsum("bij,bjk->bik", a.to(out_dtype or a.dtype), b.to(out_dtype or b.dtype))


@contextmanager
def pretended():
    """Tensors can be made on ``DEVICE`` here; yields the list of what would have waited for it, so far."""
    operations = _Operations()
    with (
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(interface, "synchronise", lambda device: None),
        patch.object(prefill, "synchronise", lambda device: None),
        patch.object(prompt_layer, "synchronise", lambda device: None),
        patch.object(kernels, "serves", lambda device: False),
        patch.object(torch, "bmm", _product),
        operations,
        _Calls(operations.waits),
    ):
        yield operations.waits


def moved(model: nn.Module):
    """``model`` itself, its weights on ``DEVICE``."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(Elsewhere(p.data), requires_grad=False)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = Elsewhere(b.data)
    return model
