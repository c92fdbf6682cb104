"""The errors autoshard raises: what was got, what was expected, where, and what to do next."""


class AutoshardError(Exception):
    """The root of every error that autoshard raises itself."""


class WorkloadError(AutoshardError):
    """A model_fn, step, init or batch that cannot be searched."""


class LayoutError(AutoshardError):
    """A layout that does not fit the program or the target, or a rule that cannot be read."""


class TargetError(AutoshardError):
    """A `mesh` argument that names no usable devices, or contradictory facts about them."""


class JournalError(AutoshardError):
    """A journal that is foreign, newer than this version, in use, or damaged before its end."""


class CalibrationError(AutoshardError):
    """Constants of a target that another version of autoshard wrote."""


class PlanError(AutoshardError):
    """A plan file that cannot be read, or that does not belong to this model and target.

    Attributes:
      differences: one line for each field that differs, `field: recorded X, got Y`.
    """

    def __init__(self, message: str, differences: tuple[str, ...] = ()):
        super().__init__("\n".join([message, *(f"  {line}" for line in differences)]))
        self.differences = differences


class NoPlanError(AutoshardError):
    """No candidate can be returned: none fits, or every one failed."""


class PartitionerRefused(AutoshardError):
    """The partitioner does not take a layout."""


class LoweringError(AutoshardError):
    """JAX cannot lower a program for a platform; JAX's own error is the cause."""


class WorkerError(AutoshardError):
    """A worker process that died, hung or answered nonsense."""


class HloError(AutoshardError):
    """HLO text that this version of autoshard cannot read, or a collective that it cannot price."""
