"""Tables of test cases as text: => separates cells, ;; separates rows, blanks around a cell are dropped."""


def cells(text: str) -> list[str]:
    """Return the cells of a table with one column."""
    return [cell.strip() for cell in text.split(";;")]


def rows(text: str) -> list[tuple[str, ...]]:
    """Return the rows of a table with several columns."""
    return [tuple(cell.strip() for cell in row.split("=>")) for row in text.split(";;")]
