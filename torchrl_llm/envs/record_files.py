"""Files of records, one mapping each, as people have them: :func:`read_records`."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FORMATS = ".jsonl, .json, .parquet or .csv"
"""The names that files of records end with; one with another name is read as JSON."""

_NO_TEXT = {
    b"\x1f\x8b": "is compressed with gzip: unpack it",
    b"PK\x03\x04": "is a zip archive: unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed with zstandard: unpack it",
    b"ARROW1": "is an Arrow file: load it with datasets.Dataset.from_file",
    b"version https://git-lfs": "is a pointer of Git LFS: fetch the file that it stands for (git lfs pull)",
    codecs.BOM_UTF16_LE: "is UTF-16: save it as UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16: save it as UTF-8",
}
"""First bytes of files that are not text in UTF-8, and what to do."""


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """The place and the value of each record of a file.

    A file of JSON has one value to a line, or one array of all. Lines end with a line feed and
    nothing else: JSON may hold characters at which ``str.splitlines`` splits, such as U+2028. Every
    cell of a CSV file is text. No record has two values of one name, of which all but the last
    would be lost.

    Args:
        path: its first bytes decide, and where they are text the end of its name.

    Raises:
        ValueError: there is no such file, or it is of another format, or a part of it cannot be
            read; the message names the part.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rows.csv"
        >>> _ = path.write_text("question,answer\\n1 + 1?,2\\n")
        >>> [(place.rpartition(", ")[2], record) for place, record in read_records(path)]
        [('line 2', {'question': '1 + 1?', 'answer': '2'})]
    """
    if not path.is_file():
        there = f"{str(path)!r} is a folder" if path.is_dir() else f"There is no file {str(path)!r}"
        raise ValueError(
            f"{there}; expected the path of a file that ends with {FORMATS}. Load what a hub has with datasets.load_dataset first."
        )
    content = path.read_bytes()
    for begin, what in _NO_TEXT.items():
        if content.startswith(begin):
            raise ValueError(f"{path} {what}; expected {FORMATS}.")
    if content.startswith(b"PAR1") or path.suffix.lower() == ".parquet":
        return _from_parquet(path)
    # which some programs write, and json.loads refuses
    content = content.removeprefix(codecs.BOM_UTF8)
    if path.suffix.lower() in (".csv", ".tsv"):
        return _from_csv(path, content, "\t" if path.suffix.lower() == ".tsv" else ",")
    return _from_array(path, content) if content.lstrip().startswith(b"[") else _from_lines(path, content)


def _from_lines(path: Path, content: bytes) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(io.BytesIO(content), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield place, json.loads(line.decode(), object_pairs_hook=_object)
            # no UTF-8, no JSON, or beyond what Python reads
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: {error}; expected one JSON object to a line.") from error


def _from_array(path: Path, content: bytes) -> Iterator[tuple[str, Any]]:
    try:
        values = json.loads(content.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; expected one array of objects, or one object to a line.") from error
    yield from ((f"{path}, entry {number}", value) for number, value in enumerate(values, start=1))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_names([name for name, _ in pairs])
    return dict(pairs)


def _check_names(names: Sequence[str]) -> None:
    if len({*names}) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(
            f"the name {twice!r} is there twice, and only one value could be kept: rename one, or leave it out"
        )


def _from_csv(path: Path, content: bytes, delimiter: str) -> Iterator[tuple[str, Any]]:
    try:
        lines = csv.DictReader(io.StringIO(content.decode(), newline=""), delimiter=delimiter, strict=True)
        _check_names(lines.fieldnames or ())
        for record in lines:
            if None in record or None in record.values():
                raise ValueError(
                    f"line {lines.line_num} has another number of cells than the {len(lines.fieldnames or ())} columns"
                )
            yield f"{path}, line {lines.line_num}", record
    except (ValueError, csv.Error) as error:
        told = str(error)
        if told.startswith("field larger than field limit"):
            told = (
                f"line {lines.reader.line_num} has a cell of more than {csv.field_size_limit():,} characters, the most that Python's csv "
                "takes, or a quote that nothing closes. Save such texts as .jsonl or .parquet, or raise csv.field_size_limit"
            )
        raise ValueError(f"{path}: {told}; expected a line of column names, then a line for each row.") from error


def _from_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{path} needs 'pyarrow', which comes with 'datasets': pip install datasets.") from error
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            rows = [row for batch in file.iter_batches() for row in batch.to_pylist()]
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a whole parquet file: {error}") from error
    try:
        _check_names(names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; expected columns of different names.") from error
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
