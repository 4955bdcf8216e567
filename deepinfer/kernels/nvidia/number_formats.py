"""Triton helpers: the released number formats, bit for bit as `kernels/reference/quantize.py` writes and reads them.

Codes are built from IEEE bits with integer steps, so that they are the same on every chip and under the interpreter.
All helpers take and return float32 or int32 blocks; rounding is to nearest, ties to the even code.
"""

from __future__ import annotations

import triton
import triton.language as tl

# $2: four bytes of two codes each; $3 and $7: sizes of the codes 0 .. 3 and 4 .. 7. A nibble becomes a selector.
_WIDEN = tl.constexpr("""
{
    .reg .b32 code, pair, size;
    and.b32 code, $2, 0x07070707;
    shr.b32 pair, code, 4;
    or.b32 pair, pair, code;
    prmt.b32 pair, pair, 0, 0x4420;
    prmt.b32 size, $3, $7, pair;
    shl.b32 code, $2, 4;
    lop3.b32 $0, size, code, 0x80808080, 0xF8;
    shr.b32 code, $2, 4;
    and.b32 code, code, 0x07070707;
    shr.b32 pair, code, 4;
    or.b32 pair, pair, code;
    prmt.b32 pair, pair, 0, 0x4420;
    prmt.b32 size, $3, $7, pair;
    lop3.b32 $1, size, $2, 0x80808080, 0xF8;
}
""")


@triton.jit
def decode_e8m0(byte):
    """2^(byte - 127) of an int32 block; byte 0 is 2^-127, byte 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_e8m0_ceiling(values):
    """The byte (int32) of the smallest power of two >= values (normal, positive)."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def fp8_scale(largest):
    """The E8M0 byte (int32) of groups whose largest size is `largest`: at least 2^-22."""
    return encode_e8m0_ceiling(tl.maximum(largest, 1e-4) * (1.0 / 448.0))


@triton.jit
def encode_e4m3(x):
    """E4M3 codes (uint8) of float32 values, saturating at 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
    whole = size.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - 960
    # below 2^-6 codes are multiples of 2^-9: adding 2^14 rounds to them
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """float32 values of uint8 codes."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def encode_e2m1(x):
    """4-bit codes (int32) of float32 values, saturating at 6; the sign of zero is kept."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def decode_e2m1(code):
    """float32 values of 4-bit codes (int32): the code's bits as the lowest of a float32 exponent and its mantissa."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126; subnormal codes become 0.5


@triton.jit
def group_maxima(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Largest size of each group of WIDTH neighbours: x [ROWS, GROUPS * WIDTH] -> [ROWS, GROUPS]."""
    return tl.max(tl.abs(tl.reshape(x, (ROWS, GROUPS, WIDTH))), 2)


@triton.jit
def spread(factors, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Repeat each factor WIDTH times: [ROWS, GROUPS] -> [ROWS, GROUPS * WIDTH]."""
    wide = tl.broadcast_to(tl.reshape(factors, (ROWS, GROUPS, 1)), (ROWS, GROUPS, WIDTH))
    return tl.reshape(wide, (ROWS, GROUPS * WIDTH))


@triton.jit
def size_tables(shift):
    """E4M3 codes of the FP4 sizes 0, 0.5, 1, 1.5 and 2, 3, 4, 6 times 2^(shift - 6), four bytes each (int32).

    All zero where shift < 0; at most 12.
    """
    upper = shift * 0x08080808 + 0x1C181410
    lower = shift * 0x08080800 + 0x0C080000 + tl.where(shift == 0, 0x400, 0)
    return tl.where(shift < 0, 0, lower), tl.where(shift < 0, 0, upper)


@triton.jit
def look_up(codes, lower, upper):
    """What one FP4 code (int32) is in the tables, as `_WIDEN` does it for four at a time."""
    place = (codes & 3) * 8
    size = tl.where((codes & 4) == 0, lower >> place, upper >> place) & 0xFF
    return (size | ((codes & 8) << 4)).to(tl.uint8)


@triton.jit
def widen_e2m1(codes, shift, PLAIN: tl.constexpr):
    """E4M3 codes (uint8) of the low and the high nibbles of `codes` uint8 [N, G, 16]; `shift` int32 [N, G]."""
    lower, upper = size_tables(shift)
    if PLAIN:
        wide = codes.to(tl.int32)
        low = look_up(wide & 15, lower[:, :, None], upper[:, :, None])
        high = look_up(wide >> 4, lower[:, :, None], upper[:, :, None])
    else:
        low, high = tl.inline_asm_elementwise(
            _WIDEN,
            "=r,=r,r,r,r,r,r,r,r,r,r",
            [codes, lower[:, :, None], upper[:, :, None]],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return low, high
