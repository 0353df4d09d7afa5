"""A CUDA device that is none: its tensors are computed on the CPU, and refused where a GPU would refuse them.

`torch`'s own fake tensors hold no values, so that they stop at the first shape that depends on values. These hold them:
whole training steps run, and are compared with those of a CPU. Refused is every operation on tensors of both devices,
but for those that torch allows: copies, indices on the CPU, and single numbers of the CPU.
"""

from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
#: Take tensors of both devices.
_COPIES = {"copy_", "to", "type_as", "tensor", "as_tensor"}
#: Make the host wait for the device, which knows the numbers, or how many there are.
_WAITS = {"tolist", "item", "__bool__", "__int__", "__index__", "__float__", "nonzero", "unique", "unique_consecutive"}
_WAITS |= {"equal", "masked_select", "cpu", "numpy"}

#: What the host has waited for, by the name of the operation.
waits: Counter = Counter()


class OnGpu(torch.Tensor):
    """A tensor of the pretended device; what it holds has its values, and the graph of its gradients."""

    @staticmethod
    def __new__(cls, held):
        self = torch.Tensor._make_subclass(cls, torch.empty(0))
        self.__dict__["held"] = held
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _held(tensor):
    return tensor.__dict__["held"]


def held(value):
    """What is held by the tensors of a value; for collectives, which take no pretended tensors."""
    return tree_map(lambda one: _held(one) if isinstance(one, OnGpu) else one, value)


class WrongDeviceError(AssertionError):
    """Tensors of both devices met."""


def _run(function, args, kwargs):
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        owner = getattr(function, "__self__", None)
        name = getattr(owner, "__name__", "")
        if name in ("device", "is_cuda", "is_cpu") and isinstance(args[0], OnGpu):
            return {"device": CUDA, "is_cuda": True, "is_cpu": False}[name]
    if isinstance(kwargs.get("device"), str):
        kwargs = {**kwargs, "device": torch.device(kwargs["device"])}
    values, _ = tree_flatten((args, kwargs))
    there = [one for one in values if isinstance(one, OnGpu)]
    here = [one for one in values if isinstance(one, torch.Tensor) and not isinstance(one, OnGpu)]
    target = _target(name, args, kwargs, there)
    if there and here and name not in _COPIES:
        _check(name, args, here)
    if there and (name in _WAITS or _is_wait(name, args, kwargs, target)):
        waits[name] += 1
    if name == "tensor" and target == CUDA:
        waits["tensor"] += 1  # from memory of the host that is not pinned
    if name == "register_hook":
        return _held(args[0]).register_hook(_hook(args[1]))
    arguments, options = held(tree_map(lambda one: _CPU if isinstance(one, torch.device) else one, (args, kwargs)))
    known = {id(_held(one)): one for one in there}
    made = function(*arguments, **options)
    if target != CUDA:
        return made

    def wrapped(one):
        if not isinstance(one, torch.Tensor):
            return one
        return known[id(one)] if id(one) in known else OnGpu(one)

    return tree_map(wrapped, made)


def _hook(hook):
    def run(gradient):
        with _Factories():  # `backward`, which called this, is run without
            return held(hook(OnGpu(gradient)))

    return run


def _target(name, args, kwargs, there):
    """The device of what an operation gives."""
    asked = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.device)]
    if name in ("cpu", "numpy", "tolist", "item"):
        return _CPU
    if name == "to" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return args[1].device
    if name == "copy_":
        return args[0].device
    if asked:
        return CUDA if asked[0].type == "cuda" else _CPU
    return CUDA if there else _CPU


def _check(name, args, here):
    """Refuses tensors of the CPU, `here`, beside those of the GPU, but for single numbers and indices."""
    if name in ("__getitem__", "__setitem__") and isinstance(args[0], OnGpu):
        waits["indices of the CPU"] += 1
        here = [one for one in args[2:] if isinstance(one, torch.Tensor) and not isinstance(one, OnGpu)]
    if any(one.dim() for one in here):
        raise WrongDeviceError(f"{name} takes tensors of the CPU and of the GPU")


def _is_wait(name, args, kwargs, target):
    """Whether arguments make the host wait: a copy to it, a mask, repetitions that it has to count."""
    if name in ("__getitem__", "__setitem__"):
        return any(isinstance(one, OnGpu) and held(one).dtype is torch.bool for one in tree_flatten(args[1])[0])
    return (name == "to" and target == _CPU) or (name == "repeat_interleave" and kwargs.get("output_size") is None)


class _Factories(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _collective(function):
    """A collective that takes tensors of the device alone, as those of NCCL."""

    def run(*args, **kwargs):
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        if not all(isinstance(one, OnGpu) for one in tensors):
            raise WrongDeviceError("a collective takes tensors of the CPU")
        arguments, options = held((args, kwargs))
        return function(*arguments, **options)

    return run


def _function(apply):
    """`torch.autograd.Function.apply` on tensors of the device: its passes see them, autograd sees what they hold."""

    def run(cls, *args):
        if cls is _Bridge or not any(isinstance(one, OnGpu) for one in args):
            return apply(cls, *args)
        out = _Bridge.apply(cls, [isinstance(one, OnGpu) for one in args], *held(args))
        return tree_map(lambda one: OnGpu(one) if isinstance(one, torch.Tensor) else one, out)

    return run


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, is_there, *args):
        ctx.function = function
        wrapped = [OnGpu(one) if there else one for one, there in zip(args, is_there, strict=True)]
        out = held(function.forward(ctx, *wrapped))
        # As `apply` has it: what is given is new.
        return tree_map(lambda one: one.view_as(one) if isinstance(one, torch.Tensor) else one, out)

    @staticmethod
    def backward(ctx, *gradients):
        with _Factories():  # `backward`, which called this, is run without
            return None, None, *held(ctx.function.backward(ctx, *map(OnGpu, gradients)))


@contextmanager
def pretended(modules=()):
    """Within it, `device=cuda` means the pretended device.

    Args:
        modules: Modules that have collectives by name.
    """
    names = ("all_to_all_single", "all_reduce", "all_gather", "reduce_scatter")
    places = [(module, name) for module in modules for name in names[2:] if hasattr(module, name)]
    usual = [(module, name, getattr(module, name)) for module, name in [(dist, one) for one in names[:2]] + places]
    apply = torch.autograd.Function.__dict__["apply"]
    for module, name, function in usual:
        setattr(module, name, _collective(function))
    torch.autograd.Function.apply = classmethod(_function(apply.__func__))
    try:
        with _Factories():
            yield
    finally:
        torch.autograd.Function.apply = apply
        for module, name, function in usual:
            setattr(module, name, function)
