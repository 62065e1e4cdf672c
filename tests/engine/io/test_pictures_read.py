"""Pictures as people have them: held upright, with transparency, deep, small, in folders that systems write into."""

import ast
import math

import numpy as np
import pytest
import torch
from diffusers.utils import load_image
from PIL import Image
from vitrine.engine.activations.picture_latents import picture_sizes, to_pixels
from vitrine.engine.activations.ranked_pictures import read_masks
from vitrine.engine.activations.segmentation import ProbeSettings, fit_probe
from vitrine.engine.copies import pictures_of
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.picture_files import Stored, open_picture, open_rgb, pictures_in, stored, turned, turned_point
from vitrine.engine.pipelines import w2w_training
from vitrine.engine.pipelines.conventions import soft_masks
from vitrine.evidence.verify.spair import read_spair
from vitrine_tests.sources import ROOT, nodes, paths, text

COLOURS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def held(path, orientation, table=COLOURS, **how):
    """A picture as a phone saves it: pixels as the sensor lay, and a note which way is up."""
    picture = Image.fromarray(table)
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture.save(path, exif=exif, **how)
    return path


def test_pictures_are_upright_as_load_image_gives_them(tmp_path):
    for orientation in range(1, 9):
        path = held(tmp_path / f"{orientation}.png", orientation)
        wanted = np.array(load_image(str(path)))
        assert np.array_equal(np.array(open_picture(path)), wanted)
        assert np.array_equal(np.array(open_rgb(path)), wanted)
        assert np.array_equal(turned(COLOURS, orientation), wanted)
        assert stored(path) == Stored(9, 6, orientation) and stored(path).size == wanted.shape[:2]
        with Image.open(path) as opened:  # also one that the caller has opened
            assert picture_sizes(opened) == [wanted.shape[:2]]
            assert torch.equal(to_pixels(opened, None, 1), to_pixels(wanted, None, 1))


def test_a_training_picture_as_a_phone_saves_it(tmp_path):
    """Copy checks and trainings read it as they read the same picture saved upright."""
    for orientation in range(1, 9):
        phone, plain = held(tmp_path / "phone.png", orientation), tmp_path / "plain.png"
        Image.fromarray(turned(COLOURS, orientation)).save(plain)
        pictures, _ = pictures_of(tmp_path)
        first, second = (pictures.cropped((4, 6)).read(number) for number in (0, 1))
        assert pictures.names == ["phone.png", "plain.png"] and torch.equal(first, second)
        assert torch.equal(w2w_training._read(phone, 4), w2w_training._read(plain, 4))


def test_masks_turn_with_their_pictures(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "m").mkdir()
    labels = (COLOURS[..., 0] > 127).astype(np.uint8)
    for orientation in range(1, 9):
        held(tmp_path / "p" / f"{orientation}.png", orientation)
        Image.fromarray(labels).save(tmp_path / "m" / f"{orientation}.png")
    np.save(tmp_path / "m" / "6.npy", labels)
    (tmp_path / "m" / "6.png").unlink()
    Image.fromarray(turned(labels, 8)).save(tmp_path / "m" / "8.png")  # drawn on the upright picture
    held(tmp_path / "m" / "5.png", 5, labels)
    folder = read_masks(tmp_path / "p", tmp_path / "m", 2)
    for number, orientation in enumerate(range(1, 9)):
        assert np.array_equal(folder.mask(number).numpy(), turned(labels, orientation))
        folder.read([number], 8)


