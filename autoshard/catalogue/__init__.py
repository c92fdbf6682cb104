"""Hardware that targets can name: chips, their figures and their links, with source and date."""

from autoshard.catalogue.chips import DTYPES as DTYPES
from autoshard.catalogue.chips import LEVELS as LEVELS
from autoshard.catalogue.chips import Chip as Chip
from autoshard.catalogue.chips import Figure as Figure
from autoshard.catalogue.chips import Link as Link
from autoshard.catalogue.listing import Targets as Targets
from autoshard.catalogue.listing import targets as targets
from autoshard.catalogue.loading import CatalogueError as CatalogueError
from autoshard.catalogue.loading import catalogue as catalogue
