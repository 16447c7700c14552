"""Which nodes of a traced graph say nothing new? Takes a graph, gives an equal one with fewer nodes.

After this: a permutation is never followed by another nor a reshape by another, equal nodes of one phase are one node
(views are shared by all phases), sums of sums are one sum, and nothing is computed that no output needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megalith.core.fold import fold_lookups
from megalith.sharding import markers
from megalith.sharding.graph import Call, Graph, Node, Ref, map_refs, refs

__all__ = ["clean", "tidy"]

aten = torch.ops.aten
_VIEWS = {aten.reshape.default, aten.permute.default, aten.expand.default, aten.slice.Tensor}


def clean(graph: Graph) -> Graph:
    """The same function with fewer nodes."""
    return _flatten_sums(tidy(graph))


def tidy(graph: Graph) -> Graph:
    """The same function with fewer nodes, its sums as they were written."""
    return _drop_dead(_simplify(fold_lookups(graph)))


def _simplify(graph: Graph) -> Graph:
    """Composes views, drops those that do nothing, merges equal nodes."""
    renamed: dict[int, Ref] = {}
    seen: dict[Any, Node] = {}
    producer: dict[int, Node] = {}
    kept: list[Node] = []
    fed = set(graph.inputs)  # inputs, and views of them

    def now(ref: Ref) -> Ref:
        return renamed.get(ref.id, ref)

    for node in graph.nodes:
        node = replace(node, args=map_refs(node.args, now), kwargs=map_refs(node.kwargs, now))
        node = _compose(node, producer)
        if _does_nothing(node, graph.types):
            renamed[node.outputs[0]] = node.args[0]
            continue
        key = _key(node, fed)
        if node.op in _VIEWS and node.args[0].id in fed:
            fed.update(node.outputs)
        twin = seen.get(key) if key is not None else None
        if twin is not None:
            renamed.update({mine: Ref(its) for mine, its in zip(node.outputs, twin.outputs, strict=True)})
            continue
        if key is not None:
            seen[key] = node
        kept.append(node)
        for value in node.outputs:
            producer[value] = node
    return replace(graph, nodes=tuple(kept), outputs=tuple(map_refs(graph.outputs, now)))


def _compose(node: Node, producer: Mapping[int, Node]) -> Node:
    """A view of a view of the same kind, as one view."""
    if node.op not in (aten.reshape.default, aten.permute.default):
        return node
    before = producer.get(node.args[0].id)
    if before is None or before.op is not node.op:
        return node
    if node.op is aten.reshape.default:
        return replace(node, args=(before.args[0], node.args[1]))
    inner, outer = before.args[1], node.args[1]
    rank = len(inner)
    return replace(node, args=(before.args[0], [inner[d % rank] % rank for d in outer]))


def _does_nothing(node: Node, types: Mapping[int, Any]) -> bool:
    if node.op is aten.reshape.default:
        return types[node.args[0].id].shape == types[node.outputs[0]].shape
    if node.op is aten.permute.default:
        return [d % len(node.args[1]) for d in node.args[1]] == list(range(len(node.args[1])))
    return False


def _key(node: Node, fed: set[int]) -> Any:
    """What equal nodes have in common; None for nodes that are never merged.

    Views are shared by all phases, but those of inputs are not: a parameter is gathered in each phase anew.
    """
    if isinstance(node.op, Call) or node.op in (markers.constrain, markers.like):
        return None
    shared = node.op in _VIEWS and node.args[0].id not in fed
    phase = "" if shared else node.origin.phase
    return node.op, phase, _hashable(node.args), _hashable(node.kwargs)


def _hashable(tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return tuple(_hashable(item) for item in tree)
    if isinstance(tree, Mapping):
        return tuple((k, _hashable(v)) for k, v in sorted(tree.items()))
    return (type(tree), tree)


def _drop_dead(graph: Graph) -> Graph:
    live = {ref.id for ref in refs(graph.outputs)}
    kept = []
    for node in reversed(graph.nodes):
        if any(value in live for value in node.outputs):
            kept.append(node)
            live.update(ref.id for ref in node.operands)
    constants = {v: t for v, t in graph.constants.items() if v in live}
    return replace(graph, nodes=tuple(reversed(kept)), constants=constants)


def _flatten_sums(graph: Graph) -> Graph:
    """`((a + b) + c) + d`, each inner sum used once and all of one shape and phase, becomes one sum of four."""
    producer = {value: node for node in graph.nodes for value in node.outputs}
    n_uses: dict[int, int] = {}
    for node in graph.nodes:
        for ref in node.operands:
            n_uses[ref.id] = n_uses.get(ref.id, 0) + 1
    for ref in refs(graph.outputs):
        n_uses[ref.id] = n_uses.get(ref.id, 0) + 1

    def is_sum(node: Node | None) -> bool:
        if node is None or node.op is not aten.add.Tensor or node.kwargs:
            return False
        types = [graph.types[r.id] for r in node.args if isinstance(r, Ref)]
        return len(types) == 2 and all(t == graph.types[node.outputs[0]] for t in types)

    def terms(ref: Ref, phase: str) -> list[Ref]:
        node = producer.get(ref.id)
        if node is not None and is_sum(node) and n_uses[ref.id] == 1 and node.origin.phase == phase:
            return [t for r in node.args for t in terms(r, phase)]
        return [ref]

    nodes = []
    for node in graph.nodes:
        if is_sum(node):
            parts = [t for r in node.args for t in terms(r, node.origin.phase)]
            if len(parts) > 2:
                node = replace(node, op=markers.add_n, args=(tuple(parts),))
        nodes.append(node)
    return _drop_dead(replace(graph, nodes=tuple(nodes)))
