"""Does each parallelism move what its formula says, in the program and on the sockets?

    python tests/bench/bytes.py                       # a small transformer, each row on 4 or 8 processes
    python tests/bench/bytes.py --rows "ZeRO-3" "TP"

A row is a training step, AdamW included, under recipes of megalith.sharding.recipes. Its formula is written with the
symbols below and evaluated as it stands; it has to equal what the program promises, exactly, and the sockets have to
show the same and no more than gloo's headers.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Pool, Table, bytes_sent, gloo_header_bytes
from torch import Tensor

from megalith.core import AdamW, grad_and_value, shard
from megalith.models.llama import Llama, LlamaConfig
from megalith.models.moe import MoEConfig, MoETransformer, capacity_anchors
from megalith.sharding import Mesh
from megalith.sharding.recipes import (
    Recipe,
    data_parallel,
    expert_parallel,
    sequence_parallel,
    specs_for,
    tensor_parallel,
    zero,
)

BATCH, SEQ = 8, 64
DENSE = LlamaConfig(vocab=512, dim=64, hidden=192, n_layers=2, n_heads=8, n_kv_heads=8)
EXPERTS = MoEConfig(
    vocab=512, dim=64, hidden=192, n_layers=2, n_heads=8, n_kv_heads=8, n_experts=8, top_k=2, capacity_factor=1.25
)
WORD = 4  # bytes of a float32
LEGEND = """Formulas are in elements of 4 bytes that a rank receives in a step; a mesh axis stands for its size.
  AR(n, x) = 2 (n - 1) ceil(x / n)    all-reduce of x elements over n ranks
  AG(n, x) = RS(n, x) = (n - 1) x / n    all-gather to x elements, reduce-scatter of x
  A2A(n, x) = (n - 1) x / n^2    all-to-all of x elements, of which a rank holds 1/n
  L layers, T tokens, e embedding, f hidden units, v vocabulary; X = T e residual stream, F = T f hidden activations
  P parameters, V = v e embedding or head, M = L (4 e e + 3 e f) + 2 V matrices, N = (2 L + 1) e weights of norms
  PE parameters of experts, C = sequences x experts x capacity x e, what is sent to experts
Of the three AR(n, 1) one is for the loss, and two are for the number of labels, of 8 bytes."""


def symbols(mesh: Mesh, config: LlamaConfig, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a formula may name."""

    def all_reduce(n: int, x: Fraction | int) -> int:
        return 2 * (n - 1) * math.ceil(Fraction(x) / n)

    def gather(n: int, x: Fraction | int) -> Fraction:
        return Fraction(n - 1, n) * x

    tokens, e, f, v, layers = BATCH * SEQ, config.dim, config.hidden, config.vocab, config.n_layers
    found: dict[str, Any] = {"AR": all_reduce, "AG": gather, "RS": gather, "A2A": lambda n, x: gather(n, x) / n}
    found |= {axis: mesh.axis_size(axis) for axis in mesh.axes}
    found |= {"L": layers, "T": Fraction(tokens), "e": e, "f": f, "v": v}
    found |= {"X": Fraction(tokens * e), "F": Fraction(tokens * f), "V": v * e, "N": Fraction((2 * layers + 1) * e)}
    found |= {"M": Fraction(layers * (4 * e * e + 3 * e * f) + 2 * v * e)}
    found |= {"P": Fraction(sum(p.numel() for p in parameters.values()))}
    if isinstance(config, MoEConfig):
        found["PE"] = sum(p.numel() for name, p in parameters.items() if ".experts." in name)
        found["C"] = Fraction(BATCH * config.n_experts * config.capacity(SEQ) * e)
    return found


# --- the rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A parallelism: its mesh, what it is made of, and how much a rank receives in a step."""

    mesh: str
    recipes: tuple[Recipe, ...]
    formula: str
    sizes: LlamaConfig = DENSE
    anchors: Mapping[str, str] = field(default_factory=dict)


