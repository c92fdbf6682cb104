"""What XLA:CPU makes of the gradient of a pool that takes the largest of each window.

It looks up again where the largest lay, and scatters to these places
(`xla/service/select_and_scatter_expander.cc`): for each dimension it writes an array of places as
large as what was pooled, reduces the windows of all of them beside it, joins what is found to one
list of places, and scatters the gradient to them, into zeros. What of this needs no gradient is
done as soon as what was pooled is there, in the forward pass:
`docs/decisions/0055-what-is-computed-again.md`.
"""

POOLED = "stablehlo.select_and_scatter"
_PLACE_BYTES = 4.0  # s32


def pooled_reads(rank: int, element_bytes: float) -> tuple[float, float]:
    """How often what was pooled and the gradient are read and written, in units of their sizes.

    Beyond what the gradient's kernel counts itself: one read of each, and the result.

    Args:
      rank: of what was pooled.
      element_bytes: size of an element of either.
    """
    places = rank * _PLACE_BYTES / element_bytes
    # Places are written and read for each element that was pooled, and zeros are written; for each
    # window they are found with its largest, joined, and read again.
    return 2.0 * places + 1.0, 4.0 * places + 1.0


def places_kept(rank: int, element_bytes: float) -> float:
    """The size of a list of places, in units of the array that each element of has one."""
    return rank * _PLACE_BYTES / element_bytes
