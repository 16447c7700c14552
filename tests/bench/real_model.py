"""Does a real pretrained model keep its perplexity and its fine-tuning on a mesh? SmolLM2-135M-Instruct, unmodified.

    python tests/bench/real_model.py                  # unsharded, tp=2, dp=2 and sharded parameters, over gloo
    python tests/bench/real_model.py --cases "tp=2" --steps 5 --explain

Hugging Face's own LlamaForCausalLM with tied embeddings, in float32, reads Python's documentation: its perplexity in 2
windows of 1,024 tokens, then 20 steps of AdamW on 2 x 64 tokens each. Every case is held to the unsharded run, whose
own loss is off too: torch's float32 cross-entropy over 49,152 classes, by what the column "off float64" says.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Pool, Table, bytes_sent, gloo_header_bytes, tensor_memory
from torch import Tensor

from megalith.core import AdamW, grad_and_value, shard
from megalith.core.explain import Explanation, explain
from megalith.core.memory import memory
from megalith.models import gguf, huggingface
from megalith.models.text import batch_at, documentation, encode
from megalith.sharding import Mesh
from megalith.sharding.recipes import Recipe, data_parallel, specs_for, tensor_parallel, zero

WINDOWS, WINDOW = 2, 1024
BATCH, SEQUENCE, LEARNING_RATE = 2, 64, 5e-5
EMBEDDING = "model.embed_tokens.weight"
UNSHARDED = "unsharded"


@dataclass(frozen=True)
class Case:
    """A layout of the model on 2 ranks, or on one device where there is no mesh."""

    mesh: str
    recipes: tuple[Recipe, ...]


CASES = {
    # 9 query and 3 key-value heads do not divide by 2. Cut between key-value heads, of which ranks then hold 2 and 1,
    # with the 3 query heads that read each: attention needs no communication.
    "tp=2": Case("tp=2", (tensor_parallel(heads=9, kv_heads=3),)),
    "dp=2": Case("dp=2", (data_parallel(),)),
    "dp=2, parameters sharded": Case("dp=2", (data_parallel(), zero(3))),
}
BATCHES = {name: (BATCH, SEQUENCE) for name in ("input_ids", "labels")}  # of evaluation too: recipes read dims only


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one case."""

    loss_sum: float
    n_tokens: int
    losses: list[float]
    seconds: list[float]  # of each step but the first two
    embedding_gradient: Any  # of the first step, on one rank
    n_tied: int  # parameters that are as large as the embedding
    peak: int  # bytes of tensor memory within a step
    sent: int = 0  # bytes a step
    predicted_peak: int = 0
    exact_sum: float = 0.0  # of the losses, where the cross-entropy is in float64
    explanation: Explanation | None = None

    @property
    def loss(self) -> float:
        """Per token."""
        return self.loss_sum / self.n_tokens


