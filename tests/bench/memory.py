"""Is the memory that a program is predicted to take what the allocator then sees, on real ranks?

    python tests/bench/memory.py                      # a Llama of 5 M parameters with AdamW, on dp=2 tp=2 over gloo
    python tests/bench/memory.py --picture out/bench/memory.png

Predicted is `memory(program).peak` before anything runs; measured is the peak of torch's CPU allocator while the
generated code runs one step, inputs included, on the rank where the two differ most.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Pool, Table, tensor_memory

from megalith.core.backends.process import Process
from megalith.core.memory import memory
from megalith.core.optim import AdamW
from megalith.core.shard import Sharded, shard
from megalith.core.transforms import grad_and_value
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh

CONFIG = LlamaConfig(vocab=2048, dim=256, hidden=704, n_layers=5, n_heads=8, n_kv_heads=4)
BATCH, SEQUENCE = 8, 128
TOLERANCE = 0.01

TENSOR = {
    "*.[qkv]_proj.weight": "(tp o) i",
    "*.o_proj.weight": "o (tp i)",
    "*.gate_proj.weight": "(tp o) i",
    "*.up_proj.weight": "(tp o) i",
    "*.down_proj.weight": "o (tp i)",
    "*embed_tokens.weight": "(tp v) e",
    "*lm_head.weight": "(tp v) e",
}
DATA = {"[xy]": "(dp b) s"}
CASES = {
    "replicated over dp": TENSOR | DATA,
    "ZeRO-3 over dp": {k: f"{v.replace('(tp ', '(tp dp ')} -> {v}" for k, v in TENSOR.items()} | DATA,
}


@dataclass(frozen=True)
class Seen:
    """Bytes at the peak of one rank."""

    predicted: int
    measured: int
    parts: dict[str, int]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def step_of(specs: dict[str, str], mesh: Mesh, donate: tuple[str, ...], backend: object) -> tuple[Sharded, tuple]:
    """A training step, and its arguments on no device."""
    with torch.device("meta"):
        model = Llama(CONFIG)
        params = {name: p.detach() for name, p in model.named_parameters()}
        ids = torch.empty(BATCH, SEQUENCE, dtype=torch.int64)
        optimizer = AdamW()
        state = optimizer.init(params)

    def step(params, state, x, y):
        def loss(p):
            logits = torch.func.functional_call(model, p, (x,))
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

        grads, value = grad_and_value(loss)(params)
        params, state = optimizer.update(grads, state, params)
        return params, state, value

    return shard(step, mesh, specs, donate=donate, backend=backend), (params, state, ids, ids)


def on_a_rank(rank: int, specs: dict[str, str], donate: tuple[str, ...], picture: str | None) -> Seen:
    torch.set_num_threads(1)
    backend = Process(Mesh("dp=2 tp=2"))
    step, arguments = step_of(specs, backend.mesh, donate, backend)
    program = step.program(*arguments)
    report = memory(program)
    if picture and rank == 0:
        report.plot(picture)
    run = backend.runtime.compile(program)
    kinds = [program.types[slot] for slot in program.inputs]
    inputs: list[torch.Tensor] = []

    def make() -> None:
        inputs.clear()
        inputs.extend(torch.ones(k.shape, dtype=k.dtype) for k in kinds)

    def train() -> None:
        run(inputs)

    make()
    train()  # groups and connections are made once
    inputs.clear()
    dist.barrier()
    measured = tensor_memory(make, train)[-1].peak
    parts = {kind: curve[report.peak_position] for kind, curve in report.by_kind.items()}
    return Seen(report.peak, measured, parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", help="a file for the curve of the last case")
    arguments = parser.parse_args()
    columns = {"case": "", "donated": "", "predicted MB": ".2f", "measured MB": ".2f", "error %": "+.2f"}
    columns |= {"inputs MB": ".2f", "saved MB": ".2f", "communication MB": ".2f"}
    table = Table("memory", columns)
    with torch.device("meta"):
        print(f"Llama of {sum(p.numel() for p in Llama(CONFIG).parameters()) / 1e6:.1f} M parameters on dp=2 tp=2")
    for name, specs in CASES.items():
        for donate in ((), ("params", "state")):
            ranks = Pool().run(on_a_rank, specs, donate, arguments.picture, world_size=4, timeout=300)
            worst = max(ranks, key=lambda seen: abs(seen.error))
            mega = {kind: nbytes / 1e6 for kind, nbytes in worst.parts.items()}
            table.row(
                name,
                "yes" if donate else "no",
                worst.predicted / 1e6,
                worst.measured / 1e6,
                100 * worst.error,
                mega["inputs"],
                mega["saved"],
                mega["communication"],
            )
            case = f"{name}{', donated' if donate else ''}: |predicted / measured - 1|"
            table.target(case, abs(worst.error), TOLERANCE, "<=")
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
