"""In-process generation with a transformers model: :class:`HFPolicy`.

One call a turn for all active slots, with keys and values kept between turns.
:mod:`torchrl_llm.modules.hf._kv_cache` stores keys and values, :mod:`torchrl_llm.modules.sampling`
has distributions and noise, :mod:`torchrl_llm.modules.policy` handles idle slots and TensorDict
keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor, nn

from torchrl_llm.modules.adapters import parameters_under
from torchrl_llm.modules.checks import check_vocabulary
from torchrl_llm.modules.engine import NamedTensors, NonFiniteLogitsError, TurnRequest, WeightSyncError, sync_step
from torchrl_llm.modules.hf._cached_model import CheckedModel
from torchrl_llm.modules.hf._kv_cache import Ints
from torchrl_llm.modules.lm import causal_lm, generation_end_ids, is_full_precision, vocabulary_of
from torchrl_llm.modules.policy import Generation, TurnPolicy
from torchrl_llm.modules.sampling import SamplingConfig, SamplingProcessor, decide_stop_ids, draw, likeliest, turn_noise
from torchrl_llm.modules.scorer import next_log_probs
from torchrl_llm.modules.weights import set_adapter_tensors
from torchrl_llm.utils.fingerprint import fingerprint
from torchrl_llm.utils.interrupts import held

_LIKELIEST = 8  # log-probs per prompt of a parity check
# elements of each tensor that a fingerprint reads, at least, where there are as many
_FINGERPRINT = 4096
_CHECK_EVERY = {"cpu": 1}
"""Tokens between two looks at which responses are finished, by kind of device: each look waits for
the device, which a CPU does not notice."""
_CHECK_EVERY_ELSEWHERE = 8
_ROWS = 8  # the multiple of rows that a batch shrinks to where shapes are to repeat
_SHRINK = 0.75  # finished rows are taken out of the batch when at most this share is unfinished


class HFPolicy(TurnPolicy):
    """Samples responses from a transformers causal language model, in this process.

    Exact and stateless to the caller: ids depend on the weights, the prompt and
    ``(seed, episode_id, turn)``; never on the neighbors in the batch, the slot, or what was
    generated before, but for rounding: a GPU chooses the order of its sums by the shape of the
    batch, and near a tie another token may follow. Keys and values are kept by slot, so that a turn
    computes only the tokens which the slot has not seen; a cached token is used only where the
    prompt agrees with it. Equal prompts (the members of a group) are computed once, and so is a
    prefix that another slot holds.

    The log-prob recorded belongs to the distribution left by all processors of ``sampling``, in
    float32; with greedy decoding, the log-prob of the likeliest token under that same distribution.
    Nothing comes from the model's ``generation_config`` but its list of end tokens. The
    distribution covers the model's whole vocabulary: where it is padded beyond the tokenizer's (as
    Qwen's is), the padding ids keep the probability that the model gives them.

    The cache is dropped when the weights change: by :meth:`weights_changed`, and because every call
    compares the parameters' identities, version counters and a few sampled elements with what they
    were at the last call. Without the notice, only a change that misses all sampled elements is
    overlooked.

    For the time of a turn LoRA layers are replaced by plain ones, without touching the model's
    parameters: small float32 ones (up to 64 MiB in all) are fused with their base layers, others
    add the products with the adapter's factors, in the dtype of the base. Keys and values take
    ``slots * tokens`` of memory until :meth:`drop_cache`.

    Args:
        model: a causal language model of transformers with attention layers only (``sdpa`` or
            ``eager``), or a ``PeftModel`` around one. Training mode is switched off during
            generation and put back after.
        tokenizer: the model's tokenizer: its end-of-turn id stops responses, its vocabulary is
            checked.
        sampling: how responses are sampled; default ``SamplingConfig()``.
        adapter: the LoRA adapter to generate with; ``None``: the model itself, adapters off.
        seed: the first part of the noise key, >= 0.
        check_every: tokens between two looks at which responses are finished. Each look waits for
            the device, and a response is sampled on until the next one; what lies behind its end is
            dropped. Default ``None``: 1 on a CPU, elsewhere 8.
        bucket: each token attends to a multiple of so many columns of the cache, masked behind it,
            and a batch shrinks to multiples of 8 rows: a GPU's kernels meet few shapes, each many
            times. Default ``None``: 128, on a CPU 1, which is off; 1 too for a model that computes
            something else under masks wider than its context (GPTNeo).
        compile_decode: put the backbone's forward of a sampled token through ``torch.compile``, in
            its default mode. Prompts and the head stay as they are. It compiles in the first turn,
            which takes from seconds to minutes, and once more when a single row is left; sizes are
            symbols, so no number of rows, context or cache compiles again, nor do new weights. Ids
            and log-probs change by rounding. The first step of each graph is compared with the one
            without the compiler. Default False.

    Attributes:
        stop_ids: the ids that end a response: ``sampling.stop_ids``, or those found in tokenizer
            and model.
        compile_decode: as given.

    Raises:
        UnsupportedModelError: a model with state-space, convolution or chunked layers, another
            attention implementation, prompt-learning adapters, or one whose cached forward
            disagrees with its plain one (both are compared on a few tokens); or one whose compiled
            forward disagrees with that without the compiler (from ``forward``).
        VocabularyMismatchError: the tokenizer has ids that the model does not embed.
        ContextLengthError: prompt and longest response exceed the model's positions; or they exceed
            an attention window of its configuration, beyond which the cached forward disagrees with
            the plain one. The two are compared when the first context is longer than a window (from
            ``forward``).
        NonFiniteLogitsError: the model's logits are NaN or infinite (from ``forward``).
        DecodeCompilationError: ``compile_decode``, and PyTorch cannot compile the forward: dynamic
            RoPE, DoRA, no C++ compiler on a CPU (from ``forward``).

    Examples:
        >>> from tensordict import TensorDict
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
        >>> vocabulary = {"<end>": 0} | {str(i): i for i in range(1, 16)}
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<end>")), eos_token="<end>")
        >>> model = Qwen2ForCausalLM(Qwen2Config(
        ...     vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...     num_key_value_heads=1, bos_token_id=None, eos_token_id=0))
        >>> policy = HFPolicy(model, tokenizer, SamplingConfig(max_output_tokens=4))
        >>> turn = TensorDict(
        ...     tokens=dict(prompt=torch.tensor([[3, 4, 5], [6, 0, 0]]), prompt_length=torch.tensor([[3], [1]])),
        ...     turn=torch.zeros(2, 1, dtype=torch.int64), episode_id=torch.tensor([[0], [1]]), batch_size=[2])
        >>> policy(turn)["tokens", "response"].shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        sampling: SamplingConfig | None = None,
        *,
        adapter: str | None = None,
        seed: int = 0,
        check_every: int | None = None,
        bucket: int | None = None,
        compile_decode: bool = False,
    ) -> None:
        for name, value in (("check_every", check_every), ("bucket", bucket)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected None, or a number of tokens >= 1.")
        check_vocabulary(model, tokenizer)
        sampling = sampling or SamplingConfig()
        sampling = decide_stop_ids(sampling, generation_end_ids(model), tokenizer, vocabulary=vocabulary_of(model))
        super().__init__(sampling, seed=seed)
        self.model = model
        self.adapter = adapter
        self._engine = CheckedModel(model, adapter=adapter, bucket=bucket, compile_decode=compile_decode)
        self._processor = SamplingProcessor(sampling)
        self.compile_decode = compile_decode
        self._check_every = check_every

    @property
    def check_every(self) -> int:
        """Tokens between two looks at which responses are finished."""
        return self._check_every or _CHECK_EVERY.get(self._engine.device.type, _CHECK_EVERY_ELSEWHERE)

    @property
    def logprobs_match_trainer(self) -> bool:
        """Whether a scorer at the same temperature and ``min_output_tokens`` computes the log-probs
        recorded here.

        True without truncation and penalty in float32 or wider, to about 1e-6, and with TF32 to
        about 1e-3. In half precision the two orders of computation differ by about 1e-2.
        """
        return not self.sampling.truncates and is_full_precision(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights, or bfloat16 where it multiplies by them in that
        (``base_products``)."""
        return self._engine.dtype

    @property
    def serves_adapters(self) -> bool:
        """Whether the policy samples with an adapter: then :meth:`load` takes an adapter, else
        whole models."""
        return self.adapter is not None

    def load(self, tensors: NamedTensors, lora: LoraConfig | None = None, *, method: str = "auto") -> None:
        """Copy weights into the model, which must be this policy's own; see
        :meth:`TurnPolicy.load`."""
        with sync_step("loading the weights"), torch.no_grad():
            if self.adapter is None:
                if lora is not None:
                    raise WeightSyncError("The weights are those of a LoRA adapter, and the policy's model has none.")
                causal_lm(self.model).load_state_dict(dict(tensors))
            elif lora is None:
                raise WeightSyncError(
                    f"The weights are those of a whole model, and the policy samples with the adapter {self.adapter!r}: "
                    "make it with a model without LoRA."
                )
            else:
                set_adapter_tensors(self.model, self.adapter, dict(tensors))

    def log_probs(self, prompts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """See :meth:`TurnPolicy.log_probs`; by a forward without a cache."""
        found = next_log_probs(self.model, self.adapter, prompts, temperature)
        log_probs, tokens = found.topk(min(_LIKELIEST, found.shape[-1]))
        return tokens, log_probs

    def weights_changed(self, version: int | None = None) -> None:
        """Drop the cache; later tokens carry ``version``, by default the next one."""
        super().weights_changed(version)
        self.drop_cache()

    def drop_cache(self) -> None:
        """Free the memory of the cached keys and values. Costs time at the next turn, never
        correctness."""
        self._engine.drop()

    def fingerprint(self) -> str:
        """Also of the weights that it samples with, of some thousand elements of each tensor."""
        weights = [parameter.detach().flatten() for parameter in parameters_under(self.model, self.adapter)]
        sampled = [each[:: max(1, len(each) // _FINGERPRINT)].cpu().contiguous() for each in weights]
        return fingerprint((super().fingerprint(), [bytes(each.view(torch.uint8).numpy()) for each in sampled]))

    def generate(
        self, prompt: Tensor, lengths: Tensor, turn: Tensor, episode_id: Tensor, *, slots: Tensor, greedy: bool
    ) -> Generation:
        """Sample one response per row; see :meth:`TurnPolicy.generate`. ``slots`` are distinct."""
        # Prefixes are compared on the host, after one transfer: on the device every comparison
        # would wait for it.
        prompts, sizes = prompt.cpu().numpy(), lengths.cpu().numpy()
        width = self.sampling.max_output_tokens
        places = {"episode_id": episode_id.tolist(), "turn": turn.tolist()}
        noise = None if greedy else turn_noise(seed=self.seed, width=width, **places)
        # A signal waits for the end of a token: LoRA layers of the trained model are exchanged
        # inside.
        with held() as leave_if_asked, self._engine.session():
            logits: Tensor | None = self._engine.prefill(prompts, sizes, slots=slots.cpu().numpy(), room=width)
            responses = _Responses(self, prompts, sizes, noise, check_every=self.check_every)
            while logits is not None:
                leave_if_asked()
                logits = responses.advance(logits)
            generation = responses.close()
        self._check_finite(generation.log_probs)
        # Copied: autograd refuses tensors made in inference mode.
        return Generation(*(x.to(prompt.device, copy=True) for x in generation[:3]))

    def stream(self, request: TurnRequest) -> Iterator[int]:
        """Sample one response token by token: the ids that :meth:`poll` would answer, each as soon
        as it is sampled.

        The model is this iterator's until it is exhausted or closed.

        Args:
            request: of a single turn; none may be pending.

        Yields:
            The ids, the stop id included.

        Raises:
            NonFiniteLogitsError: the model's logits are NaN or infinite.
        """
        prompts, sizes = request.prompt[None], np.array([len(request.prompt)])
        width, places = self.sampling.max_output_tokens, {"episode_id": [request.episode_id], "turn": [request.turn]}
        noise = None if request.greedy else turn_noise(seed=self.seed, width=width, **places)
        with self._engine.session():
            logits: Tensor | None = self._engine.prefill(prompts, sizes, slots=np.array([request.slot]), room=width)
            # At every token, for what follows the end is not to be yielded.
            responses = _Responses(self, prompts, sizes, noise, check_every=1)
            while logits is not None:
                logits = responses.advance(logits)
                token, log_prob = responses.newest()
                self._check_finite(log_prob)
                yield token
            responses.close()

    def _check_finite(self, log_probs: Tensor) -> None:
        if not bool(torch.isfinite(log_probs).all()):
            self.drop_cache()
            raise NonFiniteLogitsError(
                f"The logits of {type(causal_lm(self.model)).__name__} are NaN or infinite, so nothing can be sampled. "
                "The weights have probably diverged: lower the learning rate, clip gradients, or load a checkpoint."
            )


class _Responses:
    """The responses of one turn while they are sampled. Row i of every tensor is row i of the
    cache.

    The first ``_alive`` rows are unfinished; finished rows are moved behind them and take part in
    no further forward.
    """

    def __init__(
        self, policy: HFPolicy, prompts: Ints, lengths: Ints, noise: Tensor | None, *, check_every: int
    ) -> None:
        self._engine, self._processor, sampling = policy._engine, policy._processor, policy.sampling
        n, width, device = len(lengths), sampling.max_output_tokens, self._engine.device
        self._prompts, self._lengths = prompts, lengths
        # The rows of the cache move when others finish, the batch of the caller does not.
        self._order = np.arange(n)  # the batch row that each cache row holds
        self._alive, self._index, self._check_every = n, 0, check_every
        self._noise = None if noise is None else noise.to(device)
        self._tokens = torch.zeros(n, width, dtype=torch.int64, device=device)
        # float32 whatever the model computes in: between -8 and -16, bfloat16 log-probs would have
        # steps of 1/16.
        self._log_probs = torch.zeros(n, width, dtype=torch.float32, device=device)
        self._positions = torch.from_numpy(lengths).to(device)
        self._finished = torch.zeros(n, dtype=torch.bool, device=device)
        self._stops: Tensor | None = None
        if sampling.stop_ids:
            self._stops = torch.zeros(vocabulary_of(policy.model), dtype=torch.bool, device=device)
            self._stops[list(sampling.stop_ids)] = True
        self._context: Tensor | None = None
        # padded with each prompt's first id, which adds no id to the row
        if self._processor.needs_context:
            padded = np.pad(prompts, ((0, 0), (0, width)))
            padded = np.where(np.arange(padded.shape[1]) < lengths[:, None], padded, prompts[:, :1])
            self._context = torch.from_numpy(padded).to(device)

    def advance(self, logits: Tensor) -> Tensor | None:
        """Sample the next token of each unfinished row; returns the logits ``[k, V]`` after it, or
        None at the end."""
        context = None if self._context is None else self._context[: self._alive]
        logits = self._processor(logits, index=self._index, context=context)
        noise = None if self._noise is None else self._noise[: self._alive, self._index]
        ids, log_probs = likeliest(logits) if noise is None else draw(logits, noise)
        self._tokens[: self._alive, self._index] = ids
        self._log_probs[: self._alive, self._index] = log_probs
        self._index += 1
        if self._index == self._tokens.shape[1]:
            return None
        if self._stops is not None:
            self._finished[: self._alive] |= self._stops[ids]
            if self._index % self._check_every == 0:
                self._drop_finished()
            if not self._alive:
                return None
            ids = self._tokens[: self._alive, self._index - 1]
        positions = self._positions[: self._alive] + (self._index - 1)
        if self._context is not None:
            self._context[: self._alive].scatter_(1, positions.unsqueeze(1), ids.unsqueeze(1))
        longest = int(self._lengths[self._order[: self._alive]].max())
        return self._engine.step(ids, positions, width=longest + self._index)

    def newest(self) -> tuple[int, Tensor]:
        """The last token of the first row, and its log-prob."""
        return int(self._tokens[0, self._index - 1]), self._log_probs[0, self._index - 1]

    def _drop_finished(self) -> None:
        finished = self._finished[: self._alive].cpu().numpy()
        if self._engine.bucket > 1 and not finished.all():
            # Some finished rows stay for a batch of a shape that occurs again.
            finished = finished.copy()
            finished[np.flatnonzero(finished)[: -int((~finished).sum()) % _ROWS]] = False
        alive = self._alive - int(finished.sum())
        # Not at every end: taking rows out copies the keys and values of the rows that move.
        if alive and alive > _SHRINK * self._alive:
            return
        if alive:
            holes = np.flatnonzero(finished[:alive])
            movers = alive + np.flatnonzero(~finished[alive:])
            source = np.arange(len(self._order))
            source[holes], source[movers] = movers, holes
            self._engine.permute(source)
            self._order = self._order[source]
            index = torch.from_numpy(source).to(self._tokens.device)
            for name in ("_noise", "_tokens", "_log_probs", "_positions", "_finished", "_context"):
                if (value := getattr(self, name)) is not None:
                    setattr(self, name, value[index])
        self._alive = alive

    def close(self) -> Generation:
        """Record in the cache what it holds; returns the responses in the order of the batch."""
        width = self._tokens.shape[1]
        ends = torch.full_like(self._positions, width)
        if self._stops is not None:
            # A finished row is sampled on until it is taken out; its end is the first stop id.
            hits = self._stops[self._tokens]
            ends = torch.where(hits.any(1), hits.int().argmax(1) + 1, ends)
        order, tokens = self._order, self._tokens.cpu().numpy()
        self._engine.remember(self._prompts[order], self._lengths[order], tokens, ends.cpu().numpy())
        back = torch.from_numpy(np.argsort(order)).to(ends.device)
        return Generation(self._tokens[back], ends[back], self._log_probs[back])
