"""Generation with a vLLM engine: :class:`VLLMPolicy`.

Token ids go in, token ids and the log-probs of the sampled distribution come out; text never does.
:mod:`torchrl_llm.modules.vllm.weights` loads trained weights, :mod:`torchrl_llm.modules.vllm.start`
starts engines.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor

from torchrl_llm.modules.engine import (
    RETRIES,
    ContextLengthError,
    EngineError,
    NamedTensors,
    NonFiniteLogitsError,
    TurnRequest,
    TurnResponse,
)
from torchrl_llm.modules.policy import Generation, TurnPolicy
from torchrl_llm.modules.sampling import SamplingConfig, decide_stop_ids, turn_seed
from torchrl_llm.modules.vllm import start, weights
from torchrl_llm.stops import end_tokens
from torchrl_llm.utils.interrupts import held

_LIKELIEST = 8  # log-probs per prompt of a parity check

_NUMBERS = count()
"""Of the requests of this process: policies that share an engine must not name theirs alike."""


class VLLMPolicy(TurnPolicy):
    """Samples responses with a vLLM engine.

    The same keys and the same meaning as :class:`~torchrl_llm.modules.HFPolicy`: ids depend on the
    weights, the prompt and ``(seed, episode_id, turn)``, never on the neighbors in the batch, but
    for rounding; log-probs belong to the sampled distribution, in float32; nothing comes from
    the model's ``generation_config`` but its list of end tokens. The noise is vLLM's own, so the
    two policies sample different responses from the same distribution. Three differences: with
    greedy decoding the log-prob is that at temperature 1 and without truncation; ``min_p`` is
    applied before ``top_k`` and ``top_p``; temperatures below 0.01 or above 2 are refused; and,
    with ``min_output_tokens``, ``stop_ids`` without an end token of the model's, and on a GPU more
    than 128 of them.

    Batches are continuous: :meth:`submit` hands a turn to the engine at once, :meth:`poll` takes
    one step of the engine. Calls, polls and weight updates may come from several threads; each has
    the engine to itself (:meth:`exclusive`).

    The policy has weights of its own. :class:`~torchrl_llm.weight_update.EngineWeightSync` loads
    the trained ones. After a sync that failed half way, or when the engine has died, every use
    raises :class:`EngineError`, so that nothing is sampled from unknown weights.

    Args:
        engine: a directory or hub id, from which :func:`load_engine` makes an engine that
            :meth:`close` shuts down; or a live ``vllm.LLM`` made with
            ``logprobs_mode="processed_logprobs"``, which the caller shuts down.
        tokenizer: the model's tokenizer: its end-of-turn id stops responses, its vocabulary is
            checked.
        sampling: how responses are sampled; default ``SamplingConfig()``.
        seed: the first part of the noise key, >= 0.
        transfer_address: of this host, where ranks meet; for the method ``"nccl"`` only.
        **engine_args: for :func:`load_engine`; only with a path.

    Attributes:
        llm: the ``vllm.LLM``.
        stop_ids: the ids that end a response.
        max_model_len: longest episode of the engine, in tokens.
        in_process: whether engine and model are in this process.
        lora_request: the ``LoRARequest`` of later turns; ``None``: the model itself.

    Raises:
        MissingVLLMError: vLLM is not installed.
        VocabularyMismatchError: the tokenizer has ids that the model does not embed.
        ValueError: the engine records other log-probs than those sampled from, or a sampling
            setting has no equivalent.
        ContextLengthError: prompt and longest response exceed ``max_model_len`` (from a turn).
        NonFiniteLogitsError: log-probs of a turn are NaN or infinite, and again ``RETRIES`` times
            with other noise.
        EngineError: the engine failed or holds unknown weights (from a turn).

    Examples:
        >>> from torchrl_llm.testing.tiny import tiny_model_path
        >>> policy = VLLMPolicy(tiny_model_path(), tokenizer, dtype="float32")  # doctest: +SKIP
        >>> collector = TurnCollector(env, policy, batch_size=64)  # doctest: +SKIP
    """

    owns_weights = loads_base = True
    methods = weights.METHODS

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        sampling: SamplingConfig | None = None,
        *,
        seed: int = 0,
        transfer_address: str = "127.0.0.1",
        **engine_args: Any,
    ) -> None:
        super().__init__(sampling or SamplingConfig(), seed=seed)
        self._vllm = start.import_vllm()
        # Before the engine is started, which takes seconds to minutes.
        start.check_sampling(self.sampling, on_gpu=start.on_gpu())
        self._owned = isinstance(engine, str | Path)
        if engine_args and not self._owned:
            raise ValueError(f"{sorted(engine_args)} are settings of a new engine, but a live one was given.")
        self.llm = start.load_engine(engine, seed=seed, **engine_args) if self._owned else engine
        config = self.llm.llm_engine.vllm_config
        start.check_engine(config, tokenizer)
        self.max_model_len: int = config.model_config.max_model_len
        # Two blocks of the prefix cache and one token, so that the parity check finds blocks of
        # earlier weights.
        self.check_length = min(2 * config.cache_config.block_size + 1, self.max_model_len - 1)
        named, vocabulary = config.model_config.try_get_generation_config(), config.model_config.get_vocab_size()
        ends = named.get("eos_token_id")
        self.sampling = decide_stop_ids(self.sampling, ends, tokenizer, vocabulary=vocabulary)
        start.check_end_ids(self.sampling, end_tokens(tokenizer, ends))
        self.in_process = start.is_in_process(self.llm)
        self.lora_request: Any = None
        self._transfer_address = transfer_address
        self._transfer: weights.WeightTransfer | None = None
        self._asleep = False
        self._lock = start.FairLock()
        self._sampled_params, self._greedy_params = (self._make_params(greedy=greedy) for greedy in (False, True))
        self._running: dict[str, TurnRequest] = {}
        self._retries: Counter[str] = Counter()
        self._ready: list[TurnResponse] = []
        self._engine_version: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the engine's weights."""
        return self.llm.llm_engine.vllm_config.model_config.dtype

    # ---------------------------------------- turns

    @property
    def logprobs_match_trainer(self) -> bool:
        """Whether a scorer at the same temperature and ``min_output_tokens`` computes the log-probs
        recorded here.

        True in float32 without truncation and penalty, to about 1e-6 on CPUs.
        """
        return not self.sampling.truncates and self.dtype == torch.float32

    @property
    def pending(self) -> int:
        """Number of requests that are not answered yet."""
        return len(self._running) + len(self._ready)

    def submit(self, request: TurnRequest) -> None:
        """Hand one turn to the engine; :meth:`poll` answers it."""
        with self.exclusive():
            self._start(request)

    def poll(self) -> list[TurnResponse]:
        """Take one step of the engine, unless answers are waiting, and return the turns that are
        finished."""
        with held(), self.exclusive():
            if self._running and not self._ready:
                self.step()
            ready, self._ready = self._ready, []
        return ready

    def cancel(self, slots: Sequence[int] | None = None) -> None:
        """Take the requests of ``slots`` (default: all) out of the engine; they are never
        answered."""
        with self.exclusive():
            names = [name for name, request in self._running.items() if slots is None or request.slot in slots]
            for name in names:
                del self._running[name]
            self._ready = [] if slots is None else [answer for answer in self._ready if answer.slot not in slots]
            # An engine that died cannot abort; its requests ended with it.
            if names and self._broken is None:
                self.llm.llm_engine.abort_request(names)

    def generate(
        self, prompt: Tensor, lengths: Tensor, turn: Tensor, episode_id: Tensor, *, slots: Tensor, greedy: bool
    ) -> Generation:
        """Sample one response per row; see :meth:`TurnPolicy.generate`. Requests in flight go on
        beside them."""
        ids = prompt.cpu().numpy()
        rows = zip(lengths.tolist(), turn.tolist(), episode_id.tolist(), strict=True)
        with held() as leave_if_asked, self.exclusive():
            try:
                waiting = {
                    # Negative slots: slots of turns in flight are 0 and above.
                    self._start(TurnRequest(-1 - row, ids[row, :length], episode, k, greedy))
                    for row, (length, k, episode) in enumerate(rows)
                }
                while self._running.keys() & waiting:
                    leave_if_asked()
                    self.step()
                answers = {-1 - answer.slot: answer for answer in self._ready if answer.slot < 0}
            finally:
                # After an error or an interrupt too: the next call would take the answers for those
                # of its own rows.
                self.cancel(range(-len(ids), 0))
        width, n = self.sampling.max_output_tokens, len(answers)
        tokens, versions = np.zeros((n, width), np.int64), np.full((n, width), -1)
        log_probs, sizes = np.zeros((n, width), np.float32), np.zeros(n, np.int64)
        for row, answer in answers.items():
            sizes[row] = m = len(answer.tokens)
            tokens[row, :m], log_probs[row, :m], versions[row, :m] = answer[1:]
        return Generation(*(torch.from_numpy(x).to(prompt.device) for x in (tokens, sizes, log_probs, versions)))

    def _start(self, request: TurnRequest) -> str:
        self.check_usable()
        size, width = len(request.prompt), self.sampling.max_output_tokens
        if size + width > self.max_model_len:
            raise ContextLengthError(
                f"A prompt of {size} tokens and a response of max_output_tokens={width} do not fit into the engine's "
                f"max_model_len={self.max_model_len}: make the engine with a larger one, or end episodes earlier "
                "(GEMEnv's max_model_len)."
            )
        name = str(next(_NUMBERS))
        if not self._running:
            self._engine_version = None  # a live engine may have served others
        self._label()
        self._running[name] = request
        try:
            self._add(name, request.prompt.tolist(), self._params(request))
        except BaseException:
            del self._running[name]
            raise
        return name

    def _add(self, name: str, ids: list[int], params: Any) -> None:
        from vllm.inputs.engine import tokens_input

        # Not LLM.generate, which returns when its last request is finished: turns could not join a
        # running batch.
        self.llm.llm_engine.add_request(name, tokens_input(ids), params, lora_request=self.lora_request)

    def _label(self) -> None:
        """Set the version of the weights that the engine stamps on every token."""
        if self._engine_version != self.policy_version:
            self.llm.llm_engine.set_weight_version(str(self.policy_version))
            self._engine_version = self.policy_version

    def _params(self, request: TurnRequest, retry: int = 0) -> Any:
        params = copy(self._greedy_params if request.greedy else self._sampled_params)
        if not request.greedy:
            params.seed = turn_seed(seed=self.seed, episode_id=request.episode_id, turn=request.turn, retry=retry)
        return params

    def _retry(self, name: str, request: TurnRequest) -> bool:
        """Sample a turn again, with other noise; False if that was done often enough."""
        self._retries[name] += 1
        if request.greedy or self._retries[name] > RETRIES:
            return False
        found = f"episode {request.episode_id}, turn {request.turn} has a token whose log-prob is NaN or infinite"
        logging.getLogger(__name__).warning("%s: the turn is sampled again", found)
        self._running[name] = request
        self._add(name, request.prompt.tolist(), self._params(request, self._retries[name]))
        return True

    def _make_params(self, *, greedy: bool) -> Any:
        sampling = self.sampling
        # With temperature 0, vLLM itself switches off top_k, top_p and min_p.
        return self._vllm.SamplingParams(
            temperature=0.0 if greedy else sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            min_tokens=sampling.min_output_tokens,
            max_tokens=sampling.max_output_tokens,
            stop_token_ids=list(sampling.stop_ids or ()),
            # stop_token_ids has all ids that end a response; vLLM would add its own
            ignore_eos=True,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,  # arrays, not an object for each token
            detokenize=False,  # only ids are used
            # no output object for each token
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # _params copies; vLLM would copy deeply for every request
        )

    def step(self) -> list[Any]:
        """Take one step of the engine; finished turns wait for :meth:`poll`.

        Call it in :meth:`exclusive`. It is for callers with requests of their own in the engine.

        Returns:
            vLLM's outputs of requests that are not this policy's turns.

        Raises:
            EngineError: the engine failed in this step, or holds unknown weights.
            NonFiniteLogitsError: log-probs of a turn stay NaN or infinite; other turns that
                finished in this step are not lost.
        """
        self.check_usable()
        engine = self.llm.llm_engine
        try:
            self._label()
            # a client of an engine in another process
            if hasattr(engine.engine_core, "outputs_queue"):
                start.await_output(engine.engine_core)
            with self._kept_rng():
                outputs = engine.step()
        except Exception as error:
            self.invalidate(f"the engine died in a step: {type(error).__name__}: {error}")
            raise EngineError(self._broken) from error
        others, failures = [], []
        for output in outputs:
            if output.request_id not in self._running:
                others.append(output)
            elif output.finished:
                request = self._running.pop(output.request_id)
                try:
                    self._ready.append(self._answer_of(request, output))
                except (EngineError, NonFiniteLogitsError) as failure:
                    again = isinstance(failure, NonFiniteLogitsError) and self._retry(output.request_id, request)
                    failures += [] if again else [failure]
        # Only now: the engine does not report again what else has finished in this step.
        if failures:
            raise failures[0]
        if self._running and not engine.has_unfinished_requests():
            raise EngineError(
                f"{len(self._running)} turns are not answered, and the engine has none left: another policy or caller has taken its "
                "steps meanwhile, and their outputs. Let one at a time have turns in an engine, or give each an engine."
            )
        return others

    def _kept_rng(self) -> AbstractContextManager[None]:
        # On CPUs every step advances torch's generator, for requests without a seed. Restoring its
        # state from a second thread would undo the first thread's use of it too.
        if self.in_process and threading.current_thread() is threading.main_thread():
            return torch.random.fork_rng(devices=[])
        return nullcontext()

    def _answer_of(self, request: TurnRequest, output: Any) -> TurnResponse:
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise EngineError(
                f"The engine ended the response of episode {request.episode_id}, turn {request.turn}, with finish_reason "
                f"{completion.finish_reason!r}; expected 'stop' or 'length'."
            )
        tokens = np.array(completion.token_ids, np.int64)
        log_probs = np.array(completion.logprobs.logprobs, np.float32)
        if not np.isfinite(log_probs).all():
            raise NonFiniteLogitsError(
                f"The engine's log-probs in episode {request.episode_id}, turn {request.turn}, are NaN or infinite, though it was sampled up to "
                f"{RETRIES} times more. The weights have probably diverged: lower the learning rate, clip gradients, or load a checkpoint."
            )
        spans = completion.weight_versions
        versions = np.repeat([int(span.version) for span in spans], [span.end - span.start for span in spans])
        return TurnResponse(request.slot, tokens, log_probs, versions)

    # ---------------------------------------- weights

    @property
    def serves_adapters(self) -> bool:
        """Whether the engine was made with ``max_lora_rank``."""
        return self.llm.llm_engine.vllm_config.lora_config is not None

    def choose_method(self, method: str, *, adapter: bool, unserved: str | None) -> tuple[str, str]:
        """See :meth:`TurnPolicy.choose_method` and
        :class:`~torchrl_llm.weight_update.EngineWeightSync`."""
        if method == "auto":
            config = self.llm.llm_engine.vllm_config
            return weights.choose_method(config, in_process=self.in_process, adapter=adapter, unserved=unserved)
        if method == "reload" and not self.in_process:
            raise ValueError("method='reload': the engine has processes of its own; use 'shared_memory'.")
        if method == "adapter" and not self.serves_adapters:
            raise ValueError(
                "method='adapter': the engine was made without LoRA; make it with enable_lora=True, or take another method."
            )
        return super().choose_method(method, adapter=adapter, unserved=unserved)

    def exclusive(self) -> AbstractContextManager[None]:
        """The engine for this thread alone, in the order of the calls, so that a loop of polls lets
        a sync in.

        Raises:
            TimeoutError: another thread has held the engine for ten minutes.
        """
        return self._lock

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """See :meth:`TurnPolicy.updating`. Turns in flight keep their tokens, and go on with the
        new weights."""
        # Left in reverse: the engine resumes, and only then counts as usable; if resuming fails, it
        # does not.
        with self.exclusive(), super().updating(version), weights.paused(self.llm, version, asleep=self._asleep):
            yield
        self._asleep = False

    def load(self, tensors: NamedTensors, lora: LoraConfig | None = None, *, method: str = "auto") -> None:
        """See :meth:`TurnPolicy.load`. With ``"nccl"`` and ``"ipc"``, ``tensors`` is read twice:
        for names and shapes first."""
        if lora is not None:
            self.lora_request = weights.load_adapter(self.llm, dict(tensors), lora)
            return
        self.lora_request = None
        if method in weights.TRANSFERS:
            if self._transfer is None:
                self._transfer = weights.make_transfer(self.llm, method, self._transfer_address)
            self._transfer.send(tensors)
        elif self.in_process:  # no file is needed, whatever the method: both replace all weights
            weights.reload(self.llm, tensors)
        else:
            weights.reload_shared(self.llm, tensors)

    def log_probs(self, prompts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """See :meth:`TurnPolicy.log_probs`. Turns in flight go on beside it."""
        params = self._vllm.SamplingParams(
            temperature=temperature, max_tokens=1, logprobs=_LIKELIEST, seed=0, ignore_eos=True, detokenize=False
        )
        # The seed keeps the check from drawing on the generator of the process; the token that it
        # samples is not used.
        names = [f"check-{next(_NUMBERS)}" for _ in prompts]
        found: dict[str, dict[int, Any]] = {}
        with self.exclusive():
            for name, prompt in zip(names, prompts.tolist(), strict=True):
                self._add(name, prompt, params)
            while len(found) < len(names):
                outputs = {output.request_id: output for output in self.step() if output.finished}
                found |= {name: outputs[name].outputs[0].logprobs[0] for name in names if name in outputs}
        # The sampled token may come on top of the likeliest ones.
        best = [sorted(found[name].items(), key=lambda item: item[1].rank)[:_LIKELIEST] for name in names]
        log_probs = [[entry.logprob for _, entry in row] for row in best]
        return torch.tensor([[token for token, _ in row] for row in best]), torch.tensor(log_probs)

    def weights_changed(self, version: int | None = None) -> None:
        """Notify the policy of new weights in the engine: later tokens carry ``version``, by
        default the next one."""
        with self.exclusive():
            super().weights_changed(version)
            self._label()

    def drop_cache(self) -> None:
        """Forget cached prefixes, so that later turns encode their contexts again; with turns in
        flight nothing is done."""
        with self.exclusive():
            if not self._running and self._broken is None:
                self.llm.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give the GPU's memory to others: level 1 keeps the weights in the host's memory, level 2
        drops them too.

        The engine must have been made with ``sleep_mode=True``, and no turn may be in flight. Call
        :meth:`wake_up` before the next turn; after level 2 sync the weights too. On CPUs nothing
        happens.
        """
        with self.exclusive():
            if self._running:
                raise RuntimeError(f"{len(self._running)} turns are in flight: finish or cancel them before sleep().")
            self.llm.sleep(level)
            self._asleep = True

    def wake_up(self) -> None:
        """Take the memory back, what PyTorch keeps for this process included."""
        with self.exclusive():
            weights.wake(self.llm)
            self._asleep = False

    def close(self) -> None:
        """Part from the engine of ``"nccl"`` or ``"ipc"``, and shut the engine down if this policy
        made it; a second call does nothing."""
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        if self._owned and self.llm is not None:
            self.invalidate("the policy was closed.")
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
