"""Episodes that branch: some are continued from the middle, and all that comes of it is trained on:
:class:`Trees`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.collectors.branching import branch
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.episode import Episode
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.utils.options import Checked, Count


@dataclass(frozen=True, kw_only=True)
class Trees(Checked):
    """How episodes branch; an option of :class:`~torchrl_llm.collectors.TurnCollector`.

    Of each group some episodes are played from the start, each the root of a tree; it is continued
    ``branches`` times from one of its turns (:func:`~torchrl_llm.collectors.branch`). The turns
    before it are sampled once and stand in every row of the tree, so that prefix sharing computes
    them once. Which turn it is, a hash of the episode's id says and nothing that happens in it. An
    episode that has ended by then is not continued: as many others of its task are played instead,
    so that every group has its size.

    The rows of a tree count one ``branches + 1``-th each (``"row_weight"``). A turn before the
    branch then gets the mean of what followed, and one behind it is compared with the others in the
    very same state (``GroupRelative(credit="state", ...)``, after TreePO, Li et al., 2025,
    arXiv:2508.17445, and Tree-GRPO, Ji et al., 2025, arXiv:2509.21240, which also compare rows in
    turns that they share). The expected gradient is the one of episodes that do not branch, times a
    number.

    Args:
        branches: continuations of each root.
        depth: the last turn, counted from 0, before which trees branch; each of 1 to ``depth`` is
            as likely. Default: 4.

    Raises:
        ConfigError: one of them is less than 1.
    """

    branches: Count
    depth: Count = 4

    @property
    def size(self) -> int:
        """Episodes of a tree."""
        return self.branches + 1

    def turn(self, root: Episode) -> int:
        """The turn before which the tree of ``root`` branches; -1: it has ended by then."""
        digest = blake2b(root.episode_id.to_bytes(8, "big"), digest_size=8).digest()
        turn = 1 + int.from_bytes(digest, "big") % self.depth
        return turn if turn < len(root.turns) else -1


def grow(env: GEMEnv, policy: TurnPolicy, roots: Sequence[Episode], trees: Trees, **options: Any) -> list[Episode]:
    """The trees of ``roots``.

    Args:
        env, policy: see :func:`~torchrl_llm.collectors.branch`.
        roots: finished episodes in whole groups, one group after the other.
        trees: how they branch.
        options: ``greedy`` and ``max_faults`` of :func:`~torchrl_llm.collectors.branch`.

    Returns:
        ``len(roots) * trees.size`` episodes, each root followed by its continuations, by their ids;
        fewer where environments failed, for then the whole group is left out.

    Raises:
        Exception: what :func:`~torchrl_llm.collectors.branch` raises.
    """
    points = [(root, max(0, trees.turn(root))) for root in roots]
    found = branch(env, policy, points, count=trees.branches, **options)
    grown = [*zip(roots, found, strict=True)]
    failed = {root.group_id for root, rest in grown if len(rest) < trees.branches}
    # By their ids: the order that several processes agree on.
    kept = ([root, *sorted(rest, key=attrgetter("episode_id"))] for root, rest in grown if root.group_id not in failed)
    return [*chain.from_iterable(kept)]


def mark_trees(rows: TensorDictBase, episodes: Sequence[Episode], trees: Trees) -> int:
    """Write which rows of trees count as one, ``("turn", "unit")`` ``[B, T]``, and how much each
    counts, ``"row_weight"`` ``[B]``.

    Args:
        rows: made of ``episodes``, ``[B]``.
        episodes: as :func:`grow` returns them.
        trees: how they branched.

    Returns:
        How many turns of the rows repeat one that was sampled once.
    """
    roots = [episodes[i - i % trees.size] for i in range(len(episodes))]
    root_id, turn = torch.tensor([(root.episode_id, trees.turn(root)) for root in roots]).T
    rows[keys.TURN_UNIT] = F.tree_units(rows[keys.EPISODE_ID], root_id, turn, rows[keys.TURN_MASK].shape[1])
    rows[keys.ROW_WEIGHT] = torch.where(turn >= 0, 1 / trees.size, 1.0)
    return int(turn[:: trees.size].clamp_min(0).sum()) * trees.branches
