"""Small modules captured by make_fx, with the metadata of a captured main graph, for planning."""

from contextlib import ExitStack

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mllm_compile.compiler.captured import Captured, Input, Signature


def capture(model, batch, *, num_outputs=1):
    """One functional forward graph; inputs are parameters (tied ones once), buffers, batch."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    state = {**parameters, **buffers}

    def forward(*flat):
        values = dict(zip([*state, *batch], flat, strict=True))
        swapped = {name: values[name] for name in state}
        result = torch.func.functional_call(
            model, swapped, (), {name: values[name] for name in batch}, tie_weights=True
        )
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    values = [value.detach() for value in [*state.values(), *batch.values()]]
    with _owned(model), fx.traceback.preserve_node_meta():
        main = make_fx(torch.func.functionalize(forward), tracing_mode="fake")(*values)
    main.graph.eliminate_dead_code()
    main.recompile()
    for node in main.graph.nodes:
        node.meta["owner"] = node.meta.get("custom", {}).get("owner", "")
        node.meta["grad"] = True
    inputs = [Input("parameter", name, p.requires_grad) for name, p in parameters.items()]
    inputs += [Input("buffer", name) for name in buffers]
    inputs += [Input("batch", name) for name in batch]
    return Captured(
        main, main, tuple(inputs), (), (), (), {}, Signature((), ()), num_outputs=num_outputs
    )


def _owned(model):
    """Hooks that annotate nodes with the path of the module whose forward makes them."""
    stack = ExitStack()
    for path, module in model.named_modules():
        _annotate(stack, path, module)
    return stack


def _annotate(stack: ExitStack, path: str, module: nn.Module) -> None:
    entered = []

    def enter(*_):
        context = fx.traceback.annotate({"owner": path})
        context.__enter__()
        entered.append(context)

    def leave(*_):
        entered.pop().__exit__(None, None, None)

    handles = (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))
    for handle in handles:
        stack.callback(handle.remove)


def values_of(captured: Captured, seed=0):
    """Real values for main's placeholders, and whether each is a parameter that trains."""
    generator = torch.Generator().manual_seed(seed)
    values = []
    for node, item in zip(
        captured.main.graph.find_nodes(op="placeholder"), captured.inputs, strict=True
    ):
        fake = node.meta["val"]
        if fake.is_floating_point():
            value = torch.rand(fake.shape, generator=generator, dtype=fake.dtype) - 0.5
        elif fake.is_complex():
            value = torch.randn(fake.shape, generator=generator, dtype=fake.dtype)
        else:
            value = torch.randint(0, 2, fake.shape, generator=generator).to(fake.dtype)
        values.append(value.requires_grad_(item.kind == "parameter" and item.trainable))
    return values
