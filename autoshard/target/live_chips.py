"""What the catalogue says of devices that are here."""

from autoshard.compat.xla.device_order import known_kind
from autoshard.target.catalogue import Chip, catalogue


def chip_of_kind(device_kind: str) -> Chip | None:
    """The built-in catalogue's entry of a live device, None where it has none."""
    kind = known_kind(device_kind)
    chips = (chip for chip in catalogue().values() if known_kind(chip.device_kind) == kind)
    return next(chips, None)
