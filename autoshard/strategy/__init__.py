"""Search strategies: ask/tell, each a pure function of (space, seed, history)."""

from autoshard.strategy.base import Seen as Seen
from autoshard.strategy.base import Strategy as Strategy
from autoshard.strategy.baselines import baselines as baselines
from autoshard.strategy.beam import Beam as Beam
from autoshard.strategy.exhaustive import Exhaustive as Exhaustive
from autoshard.strategy.random import RandomSearch as RandomSearch
