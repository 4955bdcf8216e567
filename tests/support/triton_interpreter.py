"""Run the op cases under Triton's interpreter on a CPU: `python -m support.triton_interpreter [case ...]`.

The interpreter has to be asked for before Triton is imported, so this runs in a process of its own. Two of its faults
(Triton 3.9) are repaired first: casts to bf16 cut off instead of rounding, and products of bf16 and FP8 blocks multiply
their bit patterns.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from support import nvidia_cases, op_cases, step_cases
from support.op_cases import Bench, small
from triton.runtime import interpreter

from deepinfer.kernels.ops import REFERENCE_NUMERICS
from deepinfer.kernels.registry import KernelSet, load_backend, op_names

_convert_float = interpreter._convert_float


def _convert(values, from_type, to_type, rounding_mode):
    if (from_type, to_type) == (tl.float32, tl.bfloat16):
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(is_nan, quiet, rounded).astype(np.uint16).reshape(values.shape)
    return _convert_float(values, from_type, to_type, rounding_mode)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    left, right = (
        _convert_float(x.data, x.dtype.scalar, tl.float32, None).view(np.float32)
        if x.dtype.scalar in (tl.bfloat16, tl.float8e4nv)
        else x.data
        for x in (a, b)
    )
    return interpreter.TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def triton_kernels() -> KernelSet:
    """Every op from the Triton backend, on the CPU."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot
    backend = load_backend("triton", "cpu")
    assert backend.fault is None, backend.fault
    built = {op: backend.implementations[op].build(REFERENCE_NUMERICS) for op in op_names()}
    names = dict.fromkeys(built, "triton")
    return KernelSet(numerics=REFERENCE_NUMERICS, backends=names, batch_invariant=False, **built)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kernels = triton_kernels()
    checks = op_cases.CHECKS | step_cases.CHECKS | nvidia_cases.CHECKS
    for name in sys.argv[1:] or checks:
        checks[name](Bench(kernels, small(), torch.device("cpu")))
        print("passed", name, flush=True)
