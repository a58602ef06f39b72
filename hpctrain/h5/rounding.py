"""Rounding of mantissas: what is kept is exact, what is dropped becomes zeros, which compress.

After Klöwer et al. 2021, "Compressing atmospheric data into its real information content" (Nature Computational
Science 1, 713-724): most low bits of simulated and measured fields are noise. Kept bits round half to even, so that no
bias is added; the relative error is at most 2^-(bits + 1) for normal numbers. Done here and not by numcodecs.BitRound,
which carries into the exponent and sign of NaN (0x7fffffff becomes -0).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

MANTISSA_BITS: Final = {np.dtype(np.float16): 10, np.dtype(np.float32): 23, np.dtype(np.float64): 52}
"""Stored bits of the mantissa of IEEE 754 binary16, 32 and 64."""


def mantissa_bits(dtype: np.dtype[Any]) -> int:
    """Stored mantissa bits of a float type, whatever its byte order."""
    return MANTISSA_BITS[dtype.newbyteorder("=")]


def round_mantissa(values: npt.NDArray[Any], bits: int) -> npt.NDArray[Any]:
    """`values` (little-endian floats) with `bits` mantissa bits kept; NaN and infinities as they are.

    A finite value whose rounding passes the largest of its type becomes infinite: what to do then is the caller's
    matter. Given all bits of the type, the same array is returned.
    """
    drop = mantissa_bits(values.dtype) - bits
    if drop == 0:
        return values
    word = np.dtype(f"<u{values.dtype.itemsize}")
    words = np.ascontiguousarray(values).view(word)
    kept_lowest = (words >> word.type(drop)) & word.type(1)
    rounded = words + (
        word.type((1 << (drop - 1)) - 1) + kept_lowest
    )  # just below half; half itself where odd
    rounded &= word.type(~((1 << drop) - 1) & (1 << 8 * values.dtype.itemsize) - 1)
    return np.where(np.isfinite(values), rounded.view(values.dtype), values)
