"""Run a captured main graph under autograd and note what it does with every value and edge."""

from operator import getitem

import torch
from torch import fx


class Watch(fx.Interpreter):
    """``requires``: values with ``requires_grad``; ``edges``: (source, reader) with a gradient.

    Every reader gets an alias of its own of every value, so that gradients are seen edge by edge.
    """

    def __init__(self, captured):
        super().__init__(captured.main)
        self.requires = set()
        self.edges = set()

    def run_node(self, node):
        if node.op == "output":
            return super().run_node(node)
        if node.op == "placeholder":
            value = super().run_node(node)
        else:
            with torch.set_grad_enabled(node.meta.get("grad", True)):
                args, kwargs = self.fetch_args_kwargs_from_env(node)
                value = node.target(*args, **kwargs)
        elements = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(item, torch.Tensor) and item.requires_grad for item in elements):
            self.requires.add(node.name)
        return value

    def fetch_args_kwargs_from_env(self, node):
        def fetch(source):
            value = self.env[source]
            if isinstance(value, tuple | list):
                assert node.target is getitem
                place = node.args[1]
                return (*value[:place], self._tell(source, node, value[place]))
            return self._tell(source, node, value)

        return fx.map_arg(node.args, fetch), fx.map_arg(node.kwargs, fetch)

    def _tell(self, source, node, value):
        watched = isinstance(value, torch.Tensor) and value.requires_grad
        if not watched or node.op == "output" or not torch.is_grad_enabled():
            return value
        alias = value.view_as(value)
        alias.register_hook(lambda grad: self._note(grad, source.name, node.name))
        return alias

    def _note(self, grad, source, reader):
        if grad is not None:
            self.edges.add((source, reader))
