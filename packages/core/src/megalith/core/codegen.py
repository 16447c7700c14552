"""How does a program run at the speed of its ops? As one flat, generated Python function."""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, Protocol

import torch

from megalith.core import _compat
from megalith.core.program import Compute, Instruction, Launch, Program, Wait, reads, writes
from megalith.sharding.graph import Ref, TensorType, map_refs, op_name, refs

__all__ = ["Collectives", "Run", "compile_program", "program_source"]

Tensor = torch.Tensor


class Run(Protocol):
    """A compiled program: takes one local shard per input, gives the outputs."""

    def __call__(self, inputs: Sequence[Tensor]) -> list[Any]: ...


class Collectives(Protocol):
    """What carries a program's collectives out."""

    def bind(self, program: Program, number: int) -> tuple[Callable[..., Any], Callable[[Any], Tensor]]:
        """Two functions for a collective of a program: one starts it on what it reads, one awaits what that gave."""


_compiled: dict[tuple[int, int], tuple[Run, Collectives | None]] = {}  # both kept: no other gets the same id
_names = itertools.count()


def compile_program(program: Program, collectives: Collectives | None = None) -> Run:
    """A program as one function without anything between its ops, made once and kept as long as the program.

    Every slot is freed right after its last use. Runs under `no_grad`. The source is what `program_source` shows, and
    tracebacks quote it.

    Args:
        program: the program of one rank.
        collectives: what carries out its collectives; None will do for a program without any.

    Returns:
        a function from the local input shards, in order, to the outputs.
    """
    key = (id(program), id(collectives))
    if key not in _compiled:
        if collectives is None and program.collectives:
            raise ValueError(
                f"the program has {len(program.collectives)} collectives and nothing to carry them out; "
                "pass compile_program(program, collectives), such as a Distributed(mesh)"
            )
        _compiled[key] = _compile(program, collectives), collectives
        weakref.finalize(program, _compiled.pop, key, None)
    return _compiled[key][0]


def _compile(program: Program, collectives: Collectives | None) -> Run:
    writer = _Writer(program)
    source = writer.source()
    for number in range(len(program.collectives)):
        assert collectives is not None
        writer.names[f"launch{number}"], writer.names[f"wait{number}"] = collectives.bind(program, number)
    file = f"<megalith program {next(_names)}, rank {program.rank}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    weakref.finalize(program, linecache.cache.pop, file, None)
    scope = dict(writer.names)
    exec(compile(source, file, "exec"), scope)
    return torch.no_grad()(scope["program"])


def program_source(program: Program) -> str:
    """The function that `compile_program` runs, as text.

    >>> from megalith.core.program import Compute, Program
    >>> from megalith.sharding.graph import Origin
    >>> from megalith.sharding.mesh import Mesh
    >>> from megalith.sharding.layout import replicated
    >>> mesh, float32 = Mesh("tp=1"), torch.float32
    >>> layouts = replicated((4, 2), mesh), replicated((2, 8), mesh)
    >>> types = {0: TensorType((4, 2), float32), 1: TensorType((2, 8), float32), 2: TensorType((4, 8), float32),
    ...          3: TensorType((32,), float32)}
    >>> body = (Compute(torch.ops.aten.mm.default, (Ref(0), Ref(1)), {}, (2,), Origin("layers.0.up")),
    ...         Compute(torch.ops.aten.reshape.default, (Ref(2), [32]), {}, (3,), Origin("layers.0")))
    >>> print(program_source(Program(mesh, 0, (0, 1), ("x", "w"), layouts, {}, body, (Ref(3),), (None,), types)))
    def program(inputs, *, mm=mm, reshape=reshape):
        v0, v1 = inputs
        v2 = mm(v0, v1); del v0, v1  # layers.0.up
        v3 = reshape(v2, (32,)); del v2  # layers.0
        return [v3]
    <BLANKLINE>
    """
    return _Writer(program).source()