def batches(tokenizer: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The windows to be read, and the tokens to be trained on."""
    tokens = encode(documentation(), tokenizer.backend_tokenizer)
    n = WINDOWS * WINDOW
    read = {"input_ids": tokens[:n].view(WINDOWS, WINDOW), "labels": tokens[1 : n + 1].view(WINDOWS, WINDOW)}
    return read, tokens[n:]


class Program:
    """The two pure functions, on a mesh or on one device; each knows nothing of devices."""

    def __init__(self, model: torch.nn.Module, case: Case | None) -> None:
        call, self.params = huggingface.functional(model)
        self.optimizer = AdamW(lr=LEARNING_RATE)

        def logits(params: Any, batch: Any) -> Tensor:
            return call(params, input_ids=batch["input_ids"]).logits.flatten(0, 1)

        def evaluate(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
            total = F.cross_entropy(logits(params, batch), batch["labels"].flatten(), reduction="sum")
            return total, (batch["labels"] >= 0).sum()

        def loss(params: Any, batch: Any) -> Tensor:
            return F.cross_entropy(logits(params, batch), batch["labels"].flatten())

        def train(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Tensor]:
            grads, value = grad_and_value(loss)(params, batch)
            params, opt_state = self.optimizer.update(grads, opt_state, params)
            return params, opt_state, value

        self.logits, self.evaluate, self.train = logits, evaluate, train
        self.is_sharded = case is not None
        if case is not None:
            mesh, specs = Mesh(case.mesh), specs_for(self.params, BATCHES, *case.recipes)
            self.evaluate = shard(evaluate, mesh, specs, strict=True)
            self.train = shard(train, mesh, specs, donate=("params", "opt_state"), strict=True)

    def place(self, fn: Any, **tree: Any) -> Any:
        return fn.place(**tree) if self.is_sharded else next(iter(tree.values()))

    def perplexity(self, batch: dict[str, Tensor]) -> tuple[float, int]:
        """The sum of the losses of all tokens, and how many they are."""
        fn = self.evaluate
        with torch.no_grad():
            total, count = fn(self.place(fn, params=self.params), self.place(fn, batch=batch))
        return total.item(), int(count)

    def exact(self, batch: dict[str, Tensor]) -> float:
        """The sum of the losses where only the cross-entropy is in float64."""
        with torch.no_grad():
            parts = [t.split(WINDOW // 2) for t in (self.logits(self.params, batch), batch["labels"].flatten())]
            return sum(F.cross_entropy(a.double(), b, reduction="sum").item() for a, b in zip(*parts, strict=True))

    def gradient(self, opt_state: Any, name: str) -> Tensor:
        """The whole gradient of the first step: that of a state which has seen no other."""
        mean = {"mu": {name: opt_state["mu"][name]}}
        if self.is_sharded:
            mean = self.train.gather(opt_state=mean)
        return mean["mu"][name] / (1 - self.optimizer.betas[0])


def measure(model: torch.nn.Module, case: Case | None, read: Any, tokens: Tensor, n_steps: int) -> Seen:
    """One case, on this rank."""
    program = Program(model, case)
    loss_sum, n_tokens = program.perplexity(read)
    losses: list[float] = []
    state: dict[str, Any] = {}

    def step() -> None:
        batch = program.place(program.train, batch=batch_at(tokens, BATCH, SEQUENCE, seed=0, step=len(losses)))
        *state["training"], value = program.train(*state["training"], batch)
        losses.append(value.item())

    def first() -> None:
        params = program.place(program.train, params=program.params)
        opt_state = program.place(program.train, opt_state=program.optimizer.init(program.params))
        state["training"] = [params, opt_state]
        state["n_tied"] = sum(p.shape == params[EMBEDDING].shape for p in params.values())
        step()
        gradient = program.gradient(state["training"][1], EMBEDDING)
        if dist.get_rank() == 0:
            state["gradient"] = gradient.numpy().copy()  # in memory that is not torch's

    peak = tensor_memory(first, step)[-1].peak
    seconds, sent = [], 0
    for number in range(2, n_steps):
        dist.barrier()
        start = time.perf_counter()
        if number == 2:
            with bytes_sent() as wire:
                step()
                dist.barrier()
            sent = wire.sent
        else:
            step()
        seconds.append(time.perf_counter() - start)
    common = (loss_sum, n_tokens, losses, seconds, state.get("gradient"), state["n_tied"], peak)
    if not program.is_sharded:
        return Seen(*common, exact_sum=program.exact(read))
    batch = program.place(program.train, batch=batch_at(tokens, BATCH, SEQUENCE, seed=0, step=0))
    compiled = program.train.compiled(*state["training"], batch)
    (mine,) = compiled.programs.values()
    return Seen(*common, sent, memory(mine).peak, explanation=explain(mine))


def on_a_rank(rank: int, names: list[str], n_steps: int) -> dict[str, Seen]:
    torch.set_num_threads(1)
    model, tokenizer = gguf.load(gguf.smollm2_file())
    read, tokens = batches(tokenizer)
    return {name: measure(model, CASES.get(name), read, tokens, n_steps) for name in names}


def minimum(name: str) -> tuple[int, int, int]:
    """Collectives, gathers among them and bytes sent by a rank of two in a step, from the model's shapes alone."""
    with torch.device("meta"):
        config = gguf.read_config(gguf.GGUFReader(gguf.smollm2_file()))
        model = gguf.LlamaForCausalLM(config)
    sizes = [4 * p.numel() for p in model.parameters()]
    scalars = 2 + 64 if "dp" in name else 0
    if name == "tp=2":  # per layer 2 all-reduces either way; embedding, head; maximum, sum and label of the softmax
        n_large, tokens = 2 * (2 * config.num_hidden_layers + 1), BATCH * SEQUENCE
        return n_large + 3, 0, 4 * tokens * (n_large * config.hidden_size + 3)
    if name == "dp=2":  # an all-reduce of each gradient; of the loss and its count
        return len(sizes) + 2, 0, sum(sizes) + scalars
    return 3 * len(sizes) + 2, 2 * len(sizes), 3 * sum(sizes) // 2 + scalars  # gathered twice, reduced once


def report(table: Table, name: str, ranks: list[Seen], alone: Seen) -> None:
    """The row of a case, and its targets."""
    first = ranks[0]
    seconds = statistics.median(max(s) for s in zip(*(seen.seconds for seen in ranks), strict=True))
    worst = max(abs(a - b) / b for seen in ranks for a, b in zip(seen.losses, alone.losses, strict=True))
    perplexity = math.exp(first.loss)
    peak = max(seen.peak for seen in ranks)
    off = abs(first.loss_sum / alone.exact_sum - 1)
    if first.explanation is None:
        table.row(name, perplexity, off, None, None, None, None, seconds, peak / 1e6, None)
        return
    sent = max(seen.sent for seen in ranks)
    error = max(abs(seen.loss - alone.loss) / alone.loss for seen in ranks)
    n_gathers = sum(row.count for row in first.explanation.rows if row.kind not in ("all_reduce", "reduce_scatter"))
    predicted = max(seen.predicted_peak for seen in ranks)
    count = first.explanation.count
    table.row(name, perplexity, off, error, worst, count, sent / 1e6, seconds, peak / 1e6, predicted / 1e6)
    ours, theirs = (torch.from_numpy(seen.embedding_gradient) for seen in (first, alone))
    gradient = float((ours - theirs).norm() / theirs.norm())
    n_collectives, n_allowed, payload = minimum(name)
    table.target(f"{name}: tokens counted", first.n_tokens, alone.n_tokens, "==")
    table.target(f"{name}: loss per token, relative difference", error, 1e-5, "<=")
    table.target(f"{name}: fine-tuning losses, largest relative difference", worst, 1e-3, "<=")
    table.target(f"{name}: parameters that hold the tied embedding", first.n_tied, 1, "==")
    table.target(f"{name}: its one gradient, relative difference", gradient, 1e-4, "<=")
    table.target(f"{name}: collectives", count, n_collectives, "<=")
    table.target(f"{name}: gathers", n_gathers, n_allowed, "<=")
    table.target(f"{name}: bytes sent", sent, payload + gloo_header_bytes(payload, n_collectives + 1, 2), "<=")
    errors = [abs(seen.predicted_peak / seen.peak - 1) for seen in ranks]
    table.target(f"{name}: peak, |predicted / measured - 1|", max(errors), 0.01, "<=")


COLUMNS = {
    "case": "",
    "perplexity": ".4f",
    "off float64": ".1e",
    "loss diff": ".1e",
    "tuning diff": ".1e",
    "collectives": "d",
    "MB sent": ".1f",
    "s/step": ".2f",
    "MB peak": ".0f",
    "predicted": ".0f",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=20, help="steps of fine-tuning, at least 3")
    parser.add_argument("--explain", action="store_true", help="print what each case communicates")
    arguments = parser.parse_args()
    begin = time.monotonic()
    table = Table("real_model", COLUMNS)
    with Pool() as pool:
        (seen,) = pool.run(on_a_rank, [UNSHARDED], arguments.steps, world_size=1, timeout=1800)
    alone = seen[UNSHARDED]
    report(table, UNSHARDED, [alone], alone)
    with Pool() as pool:
        ranks = pool.run(on_a_rank, arguments.cases, arguments.steps, world_size=2, timeout=3600)
    for name in arguments.cases:
        report(table, name, [rank[name] for rank in ranks], alone)
        if arguments.explain:
            print(f"{name}\n{ranks[0][name].explanation}\n")
    code = table.finish()
    training = f"{arguments.steps} steps of AdamW, lr {LEARNING_RATE:g}, on {BATCH} x {SEQUENCE} tokens"
    print(
        f"SmolLM2-135M-Instruct, float32; perplexity of {alone.n_tokens} tokens in {WINDOWS} windows; {training}:\n"
        f"loss {alone.losses[0]:.3f} -> {alone.losses[-1]:.3f}. 'diff': largest relative difference from unsharded. "
        f"MB, peak (tensor memory in a step)\nand seconds: of the worst rank. {time.monotonic() - begin:.0f} s in all"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
