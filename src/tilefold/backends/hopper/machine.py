"""What is said in the machine's own instructions, or in its registers.

A loop that carries 16-bit numbers keeps them one by one: the compiler of the machine's code then joins them
anew in every round, in registers of their own. So weights cross a loop in pairs, as a product reads them.
"""

# The functions of Gluon are not Python: its types of values are known to its compiler only.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportIndexIssue=false

from .dialect import gl, gluon
from .program import got, put


@gluon.jit
def packed(weights, dtype: gl.constexpr):
    """Weights rounded to `dtype`, int32 `[64, BN / 2]`."""
    low, high = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The weights of `packed`, `[64, BN]`."""
    low = (pairs & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    weights = gl.join(low, high).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(weights, LAYOUT)


@gluon.jit
def log2(x):
    """By the machine's own approximation, within 2^-22."""
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def begin_beside():
    """Wait for the kernel ahead on the stream, beside whose end this one may begin; the next one may do so
    beside this one (CUDA's programmatic dependent launch).
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def settle():
    """Wait until what this warp group has copied to `out` is there, and has not merely left its place."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def keep_pointer(place, pointer):
    """Put a pointer into shared memory, int64 `[1]`."""
    put(place, pointer.to(gl.int64), gl.int64, 4)


@gluon.jit
def kept_pointer(place, dtype: gl.constexpr):
    """The pointer that was put there, to elements of `dtype`."""
    return got(place, 4).to(gl.pointer_type(dtype))
