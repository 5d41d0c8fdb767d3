"""Encoded images -> RGB: the only place where files of a data set are opened and decoded.

An image becomes what the grader's model sees. As the datasets library does, it is turned as its EXIF says,
and of an animation the first frame counts; as Qwen's own pipelines do, what is transparent becomes white.
"""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import PIL.Image
import PIL.ImageOps
import pyarrow as pa

MAX_ASPECT_RATIO = 200  # of the image processor
ORIENTATION = 0x0112  # the EXIF tag


class DataError(ValueError):
    """The data cannot be used as it is; the message says which row or path, and what to do."""


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def decode(file: BinaryIO) -> PIL.Image.Image:
    """One image in RGB. Raises DataError when it cannot be decoded or loses its content in 8 bits."""
    image = _open(file)
    try:
        image.load()
        if image.getexif().get(ORIENTATION) is not None:
            image = PIL.ImageOps.exif_transpose(image)
        if not image.has_transparency_data:
            return image.convert("RGB")
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, "white")
        return PIL.Image.alpha_composite(white, image).convert("RGB")
    except Exception as error:  # what Pillow raises for a broken file depends on the format
        raise DataError(f"an image cannot be decoded: {_describe(error)}") from error


def check_header(file: BinaryIO, min_side: int) -> tuple[int, int]:
    """Width and height. Raises DataError for what the header alone tells; no pixel is read."""
    size = _open(file).size
    check_size(size, min_side)
    return size


def check_size(size: tuple[int, int], min_side: int) -> None:
    """Raise DataError for a width and height that the image processor refuses."""
    width, height = size
    if min(width, height) < min_side:
        raise DataError(f"an image of {width} x {height} pixels has a side under {min_side}: enlarge it")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise DataError(
            f"an image of {width} x {height} pixels is more than {MAX_ASPECT_RATIO} to 1: cut or pad it"
        )


def _open(file: BinaryIO) -> PIL.Image.Image:
    try:
        with warnings.catch_warnings():  # Pillow only warns of a decompression bomb up to twice its limit
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            image = PIL.Image.open(file)
    except Exception as error:
        raise DataError(f"an image cannot be opened: {_describe(error)}") from error
    if image.mode == "F" or image.mode.startswith("I"):
        raise DataError(
            f"an image has mode {image.mode}, and its values would be cut, not scaled, to 8 bits: "
            "save it with 8 bits a channel"
        )
    return image


def _describe(error: Exception) -> str:
    if isinstance(error, PIL.UnidentifiedImageError):  # its own text is the address of a buffer
        return "its format is unknown"
    return str(error).strip() or type(error).__name__


# --- Where an encoded image lies: in a path, or in a cell of an Arrow table


def open_images(values: list[pa.Buffer | str | None], folder: Path) -> Iterator[BinaryIO]:
    """Each of a row's images as an open file of which nothing is read yet; paths are relative to `folder`."""
    for number, value in enumerate(values, start=1):
        if value is None:
            raise DataError(f"image {number} has neither bytes nor a path")
        if isinstance(value, pa.Buffer):
            yield _BufferFile(value)
            continue
        path = folder / value
        try:
            if not path.is_file():  # a pipe, say, would be waited for
                raise FileNotFoundError
            file = open(path, "rb")
        except FileNotFoundError:
            raise DataError(f"image {number}: there is no file {path}") from None
        except OSError as error:
            raise DataError(f"image {number}: {path} cannot be opened: {error.strerror}") from error
        with file:
            yield file


class _BufferFile(pa.BufferReader):
    """As other files do, it allows seeking past the end, which Pillow tries on short files."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self.tell(), self.size())[whence]
        return super().seek(min(start + offset, self.size()))


def encoded_images(value: pa.Table | list[str | None]) -> list[pa.Buffer | str | None]:
    """Bytes or path of each image. Bytes are not copied: reading a header touches the first pages only."""
    if isinstance(value, list):
        return value
    scalar = value.column(0)[0]
    if not scalar.is_valid:
        return []
    return [_encoded(item) for item in (scalar.values if isinstance(scalar, pa.ListScalar) else [scalar])]


def _encoded(scalar: pa.Scalar) -> pa.Buffer | str | None:
    if isinstance(scalar, pa.StructScalar) and scalar.is_valid:  # how datasets stores an Image: {bytes, path}
        fields = (scalar[name] for name in ("bytes", "path") if name in scalar.type.names)
        scalar = next((field for field in fields if field.is_valid), pa.scalar(None))
    if isinstance(scalar, pa.StringScalar):  # it is a BinaryScalar too
        return scalar.as_py()
    return scalar.as_buffer() if isinstance(scalar, pa.BinaryScalar) and scalar.is_valid else None
