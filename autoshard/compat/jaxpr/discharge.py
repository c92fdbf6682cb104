"""Arrays that a step changes in place (`jax.new_ref`), written out as the values they have."""

from autoshard.compat.jaxpr.jaxprs import ClosedJaxpr, equations


def written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The step as XLA gets it: what reads and writes a reference takes and returns its value.

    A value that goes from one operation to the next by way of a reference is on no edge of a jaxpr.
    """
    variables = [v for eqn in equations(closed.jaxpr) for v in eqn.outvars]
    if not any(hasattr(v.aval, "inner_aval") for v in variables):
        return closed
    from jax._src.state.discharge import discharge_state  # no public name (0.10, 0.12)

    return discharge_state(closed)
