"""The file format of recorded episodes: what is written is read, whole or not at all, and stays
bounded on disk."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_llm import keys
from torchrl_llm.runs.pieces import TokenTexts, join_pieces
from torchrl_llm.runs.recording import RecordingError, RecordingFolder, read_recording, trimmed, write_recording
from torchrl_llm.testing.tiny import load_tiny_tokenizer

ABOUT = {
    "kind": "training",
    "iteration": 1,
    "steps": 5,
    "gamma": None,
    "env_names": ["a"],
    "missing": {"entropy": "why"},
}


ENDS = (keys.TURN_TERMINATED, keys.TURN_TRUNCATED, keys.TURN_SUCCESS)
PIECES = {token: f"word{token}" for token in range(18)}


def rows(length=6, width=9, turns=2, more=3):
    """Rows with padding on the right of their tokens and turns."""
    mask = torch.arange(width) < length
    ids = torch.where(mask, torch.arange(width) % turns, -1).expand(2, width)
    return TensorDict(
        {
            keys.TOKENS: torch.arange(2 * width).view(2, width),
            keys.ATTENTION_MASK: mask.expand(2, width),
            keys.TURN_IDS: ids,
            keys.SAMPLE_LOG_PROB: torch.randn(2, width, dtype=torch.float64),
            keys.TURN_MASK: (torch.arange(turns + more) < turns).expand(2, turns + more),
            keys.TURN_REWARD: torch.randn(2, turns + more),
            **{name: torch.zeros(2, turns + more, dtype=torch.bool) for name in ENDS},
            keys.TURN_STOP_REASON: torch.zeros(2, turns + more, dtype=torch.int64),
            **{name: torch.arange(2) for name in (keys.EPISODE_ID, keys.GROUP_ID, keys.ENV_ID)},
            keys.TASK_ID: torch.tensor([2**62 + 1, -(2**62)]),
            "unknown": torch.zeros(2, 5),
        },
        [2],
    )


def write(path, **about):
    write_recording(path, trimmed(rows()), **ABOUT | {"pieces": PIECES, "interval": 1} | about)


def test_what_is_written_is_read(tmp_path):
    path, given_rows = tmp_path / "new" / "a.safetensors", rows()
    pieces = PIECES | {7: "é", 8: "\udcc3", 9: "</script>"}
    write_recording(path, trimmed(given_rows), **ABOUT, pieces=pieces, interval=4)
    found = read_recording(path)
    assert (found.kind, found.iteration, found.steps, found.gamma, found.interval) == ("training", 1, 5, None, 4)
    assert (found.env_names, found.missing, found.pieces, found.episodes) == (("a",), {"entropy": "why"}, pieces, 2)
    assert "unknown" not in found.arrays
    for name, width in (("tokens", 6), ("sample_log_prob", 6), ("turn.reward", 2)):
        key = tuple(name.split(".")) if "." in name else name
        assert torch.equal(
            torch.from_numpy(found.arrays[name]),
            given_rows[key][:, :width].to(torch.from_numpy(found.arrays[name]).dtype),
        )
    assert found.arrays["task_id"].tolist() == [2**62 + 1, -(2**62)]
    assert [path.name for path in path.parent.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"no" + data])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "a.safetensors"
    write(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RecordingError, match=r"a\.safetensors is not a recording, or is damaged"):
        read_recording(path)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"kind": "\x1b[2J"}, "kind is '\\\\x1b"),
        ({"iteration": "1"}, "iteration is '1', expected an integer"),
        ({"env_names": [1]}, "env_names is"),
        ({"env_names": None}, "NoneType"),
        ({"pieces": {7: "x"}}, "tokens have no text in pieces"),
        ({"pieces": {"x": "x"}}, "invalid literal"),
        ({"pieces": PIECES | {7: 7}}, "pieces are not texts"),
        ({"missing": ["entropy"]}, "missing|list"),
        ({"more": 1}, "unexpected keyword"),
    ],
)
def test_what_stands_beside_the_rows_is_checked(tmp_path, about, said):
    write(tmp_path / "a.safetensors", **about)
    with pytest.raises(RecordingError, match=said):
        read_recording(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": None}, "tokens"),
        ({"turn.mask": None}, "turn.mask"),
        ({"turn.reward": None}, "it lacks"),
        ({"turn.reward": torch.zeros(2, 7)}, "turn.reward is of shape"),
        ({"turn.mask": torch.zeros(2, 2)}, "turn.mask is of shape"),
        ({"turn.extra.x": torch.zeros(3)}, "turn.extra.x is of shape"),
        ({"turn.stop_reason": torch.full((2, 2), 99)}, "no StopReason"),
        ({"turn_ids": torch.full((2, 6), 2)}, "count beyond"),
        ({"env_id": torch.tensor([0, -1])}, "count beyond"),
        ({"tokens": torch.full((2, 6), 99)}, "no text in pieces"),
    ],
)
def test_arrays_are_checked(tmp_path, changed, said):
    arrays = {name: value for name, value in (trimmed(rows()) | changed).items() if value is not None}
    write_recording(tmp_path / "a.safetensors", arrays, **ABOUT, pieces=PIECES, interval=1)
    with pytest.raises(RecordingError, match=said):
        read_recording(tmp_path / "a.safetensors")


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path)
    data = path.read_bytes()
    assert data.count(json.dumps('"format": 1')[1:-1].encode()) == 1
    path.write_bytes(data.replace(json.dumps('"format": 1')[1:-1].encode(), json.dumps('"format": 9')[1:-1].encode()))
    with pytest.raises(RecordingError, match="another format; expected 1"):
        read_recording(path)


class TestFolder:
    def record(self, folder, iterations, last=None):
        for iteration in iterations:
            if folder.is_due(iteration) or iteration == last:
                folder.write(trimmed(rows()), **ABOUT | {"iteration": iteration, "pieces": {}})

    def size(self, tmp_path):
        write(tmp_path / "one" / "a.safetensors", pieces={})
        return (tmp_path / "one" / "a.safetensors").stat().st_size

    @given(st.integers(1, 3), st.integers(2, 9), st.integers(1, 60))
    @pytest.mark.extra
    def test_it_is_bounded_and_spread_over_the_run(self, tmp_path_factory, interval, room, iterations):
        place = tmp_path_factory.mktemp("folder")
        size = self.size(place)
        folder = RecordingFolder(place / "rollouts", interval=interval, max_bytes=room * (size + 20))
        self.record(folder, range(1, iterations + 1), last=iterations)
        kept = list(folder.training())
        assert {1, iterations} <= set(kept)
        assert len(kept) <= max(room, 2)
        between = [number for number in kept if number not in (1, iterations)]
        assert between == [number for number in range(2, iterations) if number % folder.interval == 0]
        assert folder.interval % interval == 0

    @given(st.integers(1, 40), st.integers(0, 40), st.integers(3, 6))
    @pytest.mark.extra
    def test_a_resumed_run_has_the_recordings_of_one_that_never_stopped(self, tmp_path_factory, stop, back, room):
        """It may have more: what was deleted to make room for what it writes again leaves room."""
        place = tmp_path_factory.mktemp("folder")
        limit = room * (self.size(place) + 20)
        whole, cut = (RecordingFolder(place / name, interval=1, max_bytes=limit) for name in ("whole", "cut"))
        self.record(whole, range(1, 41), last=40)
        self.record(cut, range(1, stop + 1), last=stop)
        # the checkpoint that it continues is older than the last recording
        saved = max(0, stop - back)
        again = RecordingFolder(place / "cut", interval=1, max_bytes=limit)
        again.resume(saved, ended=saved == 40)  # there is no iteration after the last one to record
        assert max(again.training(), default=0) <= saved
        self.record(again, range(saved + 1, 41), last=40)
        assert set(whole.training()) <= set(again.training())
        assert len(again.training()) <= room

    def test_a_run_that_has_ended_keeps_its_last(self, tmp_path):
        folder = RecordingFolder(tmp_path, interval=10, max_bytes=10**6)
        self.record(folder, [1, 7], last=7)
        folder.resume(7, ended=True)
        assert list(folder.training()) == [1, 7]
        folder.resume(7, ended=False)
        assert list(folder.training()) == [1]


class TestPieces:
    @pytest.mark.parametrize("text", ["plain words", "é ü 漢字 🙂", "<|im_start|>user\n\\boxed{4}<|im_end|>"])
    @pytest.mark.parametrize("kind", ["bytes", "tiny"])
    def test_the_pieces_of_a_text_are_the_text(self, tokenizer, text, kind):
        chosen = tokenizer if kind == "bytes" else load_tiny_tokenizer()
        ids = chosen.encode(text, add_special_tokens=False)
        known = TokenTexts(chosen).of(ids)
        assert "".join(join_pieces([known[each] for each in ids])) == chosen.decode(ids)

    @given(st.text())
    def test_characters_cut_anywhere_are_joined(self, text):
        pieces = [bytes([byte]).decode("utf-8", "surrogateescape") for byte in text.encode("utf-8", "ignore")]
        assert "".join(join_pieces(pieces)) == text.encode("utf-8", "ignore").decode()

    def test_a_space_that_a_tokenizer_drops_at_the_start_is_there(self):
        class Sentence:
            """SentencePiece's way: a leading space is dropped, and bytes have names."""

            def decode(self, ids):
                return {1: "the", 2: "\ufffd", 3: "x"}[ids[0]]

            def convert_ids_to_tokens(self, token):
                return {1: "\u2581the", 2: "<0xC3>", 3: None}[token]

        assert TokenTexts(Sentence()).of([1, 2, 3]) == {1: " the", 2: "\udcc3", 3: "x"}


def test_large_numbers_of_keys_of_ones_own_are_kept(monkeypatch):
    spec = keys.KeySpec(name="mine", axis="row", dtype=torch.int64, fill=0, writer="environment", meaning="mine")
    monkeypatch.setitem(keys.ROW_VIEW, "mine", spec)
    found = trimmed(rows().set("mine", torch.tensor([2**40 + 5, -1])))["mine"]
    assert found.tolist() == [2**40 + 5, -1]
