"""The main properties again, on new random examples each time (`scripts/test --long`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.base.grids import test_plan, test_plan_proof, test_sharding

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

PROPERTIES = {
    "grid to grid": test_plan.test_grid_to_grid_moves_every_element_once,
    "strided target": test_plan.test_a_strided_target_gets_its_box,
    "proofs": test_plan_proof.test_every_target_is_proved_and_checked,
    "overlaps": test_plan_proof.test_two_boxes_in_one_buffer_overlap_or_do_not,
    "any layout to any other": test_sharding.test_any_layout_loads_into_any_other,
}


@pytest.mark.parametrize("name", list(PROPERTIES))
@given(data=st.data())
def test_property(name: str, data: st.DataObject) -> None:
    PROPERTIES[name].hypothesis.inner_test(data)  # type: ignore[attr-defined]


@given(case=test_sharding.cases())
def test_local_tensors_are_torchs(case: test_sharding.Case) -> None:
    test_sharding.test_local_tensors_are_torchs.hypothesis.inner_test(case)  # type: ignore[attr-defined]
