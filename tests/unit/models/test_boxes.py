"""Operations on boxes."""

from rl.models.boxes import extent, moved, overlap, relative, volume, whole


def test_overlap_of_boxes():
    assert overlap(((0, 4), (0, 3)), ((2, 6), (1, 9))) == ((2, 4), (1, 3))
    assert overlap(((0, 2), (0, 3)), ((2, 4), (0, 3))) is None  # they only touch


def test_boxes_move_with_their_frame():
    box, outer = ((5, 7), (2, 3)), ((4, 8), (0, 3))
    assert extent(box) == (2, 1) and volume(box) == 2
    assert relative(box, outer) == ((1, 3), (2, 3))
    assert moved(box, outer, ((10, 14), (20, 23))) == ((11, 13), (22, 23))
    assert relative(box, whole((9, 9))) == box
