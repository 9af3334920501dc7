"""Image files of a request: raw bytes or multipart, from bytes to the pixels that the bundle takes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from exitwise.core.errors import InputError, shorten
from exitwise.core.image_files import decode_image
from exitwise.core.predictions import Array
from exitwise.core.preprocessing import Preprocessing
from exitwise.serving.errors import RequestError
from exitwise.serving.queues import DeadlineError

_MAX_NAME = 200  # characters of a file name that are repeated in the answer
_RAW_TYPES = (b"", b"application/octet-stream", b"application/x-www-form-urlencoded")  # the last is curl's default
_MAX_HEADER = 4096  # bytes of the headers of a part


@dataclass(frozen=True)
class Upload:
    """An image file of a request, with the name that the client gave it, if any."""

    name: str | None
    data: bytes


def split_upload(content_type: str | None, body: bytes, max_images: int) -> list[Upload]:
    """Return the image files of a body.

    Args:
        content_type: Header of the request: an image type or application/octet-stream for one file,
            multipart/form-data for several.
        body: The whole body.
        max_images: Largest number of files.

    Returns:
        The files in their order, at least one.

    Raises:
        RequestError: With status 415 for another type, 413 for too many files.
        InputError: If the body is empty, damaged or cut off.
    """
    kind, options = parse_options_header(content_type)
    if kind == b"multipart/form-data":
        uploads = _split_multipart(options.get(b"boundary", b""), body, max_images)
    elif kind in _RAW_TYPES or kind.startswith(b"image/"):
        uploads = [Upload(None, body)]
    else:
        raise RequestError(
            415, f"`Content-Type` must be image/*, application/octet-stream or multipart/form-data, but is {kind!r}"
        )
    if not uploads or not body:
        raise InputError("the request holds no image")
    return uploads


class _Parts:
    """Callbacks of the multipart parser, which collect the file parts."""

    def __init__(self, max_images: int) -> None:
        self.uploads: list[Upload] = []
        self.complete = False
        self._max_images = max_images
        self._field, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._data = bytearray()
        self._header_size = 0

    def callbacks(self) -> Mapping[str, object]:
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end", "end")
        return {f"on_{name}": getattr(self, f"on_{name}") for name in names}

    def on_part_begin(self) -> None:
        self._headers, self._data, self._header_size = {}, bytearray(), 0
        if len(self.uploads) >= self._max_images:
            raise RequestError(413, f"a request may have at most {self._max_images} images")

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._check_header(end - start)

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header(end - start)

    def _check_header(self, size: int) -> None:
        self._header_size += size
        if self._header_size > _MAX_HEADER:
            raise InputError(f"headers of a part may have at most {_MAX_HEADER} bytes")

    def on_header_end(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]

    def on_part_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"filename", options.get(b"name", b"")).decode(errors="replace")
        self.uploads.append(Upload(name[:_MAX_NAME] or None, bytes(self._data)))

    def on_end(self) -> None:
        self.complete = True


def _split_multipart(boundary: bytes, body: bytes, max_images: int) -> list[Upload]:
    if not 0 < len(boundary) <= 200:
        raise InputError("`Content-Type` multipart/form-data must have a boundary of at most 200 characters")
    parts = _Parts(max_images)
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except FormParserError:
        raise InputError("the multipart body is damaged") from None
    if not parts.complete:
        raise InputError("the multipart body is cut off: its last boundary is missing")
    return parts.uploads


def decode_uploads(
    uploads: Sequence[Upload], preprocessing: Preprocessing, max_pixels: int, deadline: float = inf
) -> list[Array | InputError]:
    """Return for each file its pixels, uint8 (channels, size, size), or the error that prevents decoding it.

    Raises:
        DeadlineError: If the deadline, by `time.monotonic`, passes before the last file.
    """
    decoded: list[Array | InputError] = []
    for number, upload in enumerate(uploads):
        if time.monotonic() >= deadline:
            raise DeadlineError(f"the deadline passed after {number} of {len(uploads)} images were decoded")
        name = f"image {number}" if upload.name is None else shorten(upload.name)
        try:
            decoded.append(decode_image(upload.data, preprocessing, max_pixels, name))
        except InputError as error:
            decoded.append(error)
    return decoded
