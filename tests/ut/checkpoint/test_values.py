"""Conversion between dtypes, against exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.checkpoint.values import converted


def from_bits(bits):
    return (np.atleast_1d(np.asarray(bits, np.uint32)) << 16).view(np.float32)


def test_bfloat16_by_hand():
    # 1 + 2**-8 lies between 1 and 1 + 2**-7, and 1 + 3 * 2**-8 between that and 1 + 2**-6: both go to the even one.
    values = np.array([0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.inf, -np.inf], np.float32)
    expected = [0x0000, 0x8000, 0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80]
    assert converted(values, "F32", "BF16").tolist() == expected
    assert converted(values.astype(np.float64), "F64", "BF16").tolist() == expected


def test_nan_stays_nan():
    worst = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(from_bits(converted(worst, "F32", "BF16"))).all()
    assert np.isnan(converted(np.array([0x7FC0], np.uint16), "BF16", "F16")).all()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126))
def test_the_nearest_bfloat16(value):
    (bits,) = converted(np.array([value], np.float32), "F32", "BF16")
    found = Fraction(float(from_bits(bits)[0]))
    for other in (int(bits) - 1, int(bits) + 1):
        neighbour = from_bits(other & 0xFFFF)
        if np.isfinite(neighbour[0]):
            distances = [abs(Fraction(value) - candidate) for candidate in (found, Fraction(float(neighbour[0])))]
            assert distances[0] < distances[1] or (distances[0] == distances[1] and bits % 2 == 0)


@given(st.integers(0, 0xFFFF))
def test_bfloat16_and_back(bits):
    array = np.array([bits], np.uint16)
    if np.isfinite(from_bits(bits)[0]):
        for wide in ("F32", "F64"):
            assert converted(converted(array, "BF16", wide), wide, "BF16").tolist() == [bits]


def test_what_is_too_large_is_told():
    with pytest.raises(FloatingPointError):
        converted(np.array([1e6], np.float32), "F32", "F16")
    assert np.isinf(converted(np.array([np.inf], np.float32), "F32", "F16")).all()
