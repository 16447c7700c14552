"""In which order do updates run? In the order in which what they wait for was sent.

Takes a program. Gives the same instructions, those behind the last op of the backward in another order. After this, a
parameter whose gradient was sent first is updated first, while the later gradients are still on their way. What can be
sent at once is sent before any update.
"""

from __future__ import annotations

from dataclasses import replace

from megalith.core.aliases import aliases, mutated
from megalith.core.program import Compute, Launch, Program, Wait, reads, writes

__all__ = ["arrival"]


def arrival(program: Program) -> Program:
    """The program with its updates in the order of arrival; each op keeps its place among those it depends on."""
    order = program.instructions
    computed = [i for i, o in enumerate(order) if isinstance(o, Compute) and o.origin.phase != "update"]
    start = 1 + max(computed, default=-1)
    memory = aliases(program.instructions)
    sent = {o.pending: i for i, o in enumerate(order) if isinstance(o, Launch)}
    made: dict[int, int] = {}  # slot -> key of the op that makes it
    touched: dict[int, int] = {}  # root of memory -> the largest key of an op that reads or writes it
    keys = []
    for instruction in order[start:]:
        key = max((made.get(slot, -1) for slot in reads(instruction)), default=-1)
        if isinstance(instruction, Wait):
            key = max(key, sent[instruction.pending])
        key = max([key, *(touched.get(memory.root(slot), -1) for slot in mutated(instruction))])
        keys.append(key)
        made.update(dict.fromkeys(writes(instruction), key))
        for slot in (*reads(instruction), *writes(instruction)):
            root = memory.root(slot)
            touched[root] = max(touched.get(root, -1), key)
    behind = sorted(range(start, len(order)), key=lambda i: keys[i - start])
    return replace(program, instructions=order[:start] + tuple(order[i] for i in behind))
