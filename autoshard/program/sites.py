"""Sites: the values inside a step that take a sharding constraint, and where they are.

A site is known again in a lowered module by its tag, a name scope in the location of the
constraint, never by order: lowering drops, unrolls and moves operations.
"""

import dataclasses
import enum
import re

from autoshard.compat.jaxpr import jaxprs

_TAG = "autoshard_site_"
_TAG_PATTERN = re.compile(_TAG + r"(\d+)")


class Place(enum.StrEnum):
    """Where a site sits relative to the equation that makes or uses its value."""

    RESULT = "result"  # after the equation that computes the value
    USE = "use"  # between a value and the contraction that uses it
    ENTRY = "entry"  # at the entry of a loop body


class ParamUse(enum.StrEnum):
    """Where compute values are made of a value that comes from the state alone."""

    NOWHERE = "nowhere"
    OUTSIDE = "outside"  # it is made where everything runs once a step
    ENTERING = "entering"  # it goes from there into a loop, or what is made anew backward
    INSIDE = "inside"  # it is made in there


class LoopPosition(enum.StrEnum):
    """Where an activation is that a loop does not change and that products in its body use.

    What the loop goes over, a part in each turn, and what is the same in all turns.
    """

    NOT = "not"
    BEFORE = "before"  # on its way into the loop
    INSIDE = "inside"  # at the entry of the loop's body


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A value inside the step that takes a sharding constraint.

    Attributes:
      index: the number in its tag.
      storage: whether it takes storage rules, unless it has a batch axis; the others take compute
        rules.
      of_state: whether the value comes from the state alone, whichever rules it takes.
      used: of those that take storage rules, where they are made of the state for compute values.
      looped: of activations that products in a loop use, where.
      batch_first: where the batch and another axis ask for one mesh axis, the batch has it. Not so
        in products that go to the parameters: tokens go to where experts lie, and come back.
      passing: an activation on its way into a product; it takes a constraint only where the layout
        gives its two ends different shardings.
      owned: dimensions in which each element meets a parameter of its own in that product.
      found: of a table on its way into a lookup, the site of what is found there; -1 of others.
      shape: of the value; inside a scan body, of one iteration.
      operation: the primitive that makes it, or uses it.
      source: `file:line` of the user's code, "" if unknown.
    """

    index: int
    place: Place
    storage: bool
    of_state: bool = False
    used: ParamUse = ParamUse.NOWHERE
    looped: LoopPosition = LoopPosition.NOT
    batch_first: bool = True
    passing: bool = False
    owned: tuple[int, ...] = ()
    found: int = -1
    shape: tuple[int, ...]
    operation: str
    source: str

    @property
    def tag(self) -> str:
        return f"{_TAG}{self.index}"


def site_of_location(location: str) -> int | None:
    """The site whose tag a lowered operation's location carries."""
    found = _TAG_PATTERN.search(location)
    return int(found.group(1)) if found else None


@dataclasses.dataclass(frozen=True, slots=True)
class SitePlacement:
    """The sites of one jaxpr, by index.

    Attributes:
      loop: the loop whose body the jaxpr is; None of others.
      entries: on the values that a loop's body is entered with, by position.
      uses: between a value and the equation that uses it, by equation and operand.
      results: after an equation, by equation and result.
    """

    loop: jaxprs.JaxprEqn | None
    entries: dict[int, int] = dataclasses.field(default_factory=dict)
    uses: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    results: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class SiteMap:
    """Where the sites of one step are. Build with `siting.find_sites`.

    Attributes:
      step: the step without constraints.
      sites: all of them, by index.
      sited: where they are, for each jaxpr of the step that has been looked at, by its identity.
      used_leaves: the leaves of the state that compute values are made of, by index: parameters.
    """

    step: jaxprs.ClosedJaxpr
    sites: list[Site]
    sited: dict[int, SitePlacement]
    used_leaves: frozenset[int]
