"""Each loader on small files of its format, and the one line that a missing or malformed file ends in."""

import gzip
import shutil

import numpy as np
import pytest
import torch
from data_files import ADULT_ROW, idx_bytes, write_adult, write_cifar, write_images, write_imdb, write_mnist

from ghostclip import datasets
from ghostclip.datasets import DataError
from ghostclip.datasets.images import DIGITS, RECORD
from ghostclip.datasets.imdb import PADDING, UNKNOWN, read_vocabulary
from ghostclip.errors import GhostClipError


def fails(name: str, *arguments: object) -> str:
    """The single line that loading ends in."""
    with pytest.raises(DataError) as caught:
        datasets.load(name, *arguments)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, GhostClipError)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


WRITERS = {
    "mnist": write_mnist, "gzip": lambda folder: write_mnist(folder, compressed=True), "cifar10": write_cifar,
    "imdb": write_imdb, "adult": write_adult, "images": write_images,
}  # fmt: skip
IMAGES, LABELS, ADULT = "train-images-idx3-ubyte", "train-labels-idx1-ubyte", ADULT_ROW.format(income="<=50K")
# Format, {file or folder: what is in it, None where it is gone, dict for a folder}, what is said.
MALFORMED = [
    ("mnist", {IMAGES: None}, "is missing"),
    ("mnist", {IMAGES: b"\x89PNG\r\n"}, "starts with 89504e47; expected 00000803"),
    ("mnist", {IMAGES: idx_bytes(np.zeros((3, 2, 4), np.uint8))[:-1]}, "23 bytes of data"),
    ("mnist", {LABELS: idx_bytes(np.array([1, 2], np.uint8))}, "2 labels"),
    ("mnist", {LABELS: idx_bytes(np.array([1, 12, 2], np.uint8))}, "label 12 of example 1"),
    ("mnist", {"t10k-images-idx3-ubyte": idx_bytes(np.zeros((2, 4, 2), np.uint8))}, "must be of one data set"),
    ("gzip", {"t10k-labels-idx1-ubyte.gz": gzip.compress(b"something")[:-9]}, "gz is not a whole gzip file"),
    ("cifar10", {"data_batch_3.bin": b"\3" * (RECORD + 1)}, "data_batch_3.bin has 3074 bytes"),
    ("cifar10", {"data_batch_3.bin": None, "data_batch_3": b""}, "Python version"),
    ("imdb", {"words.txt": b""}, "is empty"),
    ("imdb", {"words.txt": b"a\n\nb\n"}, "line 2: expected one word; got ''"),
    ("imdb", {"words.txt": b"a\nb\na\n"}, "line 3: 'a' was already on line 1"),
    ("imdb", {"words.txt": b"caf\xe9\n"}, "not UTF-8"),
    ("imdb", {"words.txt": None}, "is missing"),
    ("imdb", {"test/pos/0_1.txt": None}, "test/pos holds no .txt files"),
    ("adult", {"adult.data": ADULT.replace("White", "Purple")}, "line 1: 'Purple' is not a published category of race"),
    ("adult", {"adult.data": ADULT.replace("77516", "many")}, "1: expected a finite number for fnlwgt; got 'many'"),
    ("adult", {"adult.data": ADULT.replace("77516, ", "")}, "expected 15 columns; got 14"),
    ("adult", {"adult.data": ADULT.replace("<=50K", "50K")}, "expected an income of <=50K or >50K; got '50K'"),
    ("adult", {"adult.data": f"{ADULT}\n{'x' * 200_000}"}, "line 2: field larger than field limit"),
    ("images", {"train/red/1.png": b"no picture"}, "train/red/1.png cannot be read"),
    ("images", {"train/red/1.png": None}, "train/red holds no image files"),
    ("images", {"train/red": None}, "1 class folder(s); expected two or more"),
    ("images", {"test/green": {}}, "green is a class that train/ does not have"),
]


@pytest.mark.parametrize(("kind", "changes", "expected"), MALFORMED)
def test_what_is_malformed_is_named(tmp_path, kind, changes, expected):
    WRITERS[kind](tmp_path)
    for name, content in changes.items():
        path = tmp_path / name
        if content is None:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif content == {}:
            path.mkdir()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    words = [tmp_path / "words.txt"] if kind == "imdb" else []
    message = fails({"gzip": "mnist"}.get(kind, kind), tmp_path, *words)
    assert expected in message
    assert str(tmp_path) in message


def test_digits_split_is_fixed_and_has_no_overlap():
    data, again = datasets.load("digits"), datasets.load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.input_shape == tuple(data.train[0][0].shape) == (1, 8, 8)
    assert torch.equal(data.train.tensors[0], again.train.tensors[0])
    assert set(data.test.tensors[1].tolist()) == set(range(data.classes))
    assert 0 <= float(data.train.tensors[0].min()) < float(data.train.tensors[0].max()) == 1


def test_the_embedded_digits_are_those_of_scikit_learn():
    expected = pytest.importorskip("sklearn.datasets").load_digits()
    with np.load(DIGITS) as file:
        assert np.array_equal(file["images"], expected.images)
        assert np.array_equal(file["labels"], expected.target)


