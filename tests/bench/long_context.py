"""Does the memory of a long sequence fall with the ranks that share it? 32,768 tokens on 1, 2 and 4 real ranks.

    python tests/bench/long_context.py                  # a Llama of two layers, in a ring and by all-to-alls, over gloo
    python tests/bench/long_context.py --tokens 8192

One forward and backward of the whole sequence on each. Predicted is `memory(program).peak` before anything runs,
measured is the peak of torch's CPU allocator, inputs included, on the rank where it is highest; the sequence is all
there is to split, parameters are replicated. Bytes are those of attention that a rank receives, against the closed
forms: in a ring of n ranks 3 (n - 1) times its keys and values for each layer; by all-to-alls 8 (n - 1) / n times its
queries (keys and values have as many heads here).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Pool, Table, bytes_sent, gloo_header_bytes, tensor_memory

from megalith.core.backends.process import Process
from megalith.core.memory import memory
from megalith.core.program import Program
from megalith.core.shard import shard
from megalith.core.transforms import grad_and_value
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh
from megalith.sharding.recipes import sequence_parallel, specs_for

CONFIG = LlamaConfig(vocab=128, dim=64, hidden=128, n_layers=2, n_heads=4, n_kv_heads=4)
CASES = {"ring": (1, 2, 4), "ulysses": (2, 4)}  # on one rank they are the same
FALLING = 1.1  # the peak on n ranks is at most so much over an n-th
TOLERANCE = 0.03


@dataclass(frozen=True)
class Seen:
    """Of one rank: bytes at the peak, bytes received in attention and sent in all, seconds."""

    predicted: int
    measured: int
    attention: int
    planned: int
    sent: int
    n_collectives: int
    seconds: float


def program_of(kind: str, tokens: int, backend: Process) -> Program:
    """One rank's program for the loss of a sequence and all gradients."""
    with torch.device("meta"):
        model = Llama(CONFIG)
        params = {name: p.detach() for name, p in model.named_parameters()}
        ids = torch.empty(1, tokens, dtype=torch.int64)

    def step(params, x, y):
        def loss(p):
            logits = torch.func.functional_call(model, p, (x,))
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

        return grad_and_value(loss)(params)

    specs = specs_for(params, {"x": ids, "y": ids}, sequence_parallel("sp", kind))
    return shard(step, backend.mesh, specs, backend=backend).program(params, ids, ids)


def on_a_rank(rank: int, kind: str, tokens: int, n: int) -> Seen:
    torch.set_num_threads(1)
    backend = Process(Mesh(f"sp={n}"))
    program = program_of(kind, tokens, backend)
    run = backend.runtime.compile(program)
    inputs: list[torch.Tensor] = []
    times = []

    def make() -> None:
        for slot in program.inputs:
            inputs.append(torch.ones(program.types[slot].shape, dtype=program.types[slot].dtype))

    def train() -> None:
        start = time.perf_counter()
        run(inputs)
        times.append(time.perf_counter() - start)

    small = program_of(kind, 16 * n, backend)  # makes the groups and connections
    backend.runtime.compile(small)([torch.ones(small.types[s].shape, dtype=small.types[s].dtype) for s in small.inputs])
    dist.barrier()
    with bytes_sent() as wire:
        measured = tensor_memory(make, train)[-1].peak
    around = sum(c.bytes_received for c in program.collectives if c.kind in ("exchange", "all_to_all"))
    planned, number = program.bytes_received, len(program.collectives)
    return Seen(memory(program).peak, measured, around, planned, wire.sent, number, times[-1])


def closed_form(kind: str, tokens: int, n: int) -> int:
    """Bytes that a rank receives in the attention of all layers, forward and backward."""
    local = tokens * CONFIG.dim * 4 // n
    return CONFIG.n_layers * (6 * (n - 1) * local if kind == "ring" else 8 * (n - 1) * local // n)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    tokens = parser.parse_args().tokens
    columns = {"attention": "", "sp": "d", "predicted MB": ".1f", "measured MB": ".1f", "of one rank": ".3f"}
    columns |= {"attention MB": ".2f", "closed form MB": ".2f", "sent MB": ".2f", "s": ".1f"}
    table = Table("long_context", columns)
    print(f"{tokens} tokens, {CONFIG.n_layers} layers of {CONFIG.dim}, {CONFIG.n_heads} heads, float32", flush=True)
    alone = 0
    for kind, ranks in CASES.items():
        for n in ranks:
            seen = Pool().run(on_a_rank, kind, tokens, n, world_size=n, timeout=900)
            worst = max(seen, key=lambda one: one.measured)
            alone = alone or worst.measured
            formula = closed_form(kind, tokens, n)
            sent = max(one.sent for one in seen)
            fraction = worst.measured / alone
            seconds = max(one.seconds for one in seen)
            memories = worst.predicted / 1e6, worst.measured / 1e6
            table.row(kind, n, *memories, fraction, worst.attention / 1e6, formula / 1e6, sent / 1e6, seconds)
            case = f"{kind}, sp={n}"
            off = abs(worst.predicted / worst.measured - 1)
            table.target(f"{case}: |predicted / measured - 1|", off, TOLERANCE, "<=")
            table.target(f"{case}: peak against one rank's, times sp", fraction * n, FALLING, "<=")
            table.target(f"{case}: bytes of attention", worst.attention, formula, "==")
            most = worst.planned + gloo_header_bytes(worst.planned, worst.n_collectives, n)
            table.target(f"{case}: bytes sent", sent, most, "<=")
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
