import pytest
import torch

from optimum_neuronal.formats.codebooks import BITS, TABLES, check_bits, check_table, magnitudes, nearest_magnitude


def test_known_tables_are_such_as_a_file_may_hold():
    for bits in BITS:
        check_bits(bits)
        for table in TABLES[bits]:
            check_table(table, bits)
            assert magnitudes(table)[-1] == 127 and len(magnitudes(table)) == (127 if bits == 8 else 2 ** (bits - 1))


def test_other_bits_and_tables_are_refused():
    for bits in (0, 1, 5, 16, -4, True, 4.0, "4", None):
        with pytest.raises(ValueError, match="expected one of 8, 4, 3, 2"):
            check_bits(bits)
    for table in (
        (-127, -42, 42),
        (-127, -42, 0, 127),
        (-127, -42, 41, 127),
        (42, 127, -127, -42),
        (-128, -1, 1, 128),
    ):
        with pytest.raises(ValueError, match="its table"):
            check_table(table, 2)


def test_nearest_levels():
    ratios = torch.tensor([0.0, 84.0, 85.0, 127.0, 1000.0])
    assert nearest_magnitude(ratios, [42, 127]).tolist() == [42, 42, 127, 127, 127]
    assert nearest_magnitude(torch.tensor([torch.inf, 84.4]), [42, 127]).tolist() == [127, 42]
    assert nearest_magnitude(ratios / 100, magnitudes(())).tolist() == [1, 1, 1, 1, 10]
    assert nearest_magnitude(ratios, magnitudes(())).tolist() == [1, 84, 85, 127, 127]
