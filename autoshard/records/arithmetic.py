"""How many operations an algorithm takes: the formulas that rungs 1 and 2 share.

Sources: products of complex numbers as four multiplications and four additions of real ones; FFT by
radix 2, 5 n log2 n (Cooley & Tukey 1965); Cholesky n^3 / 3 and triangular solves n^2 for each right
side (Golub & Van Loan, Matrix Computations, 4.2 and 3.1); sorting networks and merges compare each
element about log2 n times.
"""


def is_complex(dtype: str) -> bool:
    """Whether a type, in MLIR's words or HLO's, is of complex numbers.

    >>> is_complex("complex<f32>"), is_complex("c128"), is_complex("f32")
    (True, True, False)
    """
    return dtype.startswith("c")


def part_of_complex(dtype: str) -> str:
    """The real type that a complex one consists of; of others the type itself.

    >>> part_of_complex("complex<f64>"), part_of_complex("c64"), part_of_complex("bf16")
    ('f64', 'f32', 'bf16')
    """
    return {"complex<f32>": "f32", "complex<f64>": "f64", "c64": "f32", "c128": "f64"}.get(
        dtype, dtype
    )


def product_flops(multiply_adds: float, dtype: str) -> float:
    """Of a matrix product or convolution: 2 a multiply-add, 8 of complex numbers."""
    return multiply_adds * (8.0 if is_complex(dtype) else 2.0)


def fft_flops(elements: float, length: int) -> float:
    """Of transforms that make `elements` numbers, each over `length` of them.

    >>> fft_flops(8, 4)
    80.0
    """
    return 5.0 * elements * max(1, length.bit_length() - 1)


def cholesky_flops(elements: float, width: int) -> float:
    """Of factors of square matrices with `elements` numbers, `width` in a row."""
    return elements * width / 3.0


def triangular_solve_flops(elements: float, width: int) -> float:
    """Of solutions with `elements` numbers, of systems of `width` equations."""
    return elements * width


def sort_flops(elements: float, extent: int) -> float:
    """Comparisons of rows of `extent` numbers, `elements` in all; the keys alone are compared."""
    return elements * max(1, (extent - 1).bit_length())
