"""How losses and estimators read rows: by keys that can be renamed, with errors that name what is missing."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor


class RowReader:
    """Base class of what reads rows ``[B]`` (:mod:`torchrl_llm.keys`, row view) by the names in its ``_AcceptedKeys``."""

    tensor_keys: Any

    def _get(self, tensordict: TensorDictBase, name: str, hint: str = "") -> Tensor:
        key = getattr(self.tensor_keys, name)
        value = tensordict.get(key, None)
        if value is None:
            raise KeyError(f"{type(self).__name__} needs {key!r}, which is not in the batch. {hint}".rstrip())
        return value

    def _old_name(self, tensordict: TensorDictBase) -> str:
        """The log-prob that stands for the policy before the update: scored again, or else as it was sampled."""
        scored = tensordict.get(self.tensor_keys.old_log_prob, None) is not None
        return "old_log_prob" if scored else "sample_log_prob"

    def _inputs(self, network: TensorDictModuleBase, tensordict: TensorDictBase) -> TensorDict:
        """What a network reads, in a tensordict of its own, so that the caller's is not written to."""
        rows = self._get(tensordict, "turn_ids").shape[:1]
        return TensorDict({key: tensordict.get(key) for key in network.in_keys}, batch_size=rows)
