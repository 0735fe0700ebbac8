"""A batch is refused, or exact, whatever batches of the same graph came before it."""

import pytest
from late_programs import MIXING, MOVING, late_program
from law_checks import assert_letters


@pytest.mark.parametrize("name", MIXING)
def test_mixing_that_begins_in_the_third_batch_is_refused_there(name):
    assert_letters(late_program(name, "EERERR"))


@pytest.mark.parametrize("name", MOVING)
def test_rows_that_come_in_another_order_from_the_third_batch_on_are_exact(name):
    assert_letters(late_program(name, "EEEEEE"))
