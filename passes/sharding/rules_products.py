"""Rules of operators that combine tensors in a way of their own."""

from mllm_compile.passes.sharding.call import Call


def convolution(call: Call) -> str | None:
    """Samples, output channels and input channels are free, with groups the groups are, too.

    So are places, where the kernel sees one of them at a time.
    """
    if call["transposed"]:
        return None
    spatial = range(len(call.inputs[0]) - 2)
    h, w, e = (" ".join(f"{label}{dim}!" for dim in spatial) for label in "hwe")
    if {*call.inputs[1][2:], *call["stride"]} == {1} and not any(call["padding"]):
        h = e = h.replace("!", "")
    bias = ", +{}" if len(call.inputs) > 2 else ""
    groups = "0+2; 1+2" if bias else "0; 1"
    if call["groups"] == 1:
        return f"n c {h}, o c {w}{bias.format('o')} -> n o {e} | {groups}"
    # The number of groups, which no shape tells, is the literal of the call.
    if call.inputs[1][1] != 1:
        return f"n c! {h}, o! q! {w}{bias.format('o!')} -> n o! {e} | {groups}"
    return f"n g {h}, (g o) 1 {w}{bias.format('(g o)')} -> n (g o) {e} | {groups}"


def layer_norm(call: Call) -> str:
    """Normalised dims are whole; the statistics have the others."""
    count = len(call["normalized_shape"])
    h = " ".join(f"h{dim}!" for dim in range(count))
    ones = " ".join(["1"] * count)
    weights = f", {h}" * (len(call.inputs) - 1)
    return f"... {h}{weights} -> ... {h}, ... {ones}, ... {ones}"


def attention(call: Call) -> str:
    """Samples, heads (in groups that share a key) and queries are free; mask and bias broadcast.

    Lowering writes the plain causal flag of divided queries out as intervals.
    """
    extra = ", b s n! i!" if call["intervals"] is not None else ""
    extra += ", b (g r) s t!" * sum(call[name] is not None for name in ("mask", "bias"))
    return f"b (g r) s d!, b g t! d!, b g t! e!{extra} -> b (g r) s e!, b (g r) s"


def loss(call: Call) -> str | None:
    """``nll_loss`` as a sum: partial sums over samples; classes are special."""
    if len(call.inputs) != 2 or len(call.inputs[0]) != 2 or call["reduction"] == 1:
        return None
    return "n c*, n -> n," if call["reduction"] == 0 else "n c*, n -> ,"


def histogram(call: Call) -> str | None:
    """Counts of a part add up, if the range does not come from the data."""
    if call["min"] == call["max"]:
        return None
    return f"{' '.join(f'x{dim}' for dim in range(len(call.inputs[0])))} -> q!"


def triangular_solve(call: Call) -> str | None:
    """Batches are free, and so are the right-hand sides, in which the solution is linear."""
    if not call["left"] or call.inputs[0][:-2] != call.inputs[1][:-2]:
        return None
    return "... m! n!, ... n! k -> ... m! k | 1"