@pytest.mark.parametrize(("name", "compressed"), [("mnist", False), ("fashion-mnist", True)])
def test_idx_files_are_read_gzipped_or_not(tmp_path, name, compressed):
    written = write_mnist(tmp_path, compressed)
    data = datasets.load(name, tmp_path)
    images, labels = data.train.tensors
    assert torch.equal(images, torch.tensor(written)[:, None].float() / 255)
    assert labels.tolist() == [7, 0, 9]
    assert data.test.tensors[1].tolist() == [1, 2]
    assert (data.name, data.input_shape, data.classes) == (name, (1, 2, 4), 10)


@pytest.mark.parametrize("unpacked", [False, True])
def test_cifar10_binary_version(tmp_path, unpacked):
    inner = tmp_path / "cifar-10-batches-bin" if unpacked else tmp_path
    inner.mkdir(exist_ok=True)
    records = write_cifar(inner)
    data = datasets.load("cifar10", tmp_path)
    assert (len(data.train), len(data.test), data.input_shape) == (10, 2, (3, 32, 32))
    assert data.train.tensors[1].tolist() == [3, 8] * 5
    assert torch.equal(data.test.tensors[0].flatten(1), torch.tensor(records[:, 1:]).float() / 255)


def test_imdb_uses_only_the_supplied_words_and_builds_no_vocabulary(tmp_path):
    vocabulary = write_imdb(tmp_path)
    assert "would have to be charged" in fails("imdb", tmp_path)
    data = datasets.load("imdb", tmp_path, vocabulary)
    (negative, label), (positive, _) = data.train[0], data.train[1]
    assert negative[:4].tolist() == [3, 3, 2, PADDING]
    assert positive[:4].tolist() == [UNKNOWN, 4, UNKNOWN, PADDING]
    assert (int(label), data.vocabulary, data.input_shape) == (0, 5, (256,))


def test_imdb_cuts_long_reviews_and_keeps_empty_ones_readable(tmp_path):
    vocabulary = write_imdb(tmp_path)
    (tmp_path / "train" / "neg" / "0_1.txt").write_text("... !")
    (tmp_path / "train" / "pos" / "0_1.txt").write_text("film " * 9)
    rows = datasets.imdb(tmp_path, vocabulary, positions=4).train.tensors[0]
    assert rows.tolist() == [[UNKNOWN, PADDING, PADDING, PADDING], [2, 2, 2, 2]]


def test_adult_is_encoded_by_published_facts(tmp_path):
    write_adult(tmp_path)
    data = datasets.load("adult", tmp_path)
    known, unknown = data.train.tensors[0]
    assert data.input_shape == tuple(known.shape) == (105,)
    assert data.train.tensors[1].tolist() == [0, 1]
    assert data.test.tensors[1].tolist() == [1]
    assert float(known[0]) == pytest.approx(0.39)
    assert known[1:9].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert unknown[1:9].tolist() == [0] * 8
    assert 0 <= float(known.min()) <= float(known.max()) <= 1
    # Another row changes none of this one's numbers.
    with (tmp_path / "adult.data").open("a") as file:
        file.write(ADULT_ROW.replace("39", "90").replace("77516", "9").format(income=">50K") + "\n")
    assert torch.equal(datasets.load("adult", tmp_path).train.tensors[0][0], known)


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_lines_of_adult_end_in_any_usual_way(tmp_path, end):
    write_adult(tmp_path)
    rows = datasets.load("adult", tmp_path).train.tensors[0]
    path = tmp_path / "adult.data"
    path.write_bytes(path.read_text().replace("\n", end).encode())
    assert torch.equal(datasets.load("adult", tmp_path).train.tensors[0], rows)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    vocabulary = write_imdb(tmp_path)
    vocabulary.write_text("\ufeff" + vocabulary.read_text())
    assert read_vocabulary(vocabulary)["film"] == 2
    write_adult(tmp_path)
    rows = datasets.load("adult", tmp_path).train.tensors[0]
    (tmp_path / "adult.data").write_text("\ufeff" + (tmp_path / "adult.data").read_text())
    assert torch.equal(datasets.load("adult", tmp_path).train.tensors[0], rows)


def test_image_folders(tmp_path):
    write_images(tmp_path)
    data = datasets.load("images", tmp_path)
    assert (len(data.train), len(data.test), data.input_shape, data.classes) == (2, 2, (3, 32, 32), 2)
    blue, red = data.train.tensors[0]
    assert blue.mean(dim=(1, 2)).tolist() == [0, 0, 1]
    assert red.mean(dim=(1, 2)).tolist() == [1, 0, 0]


@pytest.mark.parametrize("name", sorted(set(datasets.NAMES) - {"digits"}))
def test_a_missing_folder_is_one_line(tmp_path, name):
    assert "no data folder was given" in fails(name, None, "words.txt")
    assert f"{tmp_path / 'nowhere'} is not a folder" in fails(name, tmp_path / "nowhere", "words.txt")
    with pytest.raises(ValueError, match=r"data must be one of 'digits'.*got 'imagenet'"):
        datasets.load("imagenet")
