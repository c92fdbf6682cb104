"""Hardware that targets can name: chips, their figures and their links, with source and date."""

from autoshard.target.catalogue.chips import DTYPES as DTYPES
from autoshard.target.catalogue.chips import LEVELS as LEVELS
from autoshard.target.catalogue.chips import Chip as Chip
from autoshard.target.catalogue.chips import Figure as Figure
from autoshard.target.catalogue.chips import Link as Link
from autoshard.target.catalogue.listing import Targets as Targets
from autoshard.target.catalogue.listing import targets as targets
from autoshard.target.catalogue.loading import CatalogueError as CatalogueError
from autoshard.target.catalogue.loading import catalogue as catalogue