def test_spair_points_turn_with_their_pictures(tmp_path):
    (tmp_path / "JPEGImages" / "cat").mkdir(parents=True)
    (tmp_path / "PairAnnotation" / "test").mkdir(parents=True)
    for orientation in range(1, 9):
        held(tmp_path / "JPEGImages" / "cat" / f"{orientation}.png", orientation)
        end = '"{0}_imsize": [9, 6, 3], "{0}_bndbox": [1, 2, 5, 4], "{0}_kps": [[7, 1], [0, 5]], "{0}_imname": "%d.png"'
        text = ", ".join(end.format(side) % orientation for side in ("src", "trg"))
        name = tmp_path / "PairAnnotation" / "test" / f"{orientation}.json"
        name.write_text(f'{{"category": "cat", {text}}}')
    (tmp_path / "PairAnnotation" / "test" / "._1.json").write_text("{}")
    for pair in read_spair(tmp_path):
        seen = np.array(open_picture(pair.source))
        assert pair.source_size == (seen.shape[1], seen.shape[0])
        for (x, y), (column, row) in zip(pair.source_points.int().tolist(), ((7, 1), (0, 5)), strict=True):
            assert np.array_equal(seen[y, x], COLOURS[row, column])
        left, top, right, bottom = pair.source_box
        assert left < right and top < bottom
        corners = {tuple(seen[int(y), int(x)]) for x in (left, right) for y in (top, bottom)}
        assert corners == {tuple(COLOURS[y, x]) for x in (1, 5) for y in (2, 4)}
    bad = '{"category": "cat", "src_imsize": [9, 6, 3], "src_bndbox": [1, 2, 5, 4], "src_kps": [[1, 1]], '
    (tmp_path / "PairAnnotation" / "test" / "x.json").write_text(bad + '"src_imname": "../../x.png"}')
    with pytest.raises(VitrineError, match=r"x\.json"):
        read_spair(tmp_path)


def test_depths_and_modes(tmp_path):
    grey = np.linspace(0, 1, 54, dtype=np.float32).reshape(6, 9)
    Image.fromarray(grey).save(tmp_path / "float.tif")
    assert torch.allclose(
        to_pixels(open_picture(tmp_path / "float.tif"), None, 1)[0, 1], torch.from_numpy(grey) * 2 - 1
    )
    Image.fromarray((grey * 65535).astype(np.uint16)).save(tmp_path / "deep.png")
    deep = to_pixels(open_picture(tmp_path / "deep.png"), None, 1)[0, 1]
    assert torch.allclose(deep, torch.from_numpy(grey) * 2 - 1, atol=4e-5)
    for name in ("float.tif", "deep.png"):
        assert np.abs(np.array(open_rgb(tmp_path / name))[..., 0] / 255 - grey).max() <= 0.5001 / 255
    plain = Image.fromarray(COLOURS)
    clear = plain.copy()
    clear.putalpha(Image.fromarray(COLOURS[..., 0]))
    palette = plain.quantize(8)
    kinds = {
        "cmyk.jpg": plain.convert("CMYK"),
        "palette.png": palette,
        "alpha.png": clear,
        "one.png": plain.convert("1"),
        "grey.png": plain.convert("LA"),
        "webp.webp": clear,
        "bmp.BMP": plain,
    }
    for name, picture in kinds.items():
        picture.save(tmp_path / name)
        opened = open_picture(tmp_path / name)
        assert opened.mode == "RGB" and np.array_equal(np.array(opened), np.array(load_image(str(tmp_path / name)))), (
            name
        )
    palette.save(tmp_path / "palette.png", transparency=bytes(range(8)))
    assert np.array_equal(np.array(open_picture(tmp_path / "palette.png")), np.array(palette.convert("RGB")))


def test_what_has_no_largest_value_is_refused_with_its_size(tmp_path):
    for name, table in {
        "bytes.tif": np.full((6, 9), 200, np.float32),
        "nan.tif": np.full((6, 9), np.nan, np.float32),
        "wide.tif": np.full((6, 9), 70_000, np.int32),
        "below.tif": np.full((6, 9), -1, np.int32),
    }.items():
        Image.fromarray(table).save(tmp_path / name)
        for reader in (open_picture, open_rgb):
            with pytest.raises(VitrineError, match=rf"{name}.*9 x 6"):
                reader(tmp_path / name)
    for size in (0, -8, "64", (64, 0), (8, 8, 8), True, 1.5):
        with pytest.raises(VitrineError, match="size"):
            to_pixels(COLOURS, size)
    assert to_pixels(COLOURS, (8, 16)).shape[-2:] == (8, 16) and to_pixels(COLOURS, np.int64(8)).shape[-1] == 8


