"""What the compiler says in its optimized, scheduled HLO text: read it, count it, replay it."""

from autoshard.records.work import Work as Work
from autoshard.rungs.compile.hlo.counts import HloCounts as HloCounts
from autoshard.rungs.compile.hlo.counts import count as count
from autoshard.rungs.compile.hlo.groups import parse_groups as parse_groups
from autoshard.rungs.compile.hlo.groups import parse_pairs as parse_pairs
from autoshard.rungs.compile.hlo.parse import parse as parse
from autoshard.rungs.compile.hlo.records import Computation as Computation
from autoshard.rungs.compile.hlo.records import HloError as HloError
from autoshard.rungs.compile.hlo.records import HloModule as HloModule
from autoshard.rungs.compile.hlo.records import Instruction as Instruction
from autoshard.rungs.compile.hlo.records import Shape as Shape
from autoshard.rungs.compile.hlo.timeline import Prices as Prices
from autoshard.rungs.compile.hlo.timeline import Timeline as Timeline
from autoshard.rungs.compile.hlo.trips import trip_count as trip_count
