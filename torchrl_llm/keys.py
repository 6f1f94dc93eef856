"""Every TensorDict key of the library, once: its name, shape, dtype and writer.

Two views of the same conversations. ``N`` environment slots, ``T`` turns, ``B`` conversations, ``L`` tokens of
context, ``A`` tokens of the longest response.

**Turn view**, written while collecting. Batch ``[N]`` per step, ``[N, T]`` (or ``[B, T]``) collected.

===========================  =================  ======================================================  ======
constant                     shape, dtype       meaning                                                 writer
===========================  =================  ======================================================  ======
:data:`PROMPT`               ``[N, L]`` int64   the whole context so far, right-padded                  env
:data:`PROMPT_LENGTH`        ``[N, 1]`` int64   valid tokens of the prompt; 0 = the slot idles          env
:data:`TURN`                 ``[N, 1]`` int64   0-based turn of the episode                             env
:data:`SEGMENT`              ``[N, 1]`` int64   how often the context was made anew; only if it can be  env
:data:`EPISODE_ID`           ``[N, 1]`` int64   unique over the run                                     env
:data:`GROUP_ID`             ``[N, 1]`` int64   unique over the run; same group = same task             env
:data:`ENV_ID`               ``[N, 1]`` int64   index into the mixture of environments                  env
:data:`TASK_ID`              ``[N, 1]`` int64   hash of what the task is; optional                      env
:data:`RESPONSE`             ``[N, A]`` int64   the sampled ids, end-of-turn token included             policy
:data:`RESPONSE_MASK`        ``[N, A]`` bool    True on sampled tokens                                  policy
:data:`RESPONSE_LOG_PROBS`   ``[N, A]`` float   log-prob under the distribution really sampled from     policy
:data:`TURN_IDS`             ``[N, A]`` int64   the turn of each token; -1 off-mask                     policy
:data:`POLICY_VERSION`       ``[N, A]`` int64   the weights each token was sampled with; -1 off-mask    policy
:data:`REWARD`               ``[N, 1]`` float   reward of the turn                                      env
:data:`DONE` and kin         ``[N, 1]`` bool    ``done = terminated | truncated``                       env
:data:`SUCCESS`              ``[N, 1]`` bool    the episode ended in success                            env
:data:`STOP_REASON`          ``[N, 1]`` int64   a :class:`StopReason`                                   env
===========================  =================  ======================================================  ======

**Row view**, stored, sampled and fed to losses. Batch ``[B]``: one conversation a row.

===========================  =================  ======================================================  =========
constant                     shape, dtype       meaning                                                 writer
===========================  =================  ======================================================  =========
:data:`TOKENS`               ``[B, L]`` int64   the conversation, right-padded                          sequence
:data:`ATTENTION_MASK`       ``[B, L]`` bool    True on the conversation; a gap starts a new segment    sequence
:data:`TURN_IDS`             ``[B, L]`` int64   -1 = not an action; the action mask is turn_ids >= 0    sequence
:data:`POLICY_VERSION`       ``[B, L]`` int64   -1 = not an action                                      sequence
:data:`SAMPLE_LOG_PROB`      ``[B, L]`` float   index i: log p(token i given the tokens before i)       sequence
:data:`TURN_REWARD`          ``[B, T]`` float   reward of each turn                                     sequence
:data:`TURN_MASK`            ``[B, T]`` bool    True on turns that were played                          sequence
:data:`TURN_TERMINATED`      ``[B, T]`` bool                                                            sequence
:data:`TURN_TRUNCATED`       ``[B, T]`` bool                                                            sequence
:data:`TURN_SUCCESS`         ``[B, T]`` bool                                                            sequence
:data:`TURN_STOP_REASON`     ``[B, T]`` int64                                                           sequence
:data:`EPISODE_ID` and kin   ``[B]`` int64      also :data:`GROUP_ID`, :data:`ENV_ID`, :data:`TASK_ID`  sequence
:data:`STATE_VALUE`          ``[B, L]`` float   index i: value of the prefix before token i             critic
:data:`BOOTSTRAP_VALUE`      ``[B]`` float      value of the whole row                                  critic
:data:`TURN_VALUE`           ``[B, T]`` float                                                           estimator
:data:`TURN_ADVANTAGE`       ``[B, T]`` float                                                           estimator
:data:`TURN_VALUE_TARGET`    ``[B, T]`` float                                                           estimator
:data:`ADVANTAGE`            ``[B, L]`` float   broadcast by ``turn_ids``, 0 elsewhere                  estimator
:data:`VALUE_TARGET`         ``[B, L]`` float   broadcast by ``turn_ids``, 0 elsewhere                  estimator
:data:`LOG_PROB`             ``[B, L]`` float   of the model being trained                              scorer
:data:`ENTROPY`              ``[B, L]`` float   of the model being trained, optional                    scorer
:data:`OLD_LOG_PROB`         ``[B, L]`` float   of the model at the start of the update, optional       trainer
:data:`REF_LOG_PROB`         ``[B, L]`` float   of the reference model, optional                        trainer
:data:`LOSS_WEIGHT`          ``[B, L]`` float   the weight of each token in the loss's sum              trainer
:data:`CRITIC_WEIGHT`        ``[B, L]`` float   the same for the critic's term                           trainer
===========================  =================  ======================================================  =========

Floats are float32, or the input's dtype if wider.
"""

