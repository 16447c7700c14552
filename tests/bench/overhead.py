"""What does an op of a program cost, beside the same op in plain, eager torch? Tensors are tiny: all is overhead.

    python tests/bench/overhead.py            # prints a table; the exit code is 1 when a target is missed

Ops are counted as they come to torch's dispatcher. The eager side runs under `no_grad` where it has no backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import Table, alternating
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.core.clean import clean
from megalith.core.codegen import compile_program
from megalith.core.lower import lower
from megalith.core.program import Compute
from megalith.core.trace import trace
from megalith.core.transforms import grad_and_value
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding.layout import replicated
from megalith.sharding.mesh import Mesh
from megalith.sharding.partition import Input, partition

LIMIT = 1.1  # eager torch's own level
TINY = LlamaConfig(vocab=32, dim=16, hidden=24, n_layers=4, n_heads=4, n_kv_heads=2)


class Count(TorchDispatchMode):
    """Counts the ops that come to the dispatcher."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


def ops_of(fn: Callable[[], Any]) -> int:
    with Count() as count:
        fn()
    return count.n


def program_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[[], Any], int]:
    """`fn(*args)` as a compiled program of one rank, and how many ops it has."""
    graph = clean(trace(fn, args).graph)
    mesh = Mesh("dp=1")
    inputs = [
        Input(replicated(graph.types[v].shape, mesh), None, None, False, name)
        for v, name in zip(graph.inputs, graph.names, strict=True)
    ]
    program = lower(partition(graph, mesh, inputs), 0)
    run, leaves = compile_program(program), pytree.tree_leaves(args)
    return lambda: run(leaves), sum(isinstance(i, Compute) for i in program.instructions)


def chain(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What a transformer is made of, written with torch's functions: there is nothing but ops."""
    for _ in range(20):
        y = torch.mm(x, w)
        y = torch.reshape(y, (2, 4, 8))
        y = torch.permute(y, (1, 0, 2))
        y = torch.cat([torch.neg(y[:, :, 4:8]), y[:, :, 0:4]], -1)
        y = torch.reshape(torch.permute(y, (1, 0, 2)), (8, 8))
        y = torch.mul(torch.sigmoid(y), y)
        mean = torch.div(torch.sum(torch.mul(y, y), (1,), True), 8)
        y = torch.mul(torch.mul(y, torch.rsqrt(torch.add(mean, 1e-5))), scale)
        x = torch.add(x, y)
    return x


def cases() -> dict[str, tuple[Callable[[], Any], Callable[..., Any], tuple[Any, ...]]]:
    """Name to: the eager call, and the function and arguments of the program."""
    torch.manual_seed(0)
    operands = (torch.randn(8, 8), torch.randn(8, 8) / 3, torch.ones(8))
    model = Llama(TINY)
    params = {name: p.detach() for name, p in model.named_parameters()}
    ids, labels = torch.randint(0, 32, (2, 8)), torch.randint(0, 32, (2, 8))

    def eager(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return fn(*args)

        return call

    def forward(params: dict[str, torch.Tensor], ids: torch.Tensor) -> Any:
        return torch.func.functional_call(model, params, (ids,))

    def loss(params: dict[str, torch.Tensor], ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(forward(params, ids).flatten(0, 1), labels.flatten())

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        model.zero_grad()

    return {
        "ops only": (eager(chain, *operands), chain, operands),
        "Llama, forward": (eager(model, ids), forward, (params, ids)),
        "Llama, loss and gradients": (step, grad_and_value(loss), (params, ids, labels)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=10, help="of each case in a round")
    arguments = parser.parse_args()
    columns = {"case": "", "eager ops": "d", "program ops": "d", "eager µs/op": ".2f", "program µs/op": ".2f"}
    table = Table("overhead", {**columns, "eager µs": ".0f", "program µs": ".0f", "ratio": ".2f"})
    for name, (eager, fn, args) in cases().items():
        run, n_program = program_of(fn, args)
        n_eager = ops_of(eager)

        def repeated(call: Callable[[], Any]) -> Callable[[], None]:
            def body() -> None:
                for _ in range(arguments.calls):
                    call()

            return body

        timings = alternating({"eager": repeated(eager), "program": repeated(run)}, arguments.rounds, warmup=5)
        # The least of all rounds: what a call costs where nothing else runs.
        a, b = (min(timings[side].cpus) / arguments.calls * 1e6 for side in ("eager", "program"))
        table.row(name, n_eager, n_program, a / n_eager, b / n_program, a, b, b / a)
        if name == "ops only":
            table.target(f"{name}: program / eager, per op", (b / n_program) / (a / n_eager), LIMIT, "<=")
        table.target(f"{name}: program / eager", b / a, LIMIT, "<=")
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
