"""The driver: budget, loop, journal, callbacks, interrupts."""

from autoshard.tuner.loop import Found as Found
from autoshard.tuner.loop import run_search as run_search
