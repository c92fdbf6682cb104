"""The driver: budget, loop, journal, callbacks, interrupts."""

from autoshard.driver.search import Found as Found
from autoshard.driver.search import run_search as run_search
