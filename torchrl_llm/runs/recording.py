"""The file format of recorded episodes, and which of them are kept: :class:`Recording`,
:class:`RecordingFolder`.

A recording is one ``.safetensors`` file: the rows as tensors, and in its metadata, as JSON, where
they come from and the text of every token in them. It is read without the model, its tokenizer and
torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.keys import StopReason
from torchrl_llm.utils.files import write_bytes
from torchrl_llm.utils.options import describe, fits

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the format; another one is not read."""

FOLDER = "rollouts"
"""The folder of the recordings in the folder of a run."""

Kind = Literal["training", "before", "after"]
"""A training batch, or the evaluation before or after training."""

_EXTRA = "turn.extra."

_ID_KEYS = (keys.EPISODE_ID, keys.GROUP_ID, keys.TASK_ID)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Recorded episodes.

    Attributes:
        kind: a training batch, or an evaluation.
        iteration: the number of the iteration, from 1; 0 before training.
        steps: turns collected up to then.
        gamma: the discount of the advantages; ``None``: unknown, or there are none.
        env_names: of the environments that the rows' ``env_id`` counts.
        pieces: the text of each token, see :class:`~torchrl_llm.runs.pieces.TokenTexts`.
        missing: what was not computed -> why.
        interval: iterations between recordings when it was written.
        arrays: the rows, named as in :data:`torchrl_llm.keys.ROW_VIEW`, with a dot in nested keys:
            ``"turn.reward"``. Extras of environments are ``"turn.extra.<name>"``.
        texts: hash -> text of the extras that are texts; the others were not known.
    """

    kind: Kind
    iteration: int
    steps: int
    gamma: float | None
    env_names: tuple[str, ...]
    pieces: Mapping[int, str]
    missing: Mapping[str, str]
    interval: int
    arrays: Mapping[str, npt.NDArray[Any]]
    texts: Mapping[int, str] = field(default_factory=dict)

    @property
    def extras(self) -> dict[str, npt.NDArray[Any]]:
        """Name -> ``[B, T]`` of the environments' extras: floats, or int64 for texts."""
        return {name.removeprefix(_EXTRA): own for name, own in self.arrays.items() if name.startswith(_EXTRA)}

    @property
    def tasks(self) -> list[int]:
        """The task of each row; where none is known, its group."""
        return self.arrays["task_id" if "task_id" in self.arrays else "group_id"].tolist()

    @property
    def episodes(self) -> int:
        """How many episodes it has."""
        return len(self.arrays["tokens"])


class RecordingError(ValueError):
    """A file that is not a recording, or is damaged."""


def trimmed(rows: TensorDictBase) -> dict[str, Tensor]:
    """Rows ``[B]`` on the CPU as the format has them: no wider than the longest of them, and in
    narrow types.

    Args:
        rows: of the row view; keys that it does not declare are left out, but for columns of turns.

    Returns:
        Tensors by the names of :attr:`Recording.arrays`.
    """
    valid = rows[keys.ATTENTION_MASK].any(0).nonzero()
    width = int(valid.max()) + 1 if len(valid) else 0
    turns = int(rows[keys.TURN_MASK].sum(-1).max()) if len(rows) else 0
    limits = {"token": width, "turn": turns}
    found = {}
    for name in (*keys.ROW_VIEW, *map(keys.turn_extra, keys.turn_extras(rows))):
        if (value := rows.get(name, None)) is not None:
            axis = keys.row_axis(name, value.shape)
            value = value[:, : limits[axis]] if axis in limits else value
            found[_stored(name)] = _narrow(name, value.detach().cpu())
    return found


def _stored(name: keys.NestedKey) -> str:
    return name if isinstance(name, str) else ".".join(name)


def used_texts(rows: TensorDictBase, texts: Mapping[int, str]) -> dict[int, str]:
    """The ``texts`` (hash -> text) that columns of rows ``[B]`` are hashes of."""
    columns = keys.turn_extras(rows).values()
    found = {key for value in columns if not value.is_floating_point() for key in value.unique().tolist()}
    return {key: texts[key] for key in sorted(found) if key in texts}


def _narrow(name: keys.NestedKey, value: Tensor) -> Tensor:
    if value.is_floating_point():
        return value.to(torch.float32).contiguous()
    # Keys of the user's own may have larger numbers than tokens and turns.
    wide = name in _ID_KEYS or (value.dtype == torch.int64 and value.numel() > 0 and int(value.abs().max()) >= 2**31)
    return (value if value.dtype == torch.bool or wide else value.to(torch.int32)).contiguous()


def write_recording(path: Path, arrays: Mapping[str, Tensor], **about: Any) -> None:
    """Write a file, whole or not at all.

    Args:
        path: the file.
        arrays: :func:`trimmed` rows.
        **about: the other attributes of a :class:`Recording`.
    """
    # ASCII: lone surrogates, which stand for parts of a character, are not UTF-8.
    metadata = {"torchrl_llm": json.dumps({"format": FORMAT, **about})}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, save(dict(arrays), metadata))


def read_recording(path: Path) -> Recording:
    """Read a file of :func:`write_recording`.

    Raises:
        RecordingError: it is none, is damaged, or of another version.
    """
    try:
        with safe_open(path, "numpy") as file:
            about = json.loads((file.metadata() or {})["torchrl_llm"])
            if about.pop("format") != FORMAT:
                raise RecordingError(f"{path} has another format; expected {FORMAT}: write it with this version.")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a dictionary
        for name in ("pieces", "texts"):  # JSON has no integers for keys
            about[name] = {int(key): text for key, text in about.get(name, {}).items()}
        recording = Recording(**about | {"env_names": tuple(about["env_names"])}, arrays=arrays)
        for problem in (*_wrong_about(recording), *_wrong_arrays(recording)):
            raise ValueError(problem)
        return recording
    except RecordingError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise RecordingError(f"{path} is not a recording, or is damaged ({error}): move it away.") from error


