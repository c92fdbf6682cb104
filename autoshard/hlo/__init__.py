"""What the compiler says in its optimized, scheduled HLO text: read it, count it, replay it."""

from autoshard.hlo.counts import HloCounts as HloCounts
from autoshard.hlo.counts import count as count
from autoshard.hlo.groups import parse_groups as parse_groups
from autoshard.hlo.groups import parse_pairs as parse_pairs
from autoshard.hlo.parse import parse as parse
from autoshard.hlo.records import Computation as Computation
from autoshard.hlo.records import HloError as HloError
from autoshard.hlo.records import HloModule as HloModule
from autoshard.hlo.records import Instruction as Instruction
from autoshard.hlo.records import Shape as Shape
from autoshard.hlo.timeline import Prices as Prices
from autoshard.hlo.timeline import Timeline as Timeline
from autoshard.hlo.trips import trip_count as trip_count
from autoshard.hlo.work import Work as Work
