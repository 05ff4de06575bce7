"""Backward in two parts: gradients of a stage's input now, gradients of its weights later.

In the graph of a stage, the *chain* are the nodes from which the stage's input can be reached. A node of the chain with an
edge that leads to weights only (a matrix product, a normalisation) is a *border*. The first part runs the chain and keeps
the gradients that arrive at the borders; autograd computes no weight gradient there, since none is asked for. The second
part starts at each border with the kept gradient and asks for the weights behind it only.

A weight that is used in several places is taken in the first part. Where they lie below one another, autograd would reach it
from the upper border along the chain as well, and count twice; and its hooks are to see one gradient, the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = list[Tensor | None]


@dataclass
class _Border:
    """Slots of a node in which gradients arrive, and the leaves (their AccumulateGrad nodes) behind it."""

    node: Node
    slots: list[int]
    leaves: list[Node]


@dataclass
class WeightTask:
    """What is left of a micro-batch after its input gradients: where to start, with what, for which weights."""

    starts: list[tuple[list[GradientEdge], list[Tensor], list[Node]]]
    ready: list[tuple[Node, Tensor]]  # weight gradients that came with the first part

    def run(self) -> None:
        """Accumulates the weight gradients, as backward does (hooks on the weights run)."""
        for node, grad in self.ready:
            accumulate(GradientEdge(node, 0), grad)
        while self.starts:
            edges, grads, leaves = self.starts.pop(0)
            torch.autograd.backward(edges, grads, inputs=[GradientEdge(leaf, 0) for leaf in leaves], retain_graph=True)
        self.ready.clear()


def accumulate(leaf: GradientEdge, grad: Tensor) -> None:
    """Adds to a leaf a gradient that autograd has computed before. The leaf's hooks changed it then; what they make of it now is
    not used."""
    handle = leaf.node.register_prehook(lambda _: (grad,))
    try:
        torch.autograd.backward([leaf], [grad])
    finally:
        handle.remove()


class _Graph:
    """The nodes below some roots, with the leaves that each can reach."""

    def __init__(self, roots: Sequence[Node], inputs: frozenset[Node]) -> None:
        self.inputs = inputs
        self.order = self._topological(roots)  # a node comes after everything it leads to
        self.chain: set[Node] = set()
        self.slots: dict[Node, set[int]] = {}
        for node in self.order:
            for below, slot in node.next_functions:
                if below is not None:
                    self.slots.setdefault(below, set()).add(slot)
            if node in inputs or any(below in self.chain for below, _ in node.next_functions if below is not None):
                self.chain.add(node)

    def _topological(self, roots: Sequence[Node]) -> list[Node]:
        order: list[Node] = []
        seen: set[Node] = set()
        stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
        while stack:
            node, left = stack.pop()
            if left:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                if node not in self.inputs:
                    stack.extend((below, False) for below, _ in node.next_functions if below is not None)
        return order

    def leaves_behind(self, node: Node, cache: dict[Node, frozenset[Node]]) -> frozenset[Node]:
        """Weights that are reached from `node` without the chain."""
        if node in self.chain:
            return frozenset()
        if node not in cache:
            for below in self._topological([node]):
                found = {below} if hasattr(below, "variable") else set()
                for after, _ in below.next_functions:
                    if after is not None and after not in self.chain:
                        found |= cache.get(after, frozenset())
                cache[below] = frozenset(found)
        return cache[node]


def input_gradients(outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Grads, WeightTask]:
    """Gradients of `inputs` (leaves) and the task that computes those of all other leaves. `outputs` have grad_fns or are
    leaves. Afterwards the graph is held by the task alone."""
    edges = [get_gradient_edge(t) for t in outputs]
    entries = frozenset(get_gradient_edge(t).node for t in inputs)
    graph = _Graph([e.node for e in edges], entries)
    for edge in edges:
        graph.slots.setdefault(edge.node, set()).add(edge.output_nr)
    borders, shared = _borders(graph)
    asked: list[Any] = [*inputs]
    asked += [GradientEdge(b.node, slot) for b in borders for slot in b.slots]
    asked += [GradientEdge(leaf, 0) for leaf in shared]
    rooted = [(e, g) for e, g in zip(edges, grads, strict=True) if e.node in graph.chain]
    found: list[Tensor | None] = [None] * len(asked)
    if asked and rooted:
        roots, given = [e for e, _ in rooted], [g for _, g in rooted]
        found = list(torch.autograd.grad(roots, asked, given, retain_graph=True, allow_unused=True))
    own, rest = found[: len(inputs)], found[len(inputs) :]
    starts: list[tuple[list[GradientEdge], list[Tensor], list[Node]]] = []
    for border in borders:
        slots = [(GradientEdge(border.node, s), g) for s in border.slots if (g := rest.pop(0)) is not None]
        if slots:
            starts.append(([e for e, _ in slots], [g for _, g in slots], border.leaves))
    ready = [(leaf, g) for leaf, g in zip(shared, rest, strict=True) if g is not None]
    starts += _loose_roots(graph, edges, grads)
    return own, WeightTask(starts, ready)


def _borders(graph: _Graph) -> tuple[list[_Border], list[Node]]:
    """The borders from the output down, and the weights that must be taken with the input gradients."""
    cache: dict[Node, frozenset[Node]] = {}
    found: list[tuple[Node, frozenset[Node]]] = []
    uses: Counter[Node] = Counter()
    for node in graph.order:
        if node not in graph.chain or node in graph.inputs:
            continue
        behind = (graph.leaves_behind(after, cache) for after, _ in node.next_functions if after is not None)
        own = frozenset[Node]().union(*behind)
        if own:
            found.append((node, own))
            uses.update(own)
    shared = {leaf for leaf, count in uses.items() if count > 1}
    borders = []
    for node, own_leaves in reversed(found):
        leaves = [leaf for leaf in own_leaves if leaf not in shared]
        if leaves:
            borders.append(_Border(node, sorted(graph.slots.get(node, {0})), sorted(leaves, key=graph.order.index)))
    return borders, sorted(shared, key=graph.order.index)


def _loose_roots(
    graph: _Graph, edges: Sequence[GradientEdge], grads: Sequence[Tensor]
) -> list[tuple[list[GradientEdge], list[Tensor], list[Node]]]:
    """Outputs that do not depend on the input: all of their backward belongs to the second part."""
    cache: dict[Node, frozenset[Node]] = {}
    found = []
    for edge, grad in zip(edges, grads, strict=True):
        if edge.node not in graph.chain:
            leaves = sorted(graph.leaves_behind(edge.node, cache), key=graph.order.index)
            if leaves:
                found.append(([edge], [grad], leaves))
    return found
