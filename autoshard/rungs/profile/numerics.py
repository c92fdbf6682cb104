"""Does a sharded program compute what the reference computes? Relative errors of the *change*.

Parameters alone cannot tell: with adamw a gradient wrong by 8x moves them by 6e-6 of their size.
So every leaf of the state, optimizer moments included, is compared by what the steps added to it:
`||dx - dx_ref|| / ||dx_ref||` over the leaf, in float64 on the host. To a value that was not finite
before (a best loss of infinity) they added all that it is.

What that alone would get wrong is rounding. Some changes are nothing but rounding noise: the
gradient of a bias that cancels is zero but for it; adam divides noise by noise, so that
elements with no gradient move by a full step in a random direction; a bf16 parameter moves by
less than its last bit. No tolerance on the result can be right for those and strict for the rest.
So the reference runs again from a state and batch whose floats are perturbed by about one unit in
the last place: how far that moves a leaf is the leaf's *noise*. A third run, perturbed more,
finds the leaves with *jumps*: an element turned by a third of the largest change. A candidate is
allowed

    ||dx - dx_ref||  <=  tolerance * ||dx_ref||  +  4 * noise
                         [+  8 * max|dx_ref| if jumps]  [+  bend / 8 if kinks].

The term of jumps is sixteen elements that went the other way: such events are rare and all or
nothing, so that one run says little of how many the next will have. Kinks are what relu has: an
activation that rounding takes to the other side of 0 adds its whole part to a gradient, or takes it
away, while the loss hardly moves. A smooth leaf moves in proportion to the perturbation, and a
fourth run, perturbed by 0.3 of the third, shows whether it does; its *bend* is by how much not. The
activations that change sides grow in number as the perturbation does, and what they add up to as
its root: an eighth of what 1000 units do is what 16 do, and other orders of summation are a few.

In a healthy f32 leaf the noise is a tenth of the tolerance, and there are neither jumps nor kinks.
A leaf where the three exceed half the change is called noisy: there only gross errors show
(`NumericsReport.noisy`). So are adam's parameters judged; its moments do not amplify, and are
judged strictly, so that a wrong gradient is still caught. Errors that perturbing the inputs does
not excite (long sums added up in another order) have the tolerance.

A replicated or partly replicated leaf is read from every device: copies that drifted apart are a
missing all-reduce, and the worst copy counts.

States are read leaf by leaf. The host keeps the initial state, the reference's last state, and one
more state while `reference` looks for kinks. With less room the last of these is read in groups of
leaves, and the reference runs once more for each group. Leaves of the reference for which there is
no room at all are not compared, and the report names them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, overload

import jax.numpy as jnp
import numpy as np

from autoshard.records.numerics import LeafError, NumericsReport
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.rungs.profile import norms
from autoshard.rungs.profile.chunked import chunked_map

REVISION = 5
"""Raise it when programs may pass that failed: failures of another revision are not believed."""

NOISE_FACTOR = 4.0
_JUMP = 0.3
_JUMP_FACTOR = 8.0
_NOISY = 0.5
_TINY = float(np.finfo(np.float64).tiny)
_COARSE = ("bf16", "f16")
_TOLERANCE = 1e-4
_COARSE_TOLERANCE = 3e-2
_CUT_TOLERANCE = _COARSE_TOLERANCE / 8  # of products that cut f32 to TF32: as its unit to bf16's
_PROBE = 1000.0  # units in the last place
_PART = 0.3  # of the probe: the run that shows whether a leaf moves in proportion
_ROUNDING = 16.0  # units that another order of summation may come to
_COARSE_PROBE = 8.0
_EIGHT_BIT_TOLERANCE = 0.25
_WORKING = 4
"""Host arrays of a leaf's size in use while that leaf is compared: start, value, replica, spare."""

