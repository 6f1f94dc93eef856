"""Files of records: JSON lines, arrays, parquet and CSV give the same, and what is wrong is said
with its place."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from torchrl_llm.envs import PromptDatasetEnv, read_rows, train_test_split
from torchrl_llm.envs.record_files import read_records
from torchrl_llm.testing.tokenizers import byte_tokenizer

ROWS = [{"question": f"{i} + 1?\u2028", "answer": str(i + 1)} for i in range(4)]


@pytest.fixture
def written(tmp_path):
    """The rows in a file of each format, by its ending."""
    table = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "rows.parquet")
    table.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "rows.json").write_bytes(b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=1).encode())
    return {path.suffix: path for path in tmp_path.iterdir()}


class TestFormats:
    def test_each_gives_the_same_rows(self, written):
        assert {end: [record for _, record in read_records(path)] for end, path in written.items()} == dict.fromkeys(
            (".parquet", ".csv", ".jsonl", ".json"), ROWS
        )

    def test_rows_splits_and_environments_take_them(self, written):
        for path in written.values():
            assert read_rows(path) == read_rows(str(path)) == read_rows(ROWS)
            splits = train_test_split(path, test_size=0.5)
            assert sorted(map(str, [*splits["train"], *splits["test"]])) == sorted(map(str, ROWS))
            assert (
                len(PromptDatasetEnv(path, lambda completion, answer, question: 1.0, tokenizer=byte_tokenizer()).rows)
                == 4
            )

    def test_the_place_of_each_is_said(self, written):
        places = {
            end: [place.rpartition(", ")[2] for place, _ in read_records(path)][-1] for end, path in written.items()
        }
        assert places == {".parquet": "row 4", ".csv": "line 5", ".jsonl": "line 4", ".json": "entry 4"}

    def test_lists_of_messages_are_lists_in_parquet_too(self, tmp_path):
        asked = [{"question": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}]
        pytest.importorskip("datasets").Dataset.from_list(asked).to_parquet(tmp_path / "rows.parquet")
        assert read_rows(tmp_path / "rows.parquet")[0].question == "1 + 1?"

    def test_parquet_by_another_name(self, written, tmp_path):
        other = written[".parquet"].rename(tmp_path / "rows")
        assert [record for _, record in read_records(other)] == ROWS


class TestErrors:
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.jsonl.gz", gzip.compress(b"{}", mtime=0), "a.jsonl.gz is compressed with gzip: unpack it"),
            ("a.zip", b"PK\x03\x04...", "is a zip archive: unpack it"),
            ("a.jsonl", "{}".encode("utf-16"), "is UTF-16: save it as UTF-8"),
            ("a.jsonl", b'{"a": "caf\xe9"}', "a.jsonl, line 1: 'utf-8' codec can't decode"),
            ("a.jsonl", b'{\n "a": 1\n}', "a.jsonl, line 1: .*; expected one JSON object to a line"),
            ("a.json", b'[{"a": 1},\n {"a": ]', "a.json: Expecting value: line 2 .*; expected one array of objects"),
            ("a.json", b"[" * 100_000, "a.json: .*recursion"),
            (
                "a.csv",
                b"a,b\n1,2,3\n",
                "a.csv: line 2 has another number of cells than the 2 columns; expected a line of",
            ),
            ("a.csv", b"a,b\n1,2\n3\n", "a.csv: line 3 has another number of cells"),
            ("a.csv", b'a,b\n"1,2\n', "a.csv: unexpected end of data"),
            ("a.csv", b"a,b\n\xff,1\n", "a.csv: 'utf-8' codec"),
            (
                "a.csv",
                b"a,b\n" + b"x" * 140_000 + b",1\n",
                "a.csv: line 2 has a cell of more than 131,072 characters.* or a quote that nothing closes. Save such texts as",
            ),
            (
                "a.csv",
                b"a,b,a\n1,2,3\n",
                "a.csv: the name 'a' is there twice, and only one value could be kept: rename one",
            ),
            ("a.jsonl", b'{"a": 1, "a": 2}', "a.jsonl, line 1: the name 'a' is there twice"),
            ("a.json", b'[{"b": [{"a": 1, "a": 1}]}]', "a.json: the name 'a' is there twice"),
            ("a.parquet", b"PAR1 and then nothing", "a.parquet is not a whole parquet file"),
            ("a.parquet", b"a table", "a.parquet is not a whole parquet file"),
            (
                "a.parquet",
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
                "is a pointer of Git LFS: fetch the file",
            ),
        ],
        ids=lambda value: str(value)[:24],
    )
    def test_what_cannot_be_read(self, tmp_path, name, content, message):
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow")
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            list(read_records(tmp_path / name))

    def test_two_columns_of_one_name_in_parquet(self, tmp_path):
        pa = pytest.importorskip("pyarrow")
        table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=r"a\.parquet: the name 'a' is there twice"):
            list(read_records(tmp_path / "a.parquet"))

    def test_no_file(self, tmp_path):
        with pytest.raises(ValueError, match=r"There is no file 'some/dataset'.*Load what a hub has with datasets"):
            list(read_records(Path("some/dataset")))
        with pytest.raises(ValueError, match="is a folder; expected the path of a file"):
            list(read_records(tmp_path))

    def test_without_pyarrow(self, written, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(
            ValueError, match=r"rows\.parquet needs 'pyarrow', which comes with 'datasets': pip install datasets"
        ):
            list(read_records(written[".parquet"]))