def _wrong_about(recording: Recording) -> Iterator[str]:
    """What no recording of this library has beside its arrays: the file may be a stranger's."""
    hints = get_type_hints(Recording)
    for name in ("kind", "iteration", "steps", "gamma", "env_names", "interval"):
        value = getattr(recording, name)
        if not fits(value, hints[name]):
            yield f"{name} is {value!r:.80}, expected {describe(hints[name])}"
    for name in ("pieces", "texts", "missing"):
        if not all(isinstance(text, str) for text in getattr(recording, name).values()):
            yield f"{name} are not texts"


def _wrong_arrays(recording: Recording) -> Iterator[str]:
    """The same of its arrays: shapes, dtypes, and numbers that stand for something else."""
    arrays = recording.arrays
    sizes = {"row": arrays["tokens"].shape[:1], "token": arrays["tokens"].shape, "turn": arrays["turn.mask"].shape}
    declared = {_stored(name): (spec.axis, _DTYPES.get(spec.dtype, "")) for name, spec in keys.ROW_VIEW.items()}
    for name, array in arrays.items():
        axis, kinds = ("turn", "if") if name.startswith(_EXTRA) else declared.get(name, ("", ""))
        if axis and (array.shape != sizes[axis] or array.dtype.kind not in kinds):
            yield f"{name} is of shape {array.shape} and {array.dtype}, expected {sizes[axis]}"
    if lacking := [name for name in _NEEDED if name not in arrays]:
        yield f"it lacks {lacking}"
    elif not {*np.unique(arrays["turn.stop_reason"])} <= {*StopReason}:
        yield "turn.stop_reason holds no StopReason"
    elif arrays["turn_ids"].max(initial=-1) >= sizes["turn"][-1] or arrays["env_id"].min(initial=0) < 0:
        yield "turn_ids or env_id count beyond what there is"
    elif not {*np.unique(arrays["tokens"][arrays["attention_mask"]]).tolist()} <= recording.pieces.keys():
        yield "tokens have no text in pieces"


_DTYPES = {torch.bool: "b", torch.int64: "i", torch.float32: "f"}
_NEEDED = (
    *("tokens", "attention_mask", "turn_ids", "sample_log_prob", "episode_id", "group_id", "env_id"),
    *(f"turn.{name}" for name in ("mask", "reward", "terminated", "truncated", "success", "stop_reason")),
)
"""Arrays that every recording has."""


class RecordingFolder:
    """The recordings of a run, bounded on disk.

    Recordings of training are ``interval`` iterations apart. When all of them take more than
    ``max_bytes``, the interval is doubled and what lies between is deleted, so that those that stay
    are spread over the whole run. The first one stays.

    Args:
        path: the folder; it is made when something is written.
        interval: iterations between recordings at first, >= 1.
        max_bytes: what they may take, > 0. The first and the newest stay however large they are.
    """

    def __init__(self, path: Path, *, interval: int, max_bytes: int) -> None:
        self.path, self.interval, self.max_bytes = path, interval, max_bytes

    def file(self, kind: Kind, iteration: int = 0) -> Path:
        """The file of a recording."""
        return self.path / (f"iteration-{iteration:012d}.safetensors" if kind == "training" else f"{kind}.safetensors")

    def training(self) -> dict[int, Path]:
        """The recordings of training, by iteration, in order."""
        found = sorted(self.path.glob("iteration-*.safetensors"))
        return {int(path.stem.removeprefix("iteration-")): path for path in found}

    def is_due(self, iteration: int) -> bool:
        """Whether an iteration is to be recorded whatever follows: the first, and every
        ``interval``-th."""
        return iteration == 1 or iteration % self.interval == 0

    def resume(self, iteration: int, *, ended: bool) -> None:
        """Continue after an iteration: later recordings are deleted, because the run writes them
        again.

        Args:
            iteration: how many the run has behind it.
            ended: it has ended there. Else its newest recording, if it is not due, goes too: it was
                there as the last one.
        """
        for number, path in self.training().items():
            try:
                self.interval = max(self.interval, read_recording(path).interval)
            except RecordingError as error:  # the run can do without it
                logger.warning("%s", error)
            if number > iteration:
                path.unlink()
        if not ended:
            self._drop_between()

    def write(self, arrays: Mapping[str, Tensor], **about: Any) -> None:
        """Write a recording, see :func:`write_recording`, and make room."""
        own = {name: value for name, value in about.items() if name != "interval"}
        path = self.file(about["kind"], about["iteration"])
        write_recording(path, arrays, **own, interval=self.interval)
        # the newest so far, if it was there as that only
        self._drop_between(keep=about["iteration"])
        while self._bytes() > self.max_bytes and any(1 < number < about["iteration"] for number in self.training()):
            self.interval *= 2
            self._drop_between(keep=about["iteration"])

    def _bytes(self) -> int:
        return sum(path.stat().st_size for path in self.path.glob("*.safetensors"))

    def _drop_between(self, keep: int | None = None) -> None:
        for number, path in self.training().items():
            if number != keep and not self.is_due(number):
                path.unlink()