Copies = tuple[np.ndarray, ...]
"""One value as the devices hold it: the distinct copies of the whole array, one if all agree."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What a program computed in a few steps.

    Attributes:
      state: the last state, for each leaf its copies. They may be read from the devices at each
        access: keep what is needed, and drop the trajectory before another program runs.
      metrics: for each step, for each metric its copies.
    """

    state: Sequence[Copies]
    metrics: tuple[tuple[Copies, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What candidates are compared with. Made by `reference`.

    Attributes:
      steps: length of the trajectory.
      initial: the state both start from, one array a leaf.
      state: the reference's last state; None for leaves for which the host had no room.
      metrics: the reference's, by step.
      state_slack, metrics_slack: what rounding is allowed to do to each leaf: an L2 norm, or for
        integers the share of elements that may differ. Metrics by step.
      coarse: tolerance that the float types inside the program call for.
    """

    steps: int
    initial: tuple[np.ndarray, ...]
    state: tuple[np.ndarray | None, ...]
    metrics: tuple[tuple[np.ndarray, ...], ...]
    state_slack: tuple[float, ...]
    metrics_slack: tuple[tuple[float, ...], ...]
    coarse: float


class Perturbed(Sequence[np.ndarray]):
    """Values whose floats are moved a little up or down, the same way each time; 0 stays.

    Each value is made at each access: nothing is kept.

    Args:
      units: how far, in spacings of a value's dtype or, if that is more, in half spacings of the
        coarsest type the program computes in: one that casts f32 parameters to bf16 rounds like
        bf16.
    """

    def __init__(
        self, values: Sequence[np.ndarray], float_types: frozenset[str], units: float = 1.0
    ):
        self._values = values
        self._coarsest = _unit(float_types) / 2
        self._units = units

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        value = self._values[index]
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        share = self._units * max(float(jnp.finfo(value.dtype).eps), self._coarsest)
        return _moved(value, share, np.random.default_rng([20, index]))


def _moved(value: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Each element more or less by `share` of itself, at random."""
    moved = np.empty_like(value, order="C")
    bits = np.frombuffer(rng.bytes(-(-value.size // 8)), np.uint8)
    up = np.unpackbits(bits, count=value.size).view(np.bool_)

    def move(old: np.ndarray, up: np.ndarray, new: np.ndarray) -> None:
        new[:] = (norms.wide(old) * np.where(up, 1 + share, 1 - share)).astype(old.dtype)

    chunked_map(move, value, up, moved)
    return moved


Run = Callable[[Sequence[np.ndarray], Sequence[Sequence[np.ndarray]]], Trajectory]
"""(state, batches) -> the trajectory of a program."""


def reference(
    initial: Sequence[np.ndarray],
    float_types: frozenset[str],
    batches: Sequence[Sequence[np.ndarray]],
    run: Run,
    room_bytes: int | None = None,
) -> Reference:
    """Runs the reference as it is, and from starts perturbed by little and by more.

    Args:
      initial: the state leaves.
      float_types: what the reference computes in, as `compat.executable.float_types` has it.
      batches: one batch for each step.
      run: the reference program.
      room_bytes: host memory for other states than the initial one; None for as much as they take.
    """
    groups = _groups(initial, room_bytes)
    compared = sorted(i for group in groups for i in group)
    coarse = _program_tolerance(float_types)
    fine = coarse == _TOLERANCE

    def perturbed(units: float) -> tuple[Trajectory, Perturbed]:
        """The trajectory from a perturbed start, and the start."""
        start = Perturbed(initial, float_types, units)
        return run(start, [Perturbed(batch, float_types, units) for batch in batches]), start

    def last_state() -> tuple[dict[int, np.ndarray], tuple[tuple[np.ndarray, ...], ...]]:
        trajectory = run(initial, batches)
        first = tuple(tuple(copies[0] for copies in step) for step in trajectory.metrics)
        return {i: trajectory.state[i][0] for i in compared}, first

    state, metrics = last_state()

    def change(i: int) -> _Change:
        return _Change(state[i], initial[i])

    def noises() -> tuple[dict[int, float], tuple[tuple[float, ...], ...]]:
        """What one unit in the last place does to each leaf, and to each metric by step."""
        near, start = perturbed(1.0)
        found = {
            i: NOISE_FACTOR * _apart(_Change(near.state[i][0], start[i]), change(i))
            for i in compared
        }
        return found, tuple(
            tuple(NOISE_FACTOR * norms.distance(a[0], b) for a, b in zip(x, y, strict=True))
            for x, y in zip(near.metrics, metrics, strict=True)
        )

    def jumped(group: Sequence[int]) -> dict[int, np.ndarray]:
        """Adds the jumps of some leaves to their slack; the perturbed leaves, for `kinked`."""
        far, start = perturbed(_PROBE if fine else _COARSE_PROBE)
        kept = {}
        for i in group:
            new = far.state[i][0]
            slack[i] += _jumps(_Change(new, start[i]), change(i))
            if fine and change(i).is_float:
                kept[i] = new
        return kept

    def kinked(far: dict[int, np.ndarray]) -> None:
        """Adds the kinks of some leaves to their slack."""
        part, start = perturbed(_PROBE * _PART)
        far_start = Perturbed(initial, float_types, _PROBE)
        for i in far:
            moved = _Change(far[i], far_start[i])
            slack[i] += _kinks(_Change(part.state[i][0], start[i]), moved, change(i), noise[i])

    noise, metrics_slack = noises()
    slack = dict(noise)
    for group in groups:
        far = jumped(group)
        if fine:
            kinked(far)
    return Reference(
        steps=len(batches),
        initial=tuple(initial),
        state=tuple(state.get(i) for i in range(len(initial))),
        metrics=metrics,
        state_slack=tuple(slack.get(i, 0.0) for i in range(len(initial))),
        metrics_slack=metrics_slack,
        coarse=coarse,
    )


def _groups(leaves: Sequence[np.ndarray], room_bytes: int | None) -> list[list[int]]:
    """The leaves to compare, in groups for which a second state fits in the room.

    All leaves are one group where there is room for two states. Where there is none for one, the
    smallest leaves are compared.
    """
    if room_bytes is None:
        return [list(range(len(leaves)))]
    room = room_bytes
    chosen: list[int] = []
    for i in sorted(range(len(leaves)), key=lambda i: leaves[i].nbytes):
        if (1 + _WORKING) * leaves[i].nbytes > room:
            break
        room -= leaves[i].nbytes
        chosen.append(i)
    largest = leaves[chosen[-1]].nbytes if chosen else 0
    room = max(room - _WORKING * largest, largest)
    groups: list[list[int]] = []
    used = room
    for i in sorted(chosen):
        if used + leaves[i].nbytes > room or not groups:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += leaves[i].nbytes
    return groups


class _Change(NamedTuple):
    """By what a leaf changed: the two arrays whose difference it is, which is twice as wide."""

    new: np.ndarray
    old: np.ndarray

    @property
    def is_float(self) -> bool:
        return bool(jnp.issubdtype(self.new.dtype, jnp.inexact))


def _apart(moved: _Change, change: _Change) -> float:
    """L2 norm of the difference of two changes; the share of integers that came out otherwise."""
    if not change.is_float:
        return norms.distance(moved.new, change.new)
    return norms.norm(norms.second, *moved, *change)


def _jumps(moved: _Change, change: _Change) -> float:
    """What jumping elements may add to the L2 norm of a leaf; 0 if none jumped."""
    if not change.is_float:
        return 0.0

    largest = norms.largest(norms.minus, *change)
    jump = norms.largest(norms.second, *moved, *change)
    return _JUMP_FACTOR * largest if jump > _JUMP * largest else 0.0


def _kinks(part: _Change, moved: _Change, change: _Change, noise: float) -> float:
    """What elements on the other side of a kink may add to a leaf's L2 norm; 0 if it is smooth.

    Args:
      part, moved: the leaf's change from starts perturbed by `_PART` of the probe and by all of it.
      noise: what rounding explains; that of these two runs, the first's enlarged, is as much again.
    """
    if not change.is_float:
        return 0.0

    def bent(*pieces: np.ndarray) -> np.ndarray:
        of_part, of_all, of_none = pieces[:2], pieces[2:4], pieces[4:]
        return norms.minus(
            norms.second(*of_all, *of_none), norms.second(*of_part, *of_none) / _PART
        )

    bend = norms.norm(bent, *part, *moved, *change)
    return math.sqrt(_ROUNDING / _PROBE) * bend if bend > 2 * noise else 0.0


def compare(
    candidate: Trajectory,
    against: Reference,
    state_paths: Sequence[str],
    metric_paths: Sequence[str],
) -> NumericsReport | Failure:
    """Compares leaf by leaf.

    Returns:
      A report, also when leaves are off; a Failure of kind numerics where the candidate has values
      that are not finite and the reference has not, or where both blew up.
    """
    numbers = any(_has_numbers(leaf) for leaf in against.initial)
    state, metrics, unchecked = [], [], []
    for i, (path, expected, start, slack) in enumerate(
        zip(state_paths, against.state, against.initial, against.state_slack, strict=True)
    ):
        if expected is None:
            unchecked.append(path)
            continue
        copies = candidate.state[i]
        if (broken := _broken(path, copies, expected, start if numbers else None)) is not None:
            return broken
        state.append(_leaf(path, copies, expected, start, slack, against.coarse))
    for where, copies, expected, slack in _by_step(
        metric_paths, candidate.metrics, against.metrics, against.metrics_slack
    ):
        if (broken := _broken(where, copies, expected, None)) is not None:
            return broken
        metrics.append(_leaf(where, copies, expected, None, slack, against.coarse))
    return NumericsReport(
        steps=against.steps,
        state=tuple(state),
        metrics=tuple(metrics),
        unchecked=tuple(unchecked),
    )


def _by_step(
    paths: Sequence[str],
    got: Sequence[Sequence[Copies]],
    expected: Sequence[Sequence[np.ndarray]],
    slacks: Sequence[Sequence[float]],
) -> Iterable[tuple[str, Copies, np.ndarray, float]]:
    """Each metric of each step: its path with the step, and what belongs to it."""
    for step, rows in enumerate(zip(got, expected, slacks, strict=True), 1):
        for path, copies, right, slack in zip(paths, *rows, strict=True):
            yield f"{path} at step {step}", copies, right, slack


def _leaf(
    path: str,
    copies: Copies,
    expected: np.ndarray,
    start: np.ndarray | None,
    slack: float,
    coarse: float,
) -> LeafError:
    """The error of one leaf: of its change from `start`, or of its value where that is None."""
    distance = max(norms.distance(copy, expected) for copy in copies)
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return LeafError(
            path=path,
            error=distance,
            tolerance=min(1.0, slack),
            noisy=slack > 0,
            copies=len(copies),
        )
    tolerance = max(coarse, _leaf_tolerance(expected.dtype))
    change = (
        norms.norm(norms.wide, expected)
        if start is None
        else norms.norm(norms.minus, expected, start)
    )
    scale = change + slack / tolerance
    if scale == 0:  # nothing may move: any difference is measured against the values themselves
        eps = float(jnp.finfo(expected.dtype).eps)
        scale = eps * norms.norm(norms.wide, expected) + _TINY
    return LeafError(
        path=path,
        error=min(distance / scale, float(np.finfo(np.float64).max)),
        tolerance=tolerance,
        noisy=slack > _NOISY * change and slack > 0,
        copies=len(copies),
    )


def not_finite(
    program: Trajectory,
    initial: Sequence[np.ndarray],
    state_paths: Sequence[str],
    metric_paths: Sequence[str],
) -> Failure | None:
    """The failure that says where a program's values are not finite; None if all are well.

    Values that were not finite before the first step and still are the same (a best loss of inf,
    a mask of -inf, an evaluation of NaN that is yet to come) are no failure, unless the initial
    state has no number anywhere: nothing of it could be compared.
    """
    numbers = any(_has_numbers(leaf) for leaf in initial)
    for i, (path, start) in enumerate(zip(state_paths, initial, strict=True)):
        copies = program.state[i]
        broken = _broken(path, copies, copies[0], start if numbers else None, alone=True)
        if broken is not None:
            return broken
    for step, got in enumerate(program.metrics, 1):
        for path, copies in zip(metric_paths, got, strict=True):
            broken = _broken(f"{path} at step {step}", copies, copies[0], None, alone=True)
            if broken is not None:
                return broken
    return None


def _broken(
    path: str,
    copies: Copies,
    expected: np.ndarray,
    start: np.ndarray | None,
    alone: bool = False,
) -> Failure | None:
    """The failure that a leaf or a metric is not finite where it should be.

    Args:
      start: its value before the first step: what was not finite there may stay so. None for
        metrics, and in a state without numbers.
      alone: there is no reference, `expected` is the program's own.
    """
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return None
    known = [] if start is None else [start]
    for copy in copies:
        pieces = chunked_map(_blown, copy, expected, *known)
        bad, blown = (sum(piece[k] for piece in pieces) for k in (0, 1))
        if bad:
            both = " in the reference too" if blown and not alone else ""
            message = f"{path}: {bad} of {copy.size} values are not finite{both}"
            return Failure(stage=Stage.PROFILE, kind=Kind.NUMERICS, message=message)
    return None


def _has_numbers(leaf: np.ndarray) -> bool:
    """Whether a leaf of floats has any that is one, or infinite."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact)) and not bool(np.isnan(leaf).all())


def _blown(
    copy: np.ndarray, expected: np.ndarray, start: np.ndarray | None = None
) -> tuple[int, int]:
    """How many values are not finite that should be; how many of them not in the reference."""
    bad = ~np.isfinite(copy)
    blown = bad & ~np.isfinite(expected)
    if start is not None:
        kept = _equal(expected, start)
        bad, blown = bad & ~(kept & _equal(copy, start)), blown & ~kept
    return int(bad.sum()), int(blown.sum())


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Element by element; what is no number equals what is none."""
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _leaf_tolerance(dtype: np.dtype) -> float:
    bits = jnp.finfo(dtype).bits
    if bits <= 8:
        return _EIGHT_BIT_TOLERANCE
    return _COARSE_TOLERANCE if bits <= 16 else _TOLERANCE


def _program_tolerance(float_types: frozenset[str]) -> float:
    if any(name.startswith("f8") for name in float_types):
        return _EIGHT_BIT_TOLERANCE
    if float_types.intersection(_COARSE):
        return _COARSE_TOLERANCE
    return _CUT_TOLERANCE if "tf32" in float_types else _TOLERANCE


def _unit(float_types: frozenset[str]) -> float:
    """The spacing of numbers near 1 in the coarsest short type of the program, 0 without one."""
    units = {"bf16": 2.0**-7, "f16": 2.0**-10, "tf32": 2.0**-10}
    return max((unit for name, unit in units.items() if name in float_types), default=0.0)
