"""Tensors of a graph by their producer: what takes an element out of a tuple is seen through."""

from torch import fx

from mllm_compile.compiler.derivative import edges_of
from mllm_compile.compiler.graph import is_element, tensors_of

Value = tuple[fx.Node, int]
"""One result of one node: (node, which). A placeholder is its own result 0."""


def source(node: fx.Node) -> Value:
    """The value that a node stands for: an element of a tuple belongs to the tuple's producer."""
    if is_element(node):
        producer, index = node.args
        assert isinstance(producer, fx.Node)
        assert isinstance(index, int)
        return producer, index
    return node, 0


def operands(node: fx.Node) -> tuple[Value, ...]:
    """The tensor arguments of a node, repeated as often as they occur: the order of its rule."""
    if is_element(node):
        return (source(node),)
    return tuple(source(argument) for argument in edges_of(node))


def shape_of(value: Value) -> tuple[int, ...]:
    """The shape of a value; () for a result that is no tensor."""
    tensor = tensors_of(value[0])[value[1]]
    return () if tensor is None else tuple(tensor.shape)


def shapes(node: fx.Node) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """The shapes of a node's tensor arguments, and of its results."""
    if is_element(node):
        shape = shape_of(source(node))
        return (shape,), (shape,)
    results = tuple(shape_of((node, index)) for index in range(len(tensors_of(node))))
    return tuple(map(shape_of, operands(node))), results