ROWS = {
    "DP": Row("dp=4", (data_parallel(),), "AR(dp, P) + 3*AR(dp, 1)"),
    "ZeRO-1": Row("dp=4", (data_parallel(), zero(1)), "RS(dp, P) + AG(dp, P) + 3*AR(dp, 1)"),
    "ZeRO-2": Row("dp=4", (data_parallel(), zero(2)), "RS(dp, P) + AG(dp, P) + 3*AR(dp, 1)"),
    # The gradient of an embedding needs no embedding: it is gathered once.
    "ZeRO-3": Row("dp=4", (data_parallel(), zero(3)), "AG(dp, P) + AG(dp, P - V) + RS(dp, P) + 3*AR(dp, 1)"),
    "hybrid ZeRO-3": Row(
        "rep=2 dp=2",
        (data_parallel("rep dp"), zero(3)),
        "AG(dp, P) + AG(dp, P - V) + RS(dp, P) + AR(rep, P/dp) + 3*AR(rep*dp, 1)",
    ),
    # Per layer 2 sums of the residual stream forward and 2 backward; embedding and head 1 each. Softmax: maximum, sum
    # and the label's logit.
    "TP": Row("tp=4", (tensor_parallel(),), "(4*L + 2)*AR(tp, X) + 3*AR(tp, T)"),
    # Inputs of column parallel layers are gathered again in the backward, the head's are not.
    "TP + SP": Row(
        "tp=4",
        (tensor_parallel(), sequence_parallel("tp")),
        "(4*L + 2)*RS(tp, X) + (6*L + 2)*AG(tp, X) + AR(tp, N) + 3*AR(tp, T)",
    ),
    # Each of 4 products a layer gathers x, gathers it again and scatters its gradient; a norm sums twice.
    "2D": Row(
        "row=2 col=2",
        (tensor_parallel("row col", "2d"),),
        "(2*AG(row, M) - AG(row, V) + RS(row, M))/col + AR(row, N/col) + 3*AR(row, 1)"
        " + (3*L*AG(col, 3*X + F) + 4*AG(col, X))/row + (4*L + 5)*AR(col, T/row)",
    ),
    "2.5D": Row(
        "dep=2 row=2 col=2",
        (tensor_parallel("dep row col", "2.5d"),),
        "(2*AG(row, M) - AG(row, V) + RS(row, M))/col + AR(dep, M/(row*col)) + AR(dep*row, N/col) + 3*AR(dep*row, 1)"
        " + (3*L*AG(col, 3*X + F) + 4*AG(col, X))/(dep*row) + (4*L + 5)*AR(col, T/(dep*row))",
    ),
    # Token ids, labels, which of them count, and two weights of each label's loss go from one side to the other.
    "3D": Row(
        "i=2 j=2 k=2",
        (tensor_parallel("i j k", "3d"),),
        "(2*AG(i, M) - AG(i, V) + RS(i, M))/(j*k) + AR(i*j, N/k) + 2*AR(i*j, 1) + AR(i*k, 1)"
        " + (10*L + 4)*AG(j, X)/(i*k) + (L*AG(k, 9*X + 7*F) + 2*AG(k, T*v))/(i*j)"
        " + (4*L + 2)*AR(k, T/(i*j)) + 3*AR(j, T/(i*k)) + AG(j, (2 + 2 + 1/4 + 2)*T)/i",
    ),
    "Ulysses": Row("sp=4", (sequence_parallel("sp", "ulysses"),), "8*L*A2A(sp, X) + AR(sp, P) + 3*AR(sp, 1)"),
    # Keys and values go round forward and backward, then their gradients.
    "ring": Row("sp=4", (sequence_parallel("sp", "ring"),), "L*3*(sp - 1)*2*X/sp + AR(sp, P) + 3*AR(sp, 1)"),
    "EP, with a capacity": Row(
        "ep=4",
        (data_parallel("ep"), expert_parallel("ep")),
        "4*L*A2A(ep, C) + AR(ep, P - PE) + 3*AR(ep, 1)",
        EXPERTS,
        capacity_anchors("ep"),
    ),
}


# --- on the ranks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """Bytes of one rank in one step: promised by formula and program, and sent; `headers` at most of these gloo's."""

    formula: Fraction
    program: int
    sent: int
    headers: int


def train(rank: int, row: Row) -> Seen:
    torch.manual_seed(0)
    mesh = Mesh(row.mesh)
    model = MoETransformer(row.sizes) if isinstance(row.sizes, MoEConfig) else Llama(row.sizes)
    optimizer = AdamW()

    def loss(params: Any, batch: Any) -> Tensor:
        found = torch.func.functional_call(model, params, (batch["ids"],))
        logits, routing = found if isinstance(found, tuple) else (found, 0.0)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + routing

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        grads, value = grad_and_value(loss)(params, batch)
        params, opt_state = optimizer.update(grads, opt_state, params)
        return params, opt_state, value

    params = {name: p.detach() for name, p in model.named_parameters()}
    tokens = torch.randint(row.sizes.vocab, (BATCH, SEQ + 1))
    batch = {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    specs = {**specs_for(params, batch, *row.recipes), **row.anchors}
    sharded = shard(step, mesh, specs, donate=("params", "opt_state"))
    placed = sharded.place(params, optimizer.init(params), batch)
    *state, _ = sharded(*placed)  # groups and connections are made once
    dist.barrier()
    with bytes_sent() as wire:
        sharded(*state, placed[2])
    dist.barrier()
    program = sharded.compiled(*state, placed[2]).programs[rank]
    # The text is what is evaluated, lest the table say one thing and the check another.
    elements = eval(row.formula, {"__builtins__": {}}, symbols(mesh, row.sizes, params))
    headers = sum(gloo_header_bytes(c.bytes_received, 1, len(c.peers)) for c in program.collectives)
    return Seen(Fraction(elements) * WORD, program.bytes_received, wire.sent, headers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    names, begin = parser.parse_args().rows, time.monotonic()
    columns = {"parallelism": "", "mesh": "", "formula": "", "its bytes": "", "program": "d", "sockets": "d"}
    table = Table("bytes", {**columns, "headers at most": "d", "equal": ""})
    with Pool() as pool:
        for name in names:
            row = ROWS[name]
            ranks = pool.run(train, row, world_size=Mesh(row.mesh).size, timeout=300)
            seen = max(ranks, key=lambda rank: rank.sent)
            equal = seen.formula == seen.program and 0 <= seen.sent - seen.program <= seen.headers
            value = float(seen.formula) if seen.formula.denominator > 1 else int(seen.formula)
            counted = seen.program, seen.sent, seen.headers
            table.row(name, row.mesh, row.formula, str(value), *counted, "yes" if equal else "no")
            table.target(f"{name}: bytes of the program", seen.program, value, "==")
            table.target(f"{name}: bytes on the sockets", seen.sent, seen.program, ">=")
            table.target(f"{name}: bytes on the sockets", seen.sent, seen.program + seen.headers, "<=")
    code = table.finish()
    print(f"{LEGEND} {time.monotonic() - begin:.0f} s in all.")
    return code


if __name__ == "__main__":
    sys.exit(main())
