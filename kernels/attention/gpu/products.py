# mypy: ignore-errors
"""Products of tiles, which are tuples of parts: one, or three of bfloat16 that are a float32.

Three hold 8 of its 24 bits each, with its exponents. So float32 is multiplied by the fastest
instructions, whose operands may lie in shared memory either way round; those of tf32 may not, and
take registers that are not there.
"""

import triton
import triton.language as tl


@triton.jit
def parts(x, like, spec: tl.constexpr):
    """Float32 ``x`` in as many parts as ``like`` has, and of their dtype."""
    first = x.to(like[0].dtype)
    if spec.precision == "bf16x6":
        x -= first.to(tl.float32)
        second = x.to(tl.bfloat16)
        return first, second, (x - second.to(tl.float32)).to(tl.bfloat16)
    else:
        return (first,)


@triton.jit
def transposed(x, spec: tl.constexpr):
    """The parts of the transpose."""
    if spec.precision == "bf16x6":
        return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])
    else:
        return (tl.trans(x[0]),)


@triton.jit
def dot(a, b, total, spec: tl.constexpr):
    """``total + a @ b``; of three parts each the six products above 2**-24, least first."""
    if spec.precision == "bf16x6":
        for i in tl.static_range(2, -1, -1):
            for j in tl.static_range(2 - i, -1, -1):
                total = tl.dot(a[i], b[j], total)
        return total
    else:
        return tl.dot(a[0], b[0], total, input_precision=spec.precision)
