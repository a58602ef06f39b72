import pytest
import torch

from hpctrain.recipes.augment import jitter_colours, move_and_scale, shift_pixels


def pictures(count: int = 8, side: int = 12) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def test_nothing_changes_when_all_amounts_are_zero() -> None:
    picture = pictures()
    torch.testing.assert_close(move_and_scale(picture, 0, 0, fill=1), picture)
    torch.testing.assert_close(shift_pixels(picture, 0, fill=1), picture)
    torch.testing.assert_close(jitter_colours(picture, 0, 0, 0, 0), picture)


def test_shift_pixels_cuts_a_window_from_the_padded_picture() -> None:
    torch.manual_seed(0)
    picture, pixels = pictures(), 2
    shifted = shift_pixels(picture, pixels, fill=0.5)
    padded = torch.nn.functional.pad(picture, (pixels,) * 4, value=0.5)
    places = set()
    for row in range(len(picture)):
        matches = [
            (top, left)
            for top in range(2 * pixels + 1)
            for left in range(2 * pixels + 1)
            if torch.equal(padded[row, :, top : top + 12, left : left + 12], shifted[row])
        ]
        assert len(matches) == 1
        places.update(matches)
    assert len(places) > 1


def test_moved_pictures_are_filled_at_the_edges() -> None:
    torch.manual_seed(0)
    moved = move_and_scale(torch.zeros(64, 1, 8, 8), shift=0.5, scale=0.3, fill=1)
    assert moved.min() >= 0
    assert moved.max() == 1
    blank = move_and_scale(torch.ones(64, 1, 8, 8), shift=0.5, scale=0.3, fill=1)
    torch.testing.assert_close(blank, torch.ones_like(blank))


def test_grey_leaves_no_colour_and_invert_the_negative() -> None:
    torch.manual_seed(0)
    picture = pictures()
    grey = jitter_colours(picture, mix=0.3, gain=0, grey=1, invert=0)
    torch.testing.assert_close(grey[:, 0], grey[:, 1])
    torch.testing.assert_close(grey[:, 0], grey[:, 2])
    torch.testing.assert_close(jitter_colours(picture, mix=0, gain=0, grey=0, invert=1), 1 - picture)


def test_mixed_colours_stay_means_of_the_channels() -> None:
    torch.manual_seed(0)
    picture = pictures()
    mixed = jitter_colours(picture, mix=0.5, gain=0, grey=0, invert=0)
    assert not torch.allclose(mixed, picture, atol=0.05)
    assert (mixed <= picture.amax(1, keepdim=True) + 1e-6).all()
    assert (mixed >= picture.amin(1, keepdim=True) - 1e-6).all()


def test_each_picture_gets_its_own_change_and_the_same_for_the_same_seed() -> None:
    picture = pictures()[:1].expand(4, -1, -1, -1)

    def augmented(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return jitter_colours(move_and_scale(picture, 0.2, 0.2, fill=1), 0.3, 0.3, 0.1, 0.1)

    assert len({row.numpy().tobytes() for row in augmented(1)}) == 4
    assert torch.equal(augmented(1), augmented(1))
    assert not torch.equal(augmented(1), augmented(2))


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_invert_changes_about_its_share(share: float) -> None:
    torch.manual_seed(0)
    inverted = jitter_colours(torch.zeros(400, 3, 1, 1), mix=0, gain=0, grey=0, invert=share)
    assert abs(float(inverted.mean()) - share) < 0.1