def test_folders_hold_what_people_put_there(tmp_path):
    for name in ("b.JPG", "a.png", "._a.png", ".DS_Store", "notes.txt"):
        (tmp_path / name).touch()
    for folder in (".ipynb_checkpoints", "__MACOSX", "inner"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "c.PNG").touch()
    (tmp_path / "inner" / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "folder.png").mkdir()
    assert [p.name for p in pictures_in(tmp_path)] == ["a.png", "b.JPG"]
    deep = [p.relative_to(tmp_path).as_posix() for p in pictures_in(tmp_path, deep=True)]
    assert deep == ["a.png", "b.JPG", "inner/c.PNG"]
    assert pictures_in(tmp_path / "nowhere") == []


def test_there_is_one_reader():
    """Nothing else opens a picture's file: charts open what they have drawn themselves, in memory."""
    allowed = {"engine/io/picture_files.py", "evidence/charts.py"}
    for path in (path for path in paths() if "Image" in text(path)):
        calls = [n.func for n in nodes(path) if isinstance(n, ast.Call)]
        opens = [
            c for c in calls if isinstance(c, ast.Attribute) and c.attr == "open" and ast.unparse(c.value) == "Image"
        ]
        assert not opens or str(path.relative_to(ROOT)) in allowed, path


def test_a_point_is_where_its_pixel_is():
    for orientation in range(1, 9):
        seen = turned(COLOURS, orientation)
        for x, y in ((0, 0), (8, 5), (3, 1)):
            column, row = turned_point(x, y, Stored(9, 6, orientation))
            assert np.array_equal(seen[int(row), int(column)], COLOURS[y, x])


# --- tensors and arrays of other kinds ------------------------------------------------------------------------------
def test_arrays_and_tensors_of_other_types():
    picture = np.linspace(0, 1, 8 * 8 * 3, dtype=np.float32).reshape(8, 8, 3)
    wanted, tensor = to_pixels(picture), torch.from_numpy(picture).movedim(-1, 0)
    assert torch.equal(to_pixels(picture.astype(">f4")), wanted)
    eight = to_pixels(tensor.to(torch.float8_e4m3fn))
    assert eight.dtype == torch.float32 and float((eight - wanted).abs().max()) < 0.1
    for strange in (picture.astype(object), picture.astype(str), tensor > 0.5, tensor * math.nan, tensor.long()):
        with pytest.raises(VitrineError, match="image values"):
            to_pixels(strange)


@pytest.mark.parametrize("kind", [torch.uint8, torch.bool, torch.int64, torch.float32, torch.float16])
def test_labels_of_any_type_are_whole_numbers(kind):
    features, masks = torch.randn(1, 3, 4, 4), torch.zeros(1, 8, 8, dtype=kind)
    masks[:, :4] = 1
    assert fit_probe(features, masks, settings=ProbeSettings(steps=1)).scores(features, (8, 8)).shape[1] == 2
    strange = [masks * math.nan, masks * 0.7] if kind.is_floating_point else []
    strange += [masks * 2**40] if kind == torch.int64 else []
    for other in strange:
        with pytest.raises(VitrineError, match="labels: given .*whole numbers"):
            fit_probe(features, other)


def test_masks_are_from_0_to_1_or_refused():
    mask = torch.ones(4, 4)
    assert torch.equal(soft_masks(mask.byte() * 255, (1, 4, 4)), mask[None])
    assert torch.equal(soft_masks(mask.to(torch.float8_e4m3fn), (1, 4, 4)), mask[None])
    for strange in (255 * mask, -mask, mask * math.nan, mask.long() * 255, None, "mask", mask.to(torch.complex64)):
        with pytest.raises(VitrineError, match="masks: given"):
            soft_masks(strange, (1, 4, 4))
