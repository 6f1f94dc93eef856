"""An engine that the package does not know: no cache, one token of every request a step. Ray's
workers import this module."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import Generation, SamplingConfig, TurnPolicy, TurnResponse
from torchrl_llm.modules.engine import TurnRequest, sync_step
from torchrl_llm.modules.sampling import decide_stop_ids, draw, likeliest, turn_noise
from torchrl_llm.testing.environments import Slow
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer

SAMPLING = SamplingConfig(max_output_tokens=12, temperature=0.7)


class ThirdEngine(TurnPolicy):
    owns_weights = True

    def __init__(self, model, tokenizer, sampling=SAMPLING, *, seed=0):
        super().__init__(decide_stop_ids(sampling, None, tokenizer, vocabulary=len(tokenizer)), seed=seed)
        self.model, self.lock = model.eval(), threading.RLock()
        self.running = {}

    # ---------------------------------------- turns

    @property
    def exact(self):
        return True

    @property
    def pending(self):
        return len(self.running)

    def submit(self, request):
        with self.lock:
            self.check_usable()
            noise = None
            if not request.greedy:
                width = self.sampling.max_output_tokens
                noise = turn_noise(seed=self.seed, episode_id=[request.episode_id], turn=[request.turn], width=width)[0]
            # The prompt may change before the answer: it is a view.
            self.running[request.slot] = (request.prompt.copy(), noise, [], [], [])

    def cancel(self, slots=None):
        with self.lock:
            for slot in list(self.running) if slots is None else slots:
                self.running.pop(slot, None)

    @torch.no_grad()
    def poll(self):
        with self.lock:
            self.check_usable()
            if not self.running:
                return []
            contexts = [np.concatenate([prompt, tokens]) for prompt, _, tokens, *_ in self.running.values()]
            logits = self.next_logits([torch.from_numpy(context.astype(np.int64)) for context in contexts])
            for row, (_, noise, tokens, log_probs, versions) in zip(logits, self.running.values(), strict=True):
                scaled = row[None] / self.sampling.temperature
                token, log_prob = likeliest(scaled) if noise is None else draw(scaled, noise[len(tokens), None])
                tokens.append(int(token))
                log_probs.append(float(log_prob))
                versions.append(self.policy_version)
            return [self.answer(slot) for slot in list(self.running) if self.is_over(self.running[slot][2])]

    def is_over(self, tokens):
        return len(tokens) == self.sampling.max_output_tokens or tokens[-1] in self.stop_ids

    def answer(self, slot):
        _, _, tokens, log_probs, versions = self.running.pop(slot)
        return TurnResponse(slot, np.array(tokens), np.array(log_probs, np.float32), np.array(versions))

    def next_logits(self, contexts):
        ids = pad_sequence(contexts, batch_first=True)
        last = torch.tensor([len(context) - 1 for context in contexts])
        return self.model(input_ids=ids).logits[torch.arange(len(ids)), last]

    def generate(self, prompt, lengths, turn, episode_id, *, slots, greedy):
        with self.lock:
            for i, row in enumerate(prompt):
                ids = row[: lengths[i]].numpy()
                self.submit(TurnRequest(-1 - i, ids, int(episode_id[i]), int(turn[i]), greedy))
            answers = {}
            while len(answers) < len(prompt):
                answers |= {-1 - answer.slot: answer for answer in self.poll() if answer.slot < 0}
        fields = []
        for field, fill in (("tokens", 0), ("log_probs", 0.0), ("versions", -1)):
            rows = [torch.from_numpy(getattr(answers[i], field)) for i in range(len(prompt))]
            padded = pad_sequence(rows, batch_first=True, padding_value=fill)
            missing = self.sampling.max_output_tokens - padded.shape[1]
            fields.append(torch.nn.functional.pad(padded, (0, missing), value=fill))
        sizes = torch.tensor([len(answers[i].tokens) for i in range(len(prompt))])
        return Generation(fields[0], sizes, fields[1], fields[2])

    # ---------------------------------------- weights

    def exclusive(self):
        return self.lock

    @contextmanager
    def updating(self, version):
        with self.lock, super().updating(version):
            yield

    def load(self, tensors, lora=None, *, method="auto"):
        with sync_step("loading the weights"), torch.no_grad():
            assert lora is None
            self.model.load_state_dict(dict(tensors))

    @torch.no_grad()
    def log_probs(self, prompts, temperature):
        log_probs = (self.model(input_ids=prompts).logits[:, -1] / temperature).log_softmax(-1)
        values, tokens = log_probs.topk(8)
        return tokens, values


class Deaf(ThirdEngine):
    """Does not take the weights that it is sent."""

    def load(self, tensors, lora=None, *, method="auto"):
        dict(tensors)


def make_engine(kind=ThirdEngine):
    return kind(load_tiny_model(), load_tiny_tokenizer())


def load(path, tokenizer, sampling, *, seed, kind="ThirdEngine"):
    """What the setting engine_class names."""
    return globals()[kind](AutoModelForCausalLM.from_pretrained(path), tokenizer, sampling, seed=seed)


def dict_of(*args, **options):
    return {}


def make_env():
    game = partial(Slow, "game:GuessTheNumber-v0-easy", mean=0.01, sigma=1.0)
    return GEMEnv(game, tokenizer=load_tiny_tokenizer(), num_envs=4, max_model_len=256, max_output_tokens=12)
