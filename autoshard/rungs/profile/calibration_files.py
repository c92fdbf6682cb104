"""Calibrations kept in files: a target is calibrated once.

A file has what it was measured on, the date and a digest. A damaged file is measured anew. A file
of another revision stays as it is, and one line in the log names it.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import warnings
from collections.abc import Callable

import jax
import numpy as np

from autoshard.compat.jaxpr.contexts import without_mesh
from autoshard.compat.xla.compilers import compiler_version
from autoshard.compat.xla.threads import threads_asked
from autoshard.errors import CalibrationError
from autoshard.records.atomic_files import write_atomically
from autoshard.rungs.profile import calibration as calibrate
from autoshard.target.catalogued import catalogued
from autoshard.target.cost import Constants, CostModel
from autoshard.target.host import cores, processor
from autoshard.target.live_chips import chip_of_kind
from autoshard.target.network import Network
from autoshard.target.target import Target

_log = logging.getLogger("autoshard")


@without_mesh()
def cost_model(
    target: Target,
    calibration: str | os.PathLike[str] | None = None,
    on_measuring: Callable[[], None] = lambda: None,
) -> CostModel:
    """What kernels and collectives cost on a target.

    Args:
      calibration: folder that keeps calibrations of live targets; default in the user's cache.
      on_measuring: called before a live target without a calibration is measured.
    """
    if target.topology is not None:
        return CostModel(catalogued(target.topology), network=Network(target.topology))
    return CostModel(calibrated(target, calibration, on_measuring))


def calibrated(
    target: Target,
    folder: str | os.PathLike[str] | None = None,
    on_measuring: Callable[[], None] = lambda: None,
) -> Constants:
    """The constants of a target, from the file of an earlier calibration if there is one.

    Args:
      folder: where calibrations are kept; default `~/.cache/autoshard`, and nowhere where there is
        no home.
      on_measuring: called before the target is measured, where there is no such file.

    Raises:
      CalibrationError: the file has constants of another version of autoshard; it stays as it is.
    """
    keep = pathlib.Path(folder) if folder is not None else _default_folder()
    chip = None if target.shared_host else chip_of_kind(target.device_kind)
    identity = "|".join(
        [
            str(calibrate.REVISION),
            target.platform,
            target.device_kind,
            str(target.device_count),
            jax.__version__,
            " ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),  # they make other programs
            f"{processor()}|{cores()}|{np.__version__}",
            chip.digest if chip else "",
            *([compiler_version("tpu") or ""] if target.platform == "tpu" else []),
            *([f"{threads_asked()} threads"] if threads_asked() and target.shared_host else []),
        ]
    )
    if keep is None:
        on_measuring()
        return calibrate.calibrate(target)
    path = keep / f"calibration-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    if (found := _kept(path)) is not None:
        return found
    for other in _of_other_revisions(keep, identity):
        _log.warning(
            "%s was written by another version of autoshard: it stays as it is, and the target is"
            " calibrated again",
            other,
        )
    on_measuring()
    constants = calibrate.calibrate(target)
    # Who measured at the same time and was done before has the constants of all.
    if (found := _kept(path)) is not None:
        return found
    data = {
        "identity": identity,
        "date": constants.date,
        "digest": constants.digest,
        "constants": constants.to_json(),
    }
    try:
        keep.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(data, indent=1).encode())
    except OSError as error:
        _warn_once(f"the calibration cannot be kept in {keep} ({error})")
    return constants


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"{reason}: each search calibrates this machine again; give search(calibration=) a folder"
        " that can be written",
        stacklevel=3,
    )


def _default_folder() -> pathlib.Path | None:
    """In the user's home; None where a process has none, as in containers of any user's number."""
    try:
        return pathlib.Path.home() / ".cache/autoshard"
    except RuntimeError:
        return None


def _kept(path: pathlib.Path) -> Constants | None:
    """The constants in a file; None where there is none, or it is damaged.

    Raises:
      CalibrationError: they are those of another version of autoshard.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        constants = Constants.from_json(data["constants"])
        return constants if data["digest"] == constants.digest else None
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _of_other_revisions(folder: pathlib.Path, identity: str) -> list[pathlib.Path]:
    """The calibrations of the same target that differ in their revision alone."""
    _, target = identity.split("|", 1)
    found = []
    for path in sorted(folder.glob("calibration-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            revision, other = json.loads(path.read_text(encoding="utf-8"))["identity"].split("|", 1)
            if other == target and revision != str(calibrate.REVISION):
                found.append(path)
    return found
