from speculator.tables import markdown_table


def test_a_cell_cannot_break_its_row():
    text = markdown_table(["name", "", "n"], [["a|b", "two\nlines", 3], ["", None, "x"]])
    assert text.splitlines() == ["| name |  | n |", "|---|---|---|", r"| a\|b | two lines | 3 |", "|  | None | x |"]
