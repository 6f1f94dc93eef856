"""Recorded episodes as the page embeds them: lanes of turns as JSON, tokens and their values in a
byte or two each.

:class:`GroupEncoder` writes a group (:mod:`torchrl_llm.runs.recorded_groups`) as a compressed block
that the page inflates when it is looked at.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrl_llm.keys import StopReason
from torchrl_llm.runs.pieces import join_pieces
from torchrl_llm.runs.recorded_groups import Group, spans
from torchrl_llm.runs.recording import Recording
from torchrl_llm.utils.terminal import visible

Floats = npt.NDArray[np.floating[Any]]

QUANTITIES: dict[str, str] = {
    "credit": "advantage x loss weight of the token, which its gradient is multiplied by",
    "ratio": "log of the probability after the update over the one before",
    "log_prob": "log-prob of the token when it was sampled, nats",
    "entropy": "entropy of the distribution after the update, nats",
    "kl": "KL to the reference, estimated on this token (k3), nats",
    "clipped": "1: the clip binds after the update; 2: the token has no weight in the loss",
}
"""Name and meaning of what tokens are shaded by."""

_SIGNED = ("credit", "ratio")
"""Shaded by sign, around 0."""

# ---------------------------------------- what is shown of a recording


def token_values(recording: Recording) -> tuple[dict[str, Floats], dict[str, str]]:
    """The :data:`QUANTITIES` of a recording ``[B, L]``, and why the others are missing."""
    rows = recording.arrays
    missing: dict[str, str] = {}
    old = rows.get("old_log_prob", rows["sample_log_prob"])
    found: dict[str, Floats] = {}
    if np.isnan(old[rows["turn_ids"] >= 0]).all():
        missing |= dict.fromkeys(("log_prob", "ratio", "kl"), "nobody sampled these tokens: they are a demonstration")
    else:
        found["log_prob"] = rows["sample_log_prob"]
    evaluated = "an evaluation is not learned from" if recording.kind != "training" else None
    if "loss_weight" in rows and "advantage" in rows:
        found["credit"] = rows["advantage"] * rows["loss_weight"]
    if "log_prob" in rows and "ratio" not in missing:
        found["ratio"] = rows["log_prob"] - old
    if "entropy" in rows:
        found["entropy"] = rows["entropy"]
    if "clipped" in rows:
        weightless = (rows["loss_weight"] == 0) & (rows["turn_ids"] >= 0)
        found["clipped"] = np.where(weightless, 2.0, rows["clipped"].astype(np.float32))
    if "ref_log_prob" in rows and "kl" not in missing:
        gap = rows["ref_log_prob"] - old
        found["kl"] = np.expm1(np.minimum(gap, 30.0)) - gap
    why = {"ratio": "log_prob", "entropy": "entropy", "clipped": "clipped"}
    for name in QUANTITIES.keys() - found.keys() - missing.keys():
        default = "no reference was scored (the KL has no weight)" if name == "kl" else "not recorded"
        missing[name] = evaluated or recording.missing.get(why.get(name, name), default)
    return found, missing


def turn_lanes(recording: Recording, row: int) -> dict[str, list[float | None]]:
    """The lanes of an episode, a number a turn: reward, return to go, and with credit value,
    advantage and TD error.

    The return to go is discounted by the run's gamma and has no bootstrap; the TD error is
    ``r + gamma V' - V``, where ``V'`` is 0 after a terminated episode and the value of the whole
    row after a truncated one.
    """
    rows = recording.arrays
    count = int(rows["turn.mask"][row].sum())
    gamma = 1.0 if recording.gamma is None else recording.gamma
    reward = rows["turn.reward"][row, :count].astype(np.float64)
    lanes = {"reward": reward, "return": _discounted(reward, gamma)}
    for lane, name in (("value", "turn.value"), ("advantage", "turn.advantage")):
        if name in rows:
            lanes[lane] = rows[name][row, :count].astype(np.float64)
    if "value" in lanes and "bootstrap_value" in rows and count:
        ended = bool(rows["turn.terminated"][row, count - 1])
        after = 0.0 if ended else float(rows["bootstrap_value"][row])
        lanes["error"] = reward + gamma * np.append(lanes["value"][1:], after) - lanes["value"]
    return {name: [_short(value) for value in lane] for name, lane in lanes.items()}


def _discounted(reward: Floats, gamma: float) -> Floats:
    total, returns = 0.0, np.zeros_like(reward)
    for turn in range(len(reward) - 1, -1, -1):
        returns[turn] = total = reward[turn] + gamma * total
    return returns


def _short(value: float) -> float | None:
    """Four digits: the lanes are read, not computed with. ``None`` for what is not a number: JSON
    has none for it."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


# ---------------------------------------- groups


