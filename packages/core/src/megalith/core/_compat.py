"""Which private torch APIs do we lean on? All of them are here, and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "WeakIdKeyDictionary",
    "autograd_sequence",
    "below_functionalize",
    "functional_form",
    "inplace_form",
    "fused_adamw",
    "storage_id",
    "without_modes",
    "compiling",
    "current_autograd_node",
    "functorch_levels",
    "has_composite_implicit",
    "is_mutating",
    "known_decomposition",
    "key_path",
    "module_calls",
    "pytree",
    "returns_one_tensor",
]


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Library code that asks `torch.compiler.is_compiling()` is told yes."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def module_calls(wrapper: Callable[..., Any]) -> Iterator[None]:
    """While open, `module(*args)` runs `wrapper(original_call, module, *args)`."""
    original = torch.nn.Module.__call__

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]


def functorch_levels() -> tuple[str, ...]:
    """The `torch.func` transforms that are active, outermost first: "grad", "vmap", "jvp", "functionalize"."""
    stack = torch._C._functorch.get_interpreter_stack()
    return tuple(str(level.key()).rsplit(".", 1)[-1].lower() for level in stack or ())


def below_functionalize(fn: Callable[..., Any], args: Any) -> Any:
    """`fn(*args)` on the tensors that `torch.func.functionalize` wraps; what it returns is wrapped again."""
    functorch = torch._C._functorch
    level = functorch.peek_interpreter_stack().level()

    def unwrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not functorch.is_functionaltensor(x):
            return x
        torch._sync(x)
        return functorch._unwrap_functional_tensor(x, True)

    inner = pytree.tree_map(unwrap, tuple(args))
    with temporarily_pop_interpreter_stack():
        out = fn(*inner)
    return pytree.tree_map_only(torch.Tensor, lambda x: functorch._wrap_functional_tensor(x, level), out)


def current_autograd_node() -> Any:
    """The autograd node whose backward runs now, or None."""
    return torch._C._current_autograd_node()


def autograd_sequence() -> int:
    """The sequence number that the next autograd node will get."""
    return torch._C._autograd._get_sequence_nr()


def has_composite_implicit(op: Any) -> bool:
    """Whether an op is only a name for other ops, with no kernel of its own."""
    keys = torch._C.DispatchKey
    composite = op.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)
    return composite and not op.has_kernel_for_dispatch_key(keys.CPU)


def known_decomposition(op: Any) -> Callable[..., Any] | None:
    """How torch writes a functional op as simpler ones, or None."""
    return None if op._schema.is_mutable else decomposition_table.get(op)


def is_mutating(op: Any) -> bool:
    """Whether an op writes into an argument, as far as its schema says."""
    schema = getattr(op, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def returns_one_tensor(op: Any) -> bool:
    """Whether an op returns a bare tensor rather than a tuple or list."""
    schema = getattr(op, "_schema", None)
    return schema is None or (len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor")


def without_modes() -> Any:
    """A context in which ops run for real, whatever modes are active."""
    return _disable_current_modes()


def functional_form(op: Any) -> Any:
    """`aten.add.Tensor` for `aten.add_.Tensor`; None for an op with no such form."""
    name = op._schema.name.split("::")[1]
    packet = getattr(getattr(torch.ops, op.namespace), name[:-1], None) if name.endswith("_") else None
    return getattr(packet, op._overloadname, None) if packet is not None else None


def inplace_form(op: Any) -> Any:
    """`aten.add_.Tensor` for `aten.add.Tensor`; None for an op with no such form."""
    name = op._schema.name.split("::")[1]
    packet = getattr(getattr(torch.ops, op.namespace), f"{name}_", None)
    return getattr(packet, op._overloadname, None) if packet is not None else None


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors share exactly when they share memory."""
    return tensor.untyped_storage()._cdata


def key_path(path: Any) -> str:
    """A pytree path as a dotted name: `params.layers.0.weight`."""
    parts = []
    for key in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    return ".".join(parts)


def fused_adamw(
    p: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    step: torch.Tensor,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """torch's own fused AdamW, in place, for one tensor."""
    if p.is_cuda:
        lr = lr.float()  # its CUDA kernel reads a float32
    torch._fused_adamw_(
        [p],
        [g],
        [m],
        [v],
        [],
        [step],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
