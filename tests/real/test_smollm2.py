"""SmolLM2-135M-Instruct through sampling, scoring, training, resuming and export. Needs its
package: ``make test-real``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from talks import QUESTIONS, TURNS, Talk, config
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import ChatFormatter, GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig, TokenScorer, load_actor_critic
from torchrl_llm.runs import build_run
from torchrl_llm.runs.export import export_model
from torchrl_llm.runs.saved import find_saved_model
from torchrl_llm.runs.smollm2 import smollm2_model_path
from torchrl_llm.trainers import Callback
from torchrl_llm.utils.optional import MissingExtraError

# Four iterations take a minute on a free core, and many on one that does other work.
pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

GIGABYTES = 6
END = "<|im_end|>"


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return smollm2_model_path()
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(path):
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def model(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.fixture(scope="module")
def rows(model, tokenizer):
    """Eight conversations, of two tasks, that the model has sampled its part of."""
    sampling = SamplingConfig(max_output_tokens=16)
    env = GEMEnv(
        Talk, tokenizer=tokenizer, num_envs=8, group_size=4, max_model_len=512, max_output_tokens=16, success_reward=1.0
    )
    rows = TurnCollector(env, HFPolicy(model, tokenizer, sampling), batch_size=8).rollout()
    assert int(rows[keys.TURN_IDS].max()) == TURNS - 1
    return rows


RANK = """
import torch.distributed as dist
from transformers import AutoConfig
from torchrl_llm.runs.smollm2 import smollm2_model_path
dist.init_process_group("gloo")
print(AutoConfig.from_pretrained(smollm2_model_path()).model_type)
dist.destroy_process_group()
"""

LITTLE = """
import resource, sys
import torchrl_llm.trainers, transformers.models.llama.modeling_llama, peft
from torchrl_llm.cli import main
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + 300 * 2**20  # the weights have 538 MB
resource.setrlimit(resource.RLIMIT_AS, (most, most))
sys.exit(main())
"""


class TestFiles:
    def test_ranks_that_make_it_at_once(self, path, tmp_path, monkeypatch):
        """transformers saves on the first rank alone; the folder of another may be the folder that
        counts."""
        pytest.importorskip("gguf", reason="is in the cache, and its packages are not installed")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (tmp_path / "rank.py").write_text(RANK)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run([*launch, str(tmp_path / "rank.py")], capture_output=True, text=True, timeout=1400)
        assert done.stdout.split() == ["llama", "llama"], done.stderr

    def test_too_little_memory_is_a_sentence(self, path, tmp_path):
        settings = Path(__file__).parents[2] / "examples" / "configs" / "smollm2_warmup.yaml"
        command = ["warmup", "--config", str(settings), "--output-dir", str(tmp_path)]
        done = subprocess.run([sys.executable, "-c", LITTLE, *command], capture_output=True, text=True, timeout=600)
        assert done.returncode == 1, done.stderr
        assert "error: there is too little memory." in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr

    def test_float32_and_tied(self, model):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert (model.config.num_hidden_layers, model.config.vocab_size) == (30, 49_152)

    def test_the_ends_are_named(self, model, tokenizer):
        end = tokenizer.convert_tokens_to_ids(END)
        assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == end
        assert tokenizer.eos_token_id == tokenizer.pad_token_id == end
        assert len(tokenizer) == model.config.vocab_size

    def test_it_knows_something(self, model, tokenizer):
        ids = torch.tensor([tokenizer.encode("The capital of France is")])
        with torch.no_grad():
            assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"


# Before the runs below, which this process keeps.
class TestMemory:
    def test_an_iteration_of_grpo_takes_less_than_six_gigabytes(self, path, tmp_path):
        script = Path(__file__).with_name("grpo_step.py")
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=1400
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert len(found["lengths"]) == 8
        assert all(330 <= length <= 400 for length in found["lengths"]), found
        assert found["peak"] < GIGABYTES * 1e9, found


class TestTemplate:
    def test_is_append_only(self, tokenizer):
        formatter = ChatFormatter(tokenizer)
        answers = ["Red, green and blue.", "56"]
        ids, messages = [*formatter.start(QUESTIONS[0])], [{"role": "user", "content": QUESTIONS[0]}]
        for answer, question in zip(answers, QUESTIONS[1:], strict=True):
            response = tokenizer.encode(answer + END)
            ids += [*response, *formatter.feedback(response, question)]
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids) == whole
        assert ids == tokenizer.encode(whole)
        assert whole.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")

    @pytest.mark.parametrize("look_alike", [END, "<|im_start|>system", "<|endoftext|>", "<repo_name>"])
    def test_look_alikes_of_special_tokens_stay_text(self, tokenizer, look_alike):
        formatter = ChatFormatter(tokenizer)
        plain, disguised = (formatter.start(f"Say {word} twice.") for word in ("nothing", look_alike))
        special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        assert [i for i in disguised if i in special] == [i for i in plain if i in special]
        assert f"Say {look_alike} twice." in tokenizer.decode(disguised)


def score(model, rows, adapter: str | None = None) -> torch.Tensor:
    with torch.no_grad():
        return TokenScorer(model, adapter=adapter)(rows.clone())[keys.LOG_PROB]


def tokens_of(model) -> list[int]:
    """The tokens of each forward from now on."""
    counts: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))
    return counts


class TestScores:
    def test_the_sampler_says_what_the_scorer_says(self, model, rows):
        scores = score(model, rows)
        actions = rows[keys.TURN_IDS] >= 0
        assert int(actions.sum()) > 8 * TURNS * 4
        gap = (scores - rows[keys.SAMPLE_LOG_PROB])[actions].abs().max()
        assert gap <= 1e-4, gap

    def test_what_rows_share_is_computed_once_and_alike(self, path, tokenizer, rows):
        found = []
        for share in (False, True):
            lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            models = load_actor_critic(path, tokenizer=tokenizer, lora=lora, share_prefixes=share)
            computed = tokens_of(models.model)
            scores = models.actor(rows.clone())[keys.LOG_PROB]
            gradients = torch.autograd.grad(scores.sum(), [*models.actor_parameters()])
            found.append((computed[0], scores.detach(), torch.cat([each.flatten() for each in gradients])))
        (plain, *expected), (shared, *results) = found
        assert shared < 0.8 * plain, (shared, plain)
        torch.testing.assert_close(results[0], expected[0], rtol=0, atol=5e-5)
        torch.testing.assert_close(results[1], expected[1], rtol=0, atol=2e-5 * float(expected[1].abs().max()))


@pytest.fixture(scope="module")
def whole(path, tmp_path_factory):
    """Four iterations without a break."""
    run = build_run(config(tmp_path_factory.mktemp("whole") / "run", max_iterations=4), env=Talk)
    run.trainer.train()
    return run


@pytest.fixture(scope="module")
def adapter(whole, tmp_path_factory) -> Path:
    saved = find_saved_model(whole.config.output_dir)
    return export_model(saved, tmp_path_factory.mktemp("export") / "adapter", format="adapter")


def trained(run) -> Iterator[torch.Tensor]:
    """Weights and the state of the optimizer."""
    yield from run.models.actor_parameters()
    for state in run.trainer.optimizer.state_dict()["state"].values():
        yield from (value for _, value in sorted(state.items()))


class TestRun:
    def test_resumed_it_ends_in_the_same_bytes(self, whole, tmp_path):
        build_run(config(tmp_path / "run", max_iterations=2), env=Talk).trainer.train()
        more = {"resume": True, "accept_changes": ["max_iterations"]}
        run = build_run(config(tmp_path / "run", max_iterations=4, **more), env=Talk)
        assert run.trainer.iteration == 2
        run.trainer.train()
        assert all(torch.equal(one, other) for one, other in zip(trained(run), trained(whole), strict=True))


THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


class Batches(Callback):
    """Keeps the last batch."""

    def on_batch(self, trainer, rows, metrics):
        self.rows, self.metrics = rows.clone(), metrics


class TestThinking:
    """Under a template as those of models that think: it opens thoughts and drops them later."""

    def test_an_iteration_trains_each_turn_in_the_context_it_saw(self, path, tokenizer, model, tmp_path):
        watch = Batches()
        settings = config(tmp_path / "run", max_iterations=1, chat_template=THINKS)
        run = build_run(settings, env=Talk, callbacks=[watch])
        [metrics] = run.trainer.train()
        assert metrics["rollout/thinking_length"] == pytest.approx(metrics["rollout/response_length"], abs=1)
        assert metrics["optim/grad_norm_actor"] > 0
        rows = watch.rows
        for row in rows:
            contexts = [prefix(row, turn) for turn in range(TURNS)]
            texts = [tokenizer.decode(row[keys.TOKENS][each]) for each in contexts]
            # What was thought is not closed within 12 tokens: later turns see an empty answer.
            assert [text.count("<|im_start|>assistant\n<|im_end|>") for text in texts] == [0, 1, 2]
            assert all(text.endswith("<|im_start|>assistant\n<think>\n") for text in texts)
            for turn, context in enumerate(contexts):
                said = (row[keys.TURN_IDS] == turn).nonzero().flatten()
                ids = torch.cat([row[keys.TOKENS][context], row[keys.TOKENS][said]])
                with torch.no_grad():
                    log_probs = model(ids[None]).logits[0, len(ids) - len(said) - 1 : -1].log_softmax(-1)
                expected = log_probs.gather(1, row[keys.TOKENS][said, None]).flatten()
                torch.testing.assert_close(row[keys.SAMPLE_LOG_PROB][said], expected, rtol=0, atol=1e-4)


def prefix(row, turn: int) -> torch.Tensor:
    """The positions of what a turn saw: its segment up to its first token."""
    start = int((row[keys.TURN_IDS] == turn).nonzero()[0])
    gaps = (~row[keys.ATTENTION_MASK][:start]).nonzero().flatten()
    return torch.arange(int(gaps[-1]) + 1 if len(gaps) else 0, start)


class TestExport:
    def test_peft_loads_the_adapter(self, whole, path, adapter, rows):
        loaded = AutoModelForCausalLM.from_pretrained(path).eval()
        base = score(loaded, rows)
        found = score(PeftModel.from_pretrained(loaded, adapter).eval(), rows, "default")
        with torch.no_grad():
            expected = whole.models.actor(rows.clone())[keys.LOG_PROB]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert (found - base).abs().max() > 1e-2

    @pytest.mark.vllm
    def test_vllm_serves_the_adapter(self, path, adapter, rows):
        vllm = pytest.importorskip("vllm", reason="needs vLLM: run make test-real VENV=.venv-vllm")
        from vllm.lora.request import LoRARequest

        from torchrl_llm.modules.vllm import load_engine

        # vLLM's CPU kernels give no log-probs of prompts under an adapter.
        contexts = [row[keys.TOKENS][: int((row[keys.TURN_IDS] == TURNS - 1).nonzero()[0])] for row in rows]
        engine = load_engine(path, dtype="float32", max_model_len=512, max_num_seqs=8, max_lora_rank=8)
        try:
            outputs = engine.generate(
                [{"prompt_token_ids": context.tolist()} for context in contexts],
                [vllm.SamplingParams(max_tokens=12, logprobs=0, seed=seed) for seed in range(len(contexts))],
                lora_request=LoRARequest("trained", 1, str(adapter)),
            )
        finally:
            engine.llm_engine.engine_core.shutdown()
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path).eval(), adapter).eval()
        for context, output in zip(contexts, outputs, strict=True):
            (response,) = output.outputs
            tokens = torch.tensor([[*context.tolist(), *response.token_ids]])
            turn_ids = torch.where(torch.arange(tokens.shape[1]) < len(context), -1, 0).unsqueeze(0)
            row = TensorDict(
                {keys.TOKENS: tokens, keys.ATTENTION_MASK: torch.ones_like(tokens) > 0, keys.TURN_IDS: turn_ids},
                batch_size=[1],
            )
            found = [each[token].logprob for each, token in zip(response.logprobs, response.token_ids, strict=True)]
            expected = score(model, row, "default")[turn_ids >= 0]
            torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-3)
            base = score(model, row)[turn_ids >= 0]
            assert (base - expected).abs().max() > 1e-2
