"""Steps of kinds that the zoo has not are judged, and compute sharded what they compute whole."""

import pytest

from tests.analysed import analyse, baseline, judge, run, run_plain, worst_error
from tests.other_steps import OTHERS

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_is_judged_and_computes_the_same(name: str) -> None:
    of = analyse(OTHERS[name]())
    for layout in (baseline(of.space, "tensor parallel"), baseline(of.space, "FSDP")):
        assert judge(of, layout).time_s > 0
    assert worst_error(of, run(of, layout), run_plain(of)) < TOLERANCE