class _Writer:
    """The text of one program, and what the names in it stand for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names: dict[str, Any] = {}  # what the function gets as defaults, so that each is a local
        self.name_of: dict[int, str] = {}  # by id: all of them are kept alive by `names`
        self.starts = itertools.count()
        self.wait_of: dict[int, int] = {}  # pending slot -> number of its collective

    def source(self) -> str:
        for slot, tensor in self.program.constants.items():
            self.names[self.slot(slot)] = tensor
        body = list(self.lines())
        for number in range(len(self.program.collectives)):
            self.names.update({f"launch{number}": None, f"wait{number}": None})
        keywords = ", *, " + ", ".join(f"{name}={name}" for name in self.names) if self.names else ""
        return f"def program(inputs{keywords}):\n" + "".join(f"    {line}\n" for line in body)

    def lines(self) -> Iterator[str]:
        program = self.program
        last = program.last_use
        slots = [self.slot(s) for s in program.inputs]
        yield f"{', '.join(slots)}{',' * (len(slots) == 1)} = inputs" if slots else "() = inputs"
        unused = [self.slot(s) for s in program.inputs if s not in last]
        if unused:
            yield f"del {', '.join(unused)}"
        for position, instruction in enumerate(program.instructions):
            text = self.statement(instruction)
            touched = dict.fromkeys((*reads(instruction), *self.written(instruction)))
            dead = [s for s in touched if last.get(s, position) == position and s not in program.constants]
            if dead:
                text += f"; del {', '.join(map(self.slot, dead))}"
            yield text + _comment(instruction)
        yield f"return [{', '.join(self.literal(o) for o in program.outputs)}]"

    def statement(self, instruction: Instruction) -> str:
        if isinstance(instruction, Launch):
            number = next(self.starts)
            self.wait_of[instruction.pending] = number
            return f"{self.slot(instruction.pending)} = launch{number}({', '.join(map(self.slot, reads(instruction)))})"
        if isinstance(instruction, Wait):
            number = self.wait_of[instruction.pending]
            return f"{self.slot(instruction.output)} = wait{number}({self.slot(instruction.pending)})"
        call = self.call(instruction)
        outs = self.written(instruction)
        if _compat.returns_one_tensor(instruction.fn):
            return f"{self.slot(outs[0])} = {call}" if outs else call
        if len(outs) == 1:
            return f"{self.slot(outs[0])} = {call}[{instruction.outputs.index(outs[0])}]"
        # An output that nobody reads is freed with the others that die here: it is given its name all the same.
        targets = ", ".join(self.slot(o) if o in outs else "_" for o in instruction.outputs)
        comma = "," if len(instruction.outputs) == 1 else ""
        return f"{targets}{comma} = {call}" + ("; del _" if len(outs) < len(instruction.outputs) else "")

    def written(self, instruction: Instruction) -> tuple[int, ...]:
        """The slots written that are read later, or that have to be awaited."""
        written = writes(instruction)
        return tuple(s for s in written if s in self.program.last_use) if isinstance(instruction, Compute) else written

    # --- calls ---

    def call(self, instruction: Compute) -> str:
        fn = instruction.fn
        if not hasattr(fn, "overloadpacket"):
            return f"{self.bind(op_name(fn), fn)}({self.arguments(instruction, lists=True)})"
        how, callee = _quickest(instruction, self.program.types)
        args = instruction.args
        if how == "slice":
            _, dim, start, stop = args
            dim %= len(self.program.types[args[0].id].shape)
            return f"{self.slot(args[0].id)}[{':, ' * dim}{start}:{stop}]"
        if how == "cast":
            return f"{self.slot(args[0].id)}.to({self.literal(instruction.kwargs['dtype'])})"
        if how == "method":
            return f"{self.slot(args[0].id)}.{callee}({self.arguments(instruction, skip=1)})"
        name = op_name(fn).removeprefix("aten.").replace(".", "_") if how == "op" else callee.__name__
        return f"{self.bind(name, callee)}({self.arguments(instruction)})"

    def arguments(self, instruction: Compute, skip: int = 0, lists: bool = False) -> str:
        args = [self.literal(a, lists) for a in instruction.args[skip:]]
        args += [f"{key}={self.literal(value, lists)}" for key, value in instruction.kwargs.items()]
        return ", ".join(args)

    def literal(self, value: Any, lists: bool = False) -> str:
        """An expression for an argument. Lists become tuples, which cost nothing, unless `lists`."""
        kind = type(value)
        if kind is Ref:
            return self.slot(value.id)
        if kind in (int, bool, str, type(None)) or (kind is float and math.isfinite(value)):
            return repr(value)
        if kind in (tuple, list, torch.Size):
            items = [self.literal(v, lists) for v in value]
            if kind is list and (lists or any(refs(value))):
                return f"[{', '.join(items)}]"
            return f"({', '.join(items)}{',' * (len(items) == 1)})"
        name = str(value).replace("torch.", "") if isinstance(value, (torch.dtype, float)) else kind.__name__
        return self.bind(name.replace("-inf", "minus_inf"), value)

    def bind(self, name: str, value: Any) -> str:
        """A local name for a value."""
        known = self.name_of.get(id(value))
        if known is not None and self.names[known] is value:
            return known
        name = "".join(c if c.isalnum() else "_" for c in name)
        if keyword.iskeyword(name) or not name.isidentifier() or name in ("inputs", "program", "_"):
            name = f"f_{name}"
        if name in self.names or (name[:1] == "v" and name[1:].isdigit()):
            name = next(n for i in itertools.count(2) if (n := f"{name}_{i}") not in self.names)
        self.names[name] = value
        self.name_of[id(value)] = name
        return name

    def slot(self, slot: int) -> str:
        return f"c{slot}" if slot in self.program.constants else f"v{slot}"


def _comment(instruction: Instruction) -> str:
    origin = instruction.origin
    where = origin.module if origin.phase == "forward" else f"{origin.module} {origin.phase}".strip()
    if isinstance(instruction, Launch):
        what = f"{instruction.kind} {instruction.op}".strip()
        where = f"{what} over {' '.join(instruction.axes)}, {instruction.bytes_received} bytes, {where}".strip(", ")
    return f"  # {where}" if where else ""


# --- which callable -----------------------------------------------------------------------------------
#
# Microseconds a call on tiny operands, torch 2.13: `torch.ops.aten.mm.default` 2.4, the C function within it 2.0,
# `torch.mm` 1.5; reshape 3.0, 2.6 and 1.0; sum 4.5, 4.0 and 2.4. So the public function of the same name is taken,
# where the dispatcher is seen to get the very same call from it.

_quick: dict[tuple[Any, str], tuple[str, Any]] = {}


def _quickest(instruction: Compute, types: Any) -> tuple[str, Any]:
    """How to call an op: `("function", f)`, `("method", name)`, `("slice" | "cast", None)` or `("op", f)`."""
    op: Any = instruction.fn
    described = map_refs((instruction.args, dict(instruction.kwargs)), lambda ref: types[ref.id])
    key = (op, repr(described))
    if key not in _quick:
        _quick[key] = next(_same_calls(op, instruction, types), ("op", getattr(op, "_op", op)))
    return _quick[key]


def _same_calls(op: Any, instruction: Compute, types: Any) -> Iterator[tuple[str, Any]]:
    """The quicker ways to call an op that come to the same, quickest first."""
    if op.namespace != "aten":
        return
    tensors = {r.id: _stand_in(types[r.id]) for r in refs((instruction.args, instruction.kwargs))}
    args, kwargs = map_refs((instruction.args, dict(instruction.kwargs)), lambda ref: tensors[ref.id])
    with torch.no_grad():
        wanted = _dispatched(op, args, kwargs)
        if wanted is None:
            return
        name = op.overloadpacket.__name__
        if op._overloadname == "Scalar" and name in ("add", "sub", "mul", "div"):
            wanted = (op.overloadpacket.Tensor, *wanted[1:])  # all that its kernel does is to call this one
        tuples = tuple(
            tuple(a) if isinstance(a, list) and not any(refs(r)) else a
            for r, a in zip(instruction.args, args, strict=True)
        )
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and name == "slice" and len(args) == 4:
            _, dim, start, stop = args
            dim %= first.dim()
            at = (*[slice(None)] * dim, slice(start, stop))
            if _dispatched(first.__getitem__, (at,), {}) == _dispatched(op, (first, dim, start, stop), {}):
                yield "slice", None
        casts = name == "_to_copy" and len(args) == 1 and list(kwargs) == ["dtype"]
        if first is not None and casts and _dispatched(first.to, (kwargs["dtype"],), {}) == wanted:
            yield "cast", None
        for home in (torch, torch._C._nn):
            found = getattr(home, name, None)
            if isinstance(found, BuiltinFunctionType) and _dispatched(found, tuples, kwargs) == wanted:
                yield "function", found
        in_c = isinstance(getattr(Tensor, name, None), MethodDescriptorType)
        if first is not None and in_c and _dispatched(getattr(first, name), tuples[1:], kwargs) == wanted:
            yield "method", name


def _stand_in(kind: TensorType) -> Tensor:
    return torch.empty(kind.shape, dtype=kind.dtype, device="meta")


class _Seen(Exception):
    """Carries the first call that came to the dispatcher; nothing is computed."""


class _Spy(_compat.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Seen(func, args, kwargs or {})


_PLAIN = {"device": torch.device("cpu"), "pin_memory": False, "layout": torch.strided}


def _dispatched(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The first op that a call comes down to, with its arguments in a form that can be compared; None for none."""
    try:
        with _Spy():
            fn(*args, **kwargs)
    except _Seen as seen:
        op, op_args, op_kwargs = seen.args
        options = {k: _comparable(v) for k, v in op_kwargs.items() if v is not None and v != _PLAIN.get(k)}
        return op, _comparable(op_args), options
    except Exception:  # not a signature of this function
        return None
    return None


def _comparable(value: Any) -> Any:
    """Tensors by identity, scalars with their type, lists and tuples alike."""
    if isinstance(value, Tensor):
        return ("scalar", value.dtype, value.item()) if value.device.type != "meta" else ("tensor", id(value))
    if isinstance(value, (tuple, list)):
        return tuple(_comparable(v) for v in value)
    return type(value), value
