"""Search strategies: ask/tell, each a pure function of (space, seed, history)."""

from autoshard.tuner.strategy.base import Strategy as Strategy
from autoshard.tuner.strategy.beam import Beam as Beam
from autoshard.tuner.strategy.exhaustive import Exhaustive as Exhaustive
from autoshard.tuner.strategy.random import RandomSearch as RandomSearch