from __future__ import annotations

from enum import IntEnum

NestedKey = str | tuple[str, ...]

# Turn view.
PROMPT = ("tokens", "prompt")
PROMPT_LENGTH = ("tokens", "prompt_length")
RESPONSE = ("tokens", "response")
RESPONSE_MASK = ("tokens", "response_mask")
RESPONSE_LOG_PROBS = ("tokens", "log_probs")
TURN = "turn"
REWARD = "reward"
DONE = "done"
TERMINATED = "terminated"
TRUNCATED = "truncated"
SEGMENT = "segment"
SUCCESS = "success"
STOP_REASON = "stop_reason"

# Both views.
EPISODE_ID = "episode_id"
GROUP_ID = "group_id"
ENV_ID = "env_id"
TASK_ID = "task_id"
TURN_IDS = "turn_ids"
POLICY_VERSION = "policy_version"

# Row view.
TOKENS = "tokens"
ATTENTION_MASK = "attention_mask"
SAMPLE_LOG_PROB = "sample_log_prob"
OLD_LOG_PROB = "old_log_prob"
REF_LOG_PROB = "ref_log_prob"
LOG_PROB = "log_prob"
ENTROPY = "entropy"
STATE_VALUE = "state_value"
BOOTSTRAP_VALUE = "bootstrap_value"
ADVANTAGE = "advantage"
VALUE_TARGET = "value_target"
LOSS_WEIGHT = "loss_weight"
CRITIC_WEIGHT = "critic_weight"
TURN_REWARD = ("turn", "reward")
TURN_MASK = ("turn", "mask")
TURN_TERMINATED = ("turn", "terminated")
TURN_TRUNCATED = ("turn", "truncated")
TURN_SUCCESS = ("turn", "success")
TURN_STOP_REASON = ("turn", "stop_reason")
TURN_VALUE = ("turn", "value")
TURN_ADVANTAGE = ("turn", "advantage")
TURN_VALUE_TARGET = ("turn", "value_target")


class StopReason(IntEnum):
    """Why an episode ended. ``RUNNING`` marks a turn that is not the last one."""

    RUNNING = 0
    WON = 1
    """Terminated in success."""
    LOST = 2
    """Terminated without success, before the turn limit (a format error, a lost game)."""
    TURN_LIMIT = 3
    """The environment's own turn limit: termination, for the limit is part of the task."""
    MAX_TURNS = 4
    """Our step budget ``max_turns``: truncation."""
    CONTEXT = 5
    """The next response would not fit into ``max_model_len``: truncation."""
    ERROR = 6
    """The environment raised or returned a malformed result: truncation."""
    TIMEOUT = 7
    """The environment did not answer in time: truncation."""
    ENV_TRUNCATED = 8
    """The environment itself said truncated and not terminated."""