@dataclass
class GroupEncoder:
    """Writes groups as blocks, with one table of texts for all of them.

    Attributes:
        pieces: the texts of tokens, which blocks count.
    """

    pieces: list[str] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)

    def encode(self, group: Group) -> tuple[dict[str, Any], str]:
        """The description of a group for the page's index, and its block: base64 of a zlib stream.

        The block holds, one after the other, the text of each token of each episode (2 bytes, or 4
        where there are more than 65,535 texts), and a byte a model's token for each quantity, 0
        where there is no number.
        """
        arrays, parts = group.recording.arrays, []
        values, _ = token_values(group.recording)
        tokens = np.concatenate([self._texts(group.recording, row) for row in group.rows])
        wide = len(self.pieces) > np.iinfo(np.uint16).max
        parts.append(tokens.astype("<u4" if wide else "<u2").tobytes())
        action = arrays["turn_ids"][group.rows] >= 0
        scales = {}
        for name, value in values.items():
            data, scales[name] = quantized(value[group.rows][action], signed=name in _SIGNED)
            parts.append(data.tobytes())
        about = {
            "recording": group.number,
            "task": str(group.task),
            "tokens": len(tokens),
            "actions": int(action.sum()),
            "wide": wide,
            "scales": scales,
            "episodes": [self._episode(group.recording, row) for row in group.rows],
        }
        return about, compressed(b"".join(parts))

    def _texts(self, recording: Recording, row: int) -> npt.NDArray[np.int64]:
        mask = recording.arrays["attention_mask"][row]
        texts = [recording.pieces[token] for token in recording.arrays["tokens"][row][mask].tolist()]
        if any("\ud800" <= character <= "\udfff" for text in set(texts) for character in text):
            texts = join_pieces(texts)
        return np.array([self._number(text) for text in texts], dtype=np.int64)

    def _number(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.pieces)
            self.pieces.append(visible(text))
        return self._index[text]

    def _episode(self, recording: Recording, row: int) -> dict[str, Any]:
        rows = recording.arrays
        count = int(rows["turn.mask"][row].sum())
        env = int(rows["env_id"][row])
        clipped = rows["clipped"][row].sum() if "clipped" in rows else 0
        return {
            "name": _short_id(rows["episode_id"][row]),
            "tree": _place_in_tree(rows, row),
            "env": recording.env_names[env] if env < len(recording.env_names) else "",
            "stop": StopReason(int(rows["turn.stop_reason"][row, count - 1])).name if count else "ERROR",
            "won": bool((rows["turn.success"][row] & rows["turn.mask"][row]).any()),
            "clipped": int(clipped),
            "spans": spans(recording, row),
            "lanes": turn_lanes(recording, row),
            **self._extras(recording, row, count),
        }

    def _extras(self, recording: Recording, row: int, count: int) -> dict[str, Any]:
        """The extras of an episode, a value a turn: numbers, and texts as numbers of pieces;
        ``None`` where there is none."""
        lanes: dict[bool, dict[str, Any]] = {False: {}, True: {}}
        for name, values in recording.extras.items():
            own, is_text = values[row, :count].tolist(), values.dtype.kind == "i"
            # A hash whose text is not known is shown as a number: equal ones are still seen to be
            # equal.
            known = [recording.texts.get(key, f"#{key:x}") if key else None for key in own] if is_text else []
            lane: list[Any] = [None if text is None else self._number(text) for text in known] or [*map(_short, own)]
            # An environment of a mixture has none of another one's extras.
            if any(value is not None for value in lane):
                lanes[is_text][visible(name)] = lane
        return {"extras": lanes[False], "texts": lanes[True]}


def quantized(values: Floats, *, signed: bool) -> tuple[npt.NDArray[np.uint8], list[float | None]]:
    """Numbers as bytes 1 to 255, evenly from the smallest to the largest; 0 for what is not a
    number.

    Args:
        values: ``[n]``.
        signed: the range is symmetrical around 0, so that 0 is 128 exactly.

    Returns:
        ``[n]`` bytes, and ``[low, high, typical]``: the ends of the range, and the size that is
        shaded fully.

    Examples:
        >>> data, (low, high, _) = quantized(np.array([-1.0, 0.0, 0.25, np.nan]), signed=True)
        >>> data.tolist(), low, high
        ([1, 128, 160, 0], -1.0, 1.0)
    """
    finite = np.isfinite(values)
    known = values[finite]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    if signed:
        low, high = -max(-low, high, 0.0), max(-low, high, 0.0)
    scaled = (np.where(finite, values, low) - low) / ((high - low) or 1.0)
    data = np.where(finite, 1 + np.rint(254 * scaled), 0).astype(np.uint8)
    # The largest few would leave all others pale.
    typical = float(np.quantile(np.abs(known), 0.95)) if len(known) else 0.0
    return data, [_short(low), _short(high), _short(typical or high)]


def compressed(data: bytes) -> str:
    """Base64 of a zlib stream, which every browser inflates
    (``DecompressionStream("deflate")``)."""
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def _short_id(episode_id: Any) -> int:
    # The streams of evaluations begin at multiples of it; and a browser's numbers have 53 bits.
    return int(episode_id) % 2**40


def _place_in_tree(rows: Mapping[str, Any], row: int) -> str:
    """Where an episode was continued, turns counted from 1; nothing for one that was not."""
    unit = rows.get("turn.unit", np.ones_like(rows["turn.mask"]))[row]
    apart = np.flatnonzero((unit != unit[:1]) & rows["turn.mask"][row])
    if not len(apart):
        return ""
    turn, root = int(apart[0]) + 1, unit[0]
    if root == rows["episode_id"][row]:
        return f"continued by others before turn {turn}"
    return f"continued from episode {_short_id(root)} before turn {turn}"
