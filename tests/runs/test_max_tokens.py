"""``max_tokens`` where none is given: from the shapes of the model and the kind of device, and kept
by a resumed run."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from small_runs import EVERY_ALGORITHM, small_config, weights
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig

from torchrl_llm.modules import load_actor_critic, use_adapter
from torchrl_llm.modules.lm import hidden_states
from torchrl_llm.runs import ConfigError, RunSettings, build_run, memory
from torchrl_llm.runs.build import make_lora
from torchrl_llm.runs.memory import default_max_tokens, empty_model, memory_estimate, what_to_lower, with_max_tokens
from torchrl_llm.testing.pretended_gpu import pretended_gpu
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer
from torchrl_llm.trainers import TrainerConfig
from torchrl_llm.trainers.distributed import Distributed

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A folder with the shapes of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1_536, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    config.save_pretrained(folder := tmp_path_factory.mktemp("smollm2"))
    return str(folder)


@pytest.fixture
def little_room(monkeypatch):
    """The tiny model's run gets a part of the usual number."""
    give_room(monkeypatch, 2**23)


def give_room(patch, size):
    patch.setattr(memory, "_ROOM", size)


@pytest.fixture
def alone():
    return Distributed.of(Accelerator(cpu=True))


class TestChoice:
    @pytest.mark.parametrize(
        ("settings", "device", "expected"),
        [
            ({}, "cpu", 2_048),
            ({"gradient_checkpointing": True}, "cpu", 16_384),
            ({"max_model_len": 300}, "cpu", 2_048),
            ({"max_model_len": 3_000}, "cpu", 3_000),  # a row is not cut
            ({"max_model_len": 20_000}, "cpu", 16_384),
        ],
    )
    def test_of_smollm2(self, smollm2, settings, device, expected):
        config = RunSettings.from_values(model_path=smollm2, **settings)
        assert default_max_tokens(config, empty_model(config), device=torch.device(device)) == expected

    @pytest.mark.parametrize(
        ("settings", "card", "expected"),
        [
            ({}, 24, 4_096),
            ({}, 80, 16_384),
            ({"dtype": "bfloat16"}, 24, 8_192),
            ({"dtype": "bfloat16"}, 80, 16_384),
            ({"gradient_checkpointing": True}, 24, 16_384),
            ({"dtype": "bfloat16", "max_model_len": 20_000}, 24, 16_384),
        ],
    )
    def test_of_smollm2_on_a_card(self, smollm2, settings, card, expected):
        """A GPU waits for launches where a forward has few tokens."""
        config = RunSettings.from_values(model_path=smollm2, **settings)
        model, cuda = empty_model(config), torch.device("cuda")
        assert default_max_tokens(config, model, device=cuda, card=card * GIB) == expected
        with pretended_gpu(memory=card * GIB):
            assert default_max_tokens(config, model, device=cuda) == expected

    def test_on_a_card_the_run_fits(self, smollm2):
        """Beside an engine with its share of the card."""
        config = RunSettings.from_values(
            model_path=smollm2, dtype="bfloat16", policy="vllm", gpu_memory_utilization=0.9
        )
        model, cuda = empty_model(config), torch.device("cuda")

        def of(**settings):
            return default_max_tokens(config.replace(**settings), model, device=cuda, card=40 * GIB)

        # 2 of 40 GiB are left, of which weights take 0.3, logits 1.5, and 2,048 tokens 1.2
        assert (of(), of(chunk_logits=2**20), of(sleep_mode=True)) == (1_024, 2_048, 16_384)

    def test_is_the_same_on_every_machine(self, smollm2, alone, monkeypatch):
        """It was not until 0.2.1."""
        for size in (4 * GIB, 999 * GIB):
            monkeypatch.setattr(memory, "trainer_memory", lambda *_, size=size: (size, size))
            assert (
                with_max_tokens(RunSettings.from_values(model_path=smollm2), None, CPU, alone).trainer.max_tokens
                == 2_048
            )

    @pytest.mark.parametrize(("settings", "least"), [({}, 1_024), ({"gradient_checkpointing": True}, 2_048)])
    @pytest.mark.extra
    def test_the_number_to_give_is_the_largest_that_fits(self, smollm2, settings, least):
        config = RunSettings.from_values(model_path=smollm2, max_tokens=16_384, **settings)
        model = empty_model(config)

        def size(tokens):
            return sum(memory_estimate(config.replace(max_tokens=tokens), model).values())

        assert what_to_lower(config, model, size(16_384)) is None
        assert what_to_lower(config, model, size(16_384) - 1) == "give max_tokens=8192"
        assert what_to_lower(config, model, size(least)) == f"give max_tokens={least}"
        assert what_to_lower(config, model, size(1_024) - 1).startswith("lower max_model_len or num_envs")

    @pytest.mark.extra
    def test_the_least_that_a_run_can_do_with_is_among_the_numbers_to_give(self, smollm2):
        config = RunSettings.from_values(model_path=smollm2, max_tokens=4_096, max_model_len=1_100)
        model = empty_model(config)
        size = sum(memory_estimate(config.replace(max_tokens=1_100), model).values())
        assert what_to_lower(config, model, size) == "give max_tokens=1100"
        assert what_to_lower(config, model, size - 1).startswith("lower max_model_len or num_envs")

    def test_chunks_of_logits_follow_from_the_kind_of_device_or_the_setting(self, smollm2):
        def logits(device, **settings):
            config = RunSettings.from_values(model_path=smollm2, max_tokens=16_384, **settings)
            return memory_estimate(config, empty_model(config), device=torch.device(device))["logits"]

        assert (logits("cpu"), logits("cuda")) == (12 * 2**24, 12 * 2**27)
        assert logits("cuda", chunk_logits=10**6) == 12 * 10**6

    def test_a_trainer_made_by_hand_takes_the_most(self):
        assert TrainerConfig().micro_batch_tokens == 16_384
        assert TrainerConfig(max_tokens=60).micro_batch_tokens == 60


class TestRun:
    @pytest.mark.parametrize("algo", EVERY_ALGORITHM)
    def test_of_the_tiny_model_takes_the_most(self, tmp_path, algo):
        run = build_run(small_config(tmp_path, algo))
        assert run.config.trainer.max_tokens == run.trainer.config.micro_batch_tokens == 16_384
        run.close()

    @pytest.mark.usefixtures("little_room")
    def test_the_number_is_in_its_settings(self, tmp_path):
        run = build_run(small_config(tmp_path, max_iterations=1, num_envs=2, batch_size=2))
        chosen = run.config.trainer.max_tokens
        assert 256 < chosen < 16_384
        run.trainer.train()
        run.close()
        assert RunSettings.from_yaml(tmp_path / "run" / "config.yaml").trainer.max_tokens == chosen

    @pytest.mark.usefixtures("little_room")
    def test_a_given_number_counts(self, tmp_path):
        run = build_run(small_config(tmp_path, max_tokens=9_999))
        assert run.trainer.config.micro_batch_tokens == 9_999
        run.close()

    @pytest.mark.extra
    def test_a_resumed_run_keeps_its_number_where_the_default_is_another(self, tmp_path):
        def trained(folder, **changes):
            run = build_run(config(tmp_path / folder, **changes))
            run.trainer.train()
            run.close()
            return run

        # Below it differs how many rows are computed together, and so the rounding.
        config = partial(small_config, lora_r=4, max_iterations=2, num_envs=2, batch_size=16, save_checkpoints=True)
        with pytest.MonkeyPatch.context() as patch:
            give_room(patch, 0)
            whole = trained("whole")
            stopped = trained("stopped", max_iterations=1)
        assert whole.config.trainer.max_tokens == stopped.config.trainer.max_tokens == 256
        longer = {"resume": True, "accept_changes": ["max_iterations"]}
        again = trained("stopped", **longer)
        assert again.config.trainer.max_tokens == 256
        assert torch.equal(weights(again), weights(whole))
        with pytest.raises(ConfigError, match="max_tokens was 256, is 512"):
            build_run(config(tmp_path / "stopped", resume=True, max_tokens=512))

    def test_an_accepted_change_chooses_again(self, tmp_path):
        config = partial(small_config, tmp_path, max_iterations=1, save_checkpoints=True)
        run = build_run(config(max_tokens=512))
        run.trainer.train()
        run.close()
        for accepted, expected in (([], 512), (["max_tokens"], 16_384)):
            again = build_run(config(resume=True, accept_changes=accepted))
            assert again.config.trainer.max_tokens == expected
            again.close()


class Pair(Distributed):
    """Two processes, the other one on the host ``other``."""

    def __init__(self, other):
        super().__init__(Accelerator(cpu=True))
        self.other = other

    def all_gather(self, values):
        return [*values, self.other]


class TestProcesses:
    @pytest.mark.host  # whose memory it is
    @pytest.mark.extra
    def test_share_what_is_free_on_a_host(self, smollm2, monkeypatch, caplog):
        monkeypatch.setattr(memory, "free_memory", lambda: 8 * GIB)
        for host, warns in (("elsewhere", False), (memory.platform.node(), True)):
            with_max_tokens(RunSettings.from_values(model_path=smollm2), None, CPU, Pair(host))
            assert ("and 4.0 GiB are free" in caplog.text) is warns

    def test_sharded_weights(self, smollm2):
        config = RunSettings.from_values(model_path=smollm2, lora_r=0, kl_coeff=0.0, algo="LLMREINFORCE")
        model = empty_model(config)
        one, four = memory_estimate(config, model), memory_estimate(config, model, shards=4)
        assert four["trained weights"] == one["trained weights"] // 4
        assert four["gathered weights"] == 4 * model.num_parameters()
        assert four["activations"] == one["activations"]


@pytest.mark.host  # whose memory they are about
class TestWarnings:
    @pytest.mark.extra
    def test_of_less_that_is_free(self, smollm2, alone, monkeypatch, caplog):
        for free, said in (
            (8 * GIB, None),
            (4 * GIB, "4.0 GiB are free: give max_tokens=1024"),
            (GIB, "1.0 GiB are free: lower max_model_len"),
        ):
            caplog.clear()
            monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
            assert (
                with_max_tokens(RunSettings.from_values(model_path=smollm2), None, CPU, alone).trainer.max_tokens
                == 2_048
            )
            assert ("may take 4.1 GiB of memory (max_tokens=2048" in caplog.text) is (said is not None)
            assert (said or "") in caplog.text

    def test_of_a_resumed_run_are_followed_with_accept_changes(self, smollm2, alone, monkeypatch, caplog):
        monkeypatch.setattr(memory, "free_memory", lambda: 4 * GIB)
        with_max_tokens(RunSettings.from_values(model_path=smollm2), {"max_tokens": 2_048}, CPU, alone)
        assert "give max_tokens=1024 with accept_changes: [max_tokens] (torchrl-llm doctor" in caplog.text

    def test_of_a_family_whose_sizes_are_not_known(self, tmp_path, alone, caplog):
        MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path)
        config = with_max_tokens(RunSettings.from_values(model_path=str(tmp_path), lora_r=0), None, CPU, alone)
        assert config.trainer.max_tokens == 16_384
        assert "cannot be estimated: The configuration of the model does not say its" in caplog.text


class TestEstimate:
    @pytest.mark.host  # whose autocast it is
    @pytest.mark.parametrize(
        ("dtype", "precision"), [("float32", "no"), ("bfloat16", "no"), ("bfloat16", "bf16"), ("float32", "bf16")]
    )
    def test_of_activations_is_near_what_a_backward_keeps(self, tmp_path, dtype, precision):
        """Of adapters on all linear layers; PEFT's casts to float32 were not counted."""
        tokens, layers = 512, 2
        LlamaConfig(
            vocab_size=64, hidden_size=192, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=1,
            intermediate_size=1_024, dtype="float32",
        ).save_pretrained(tmp_path)  # fmt: skip
        config = RunSettings.from_values(
            model_path=str(tmp_path),
            dtype=dtype,
            mixed_precision=precision,
            max_tokens=tokens,
            max_model_len=448,
            lora_r=4,
        )
        shapes = empty_model(config)
        parts = memory_estimate(config, shapes)
        model = AutoModelForCausalLM.from_config(shapes.config, dtype=getattr(torch, dtype))
        models = load_actor_critic(model, lora=make_lora(config))
        weights, kept = {p.data_ptr() for p in models.model.parameters()}, {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage  # which stays, so that no other has its place
            return tensor

        enabled = precision == "bf16"
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), hooks, use_adapter(models.model, "actor"):
            hidden_states(models.model, torch.ones(1, tokens, dtype=torch.int64))
        estimated = parts["activations"] + parts.get("weights in half precision", 0)
        assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(estimated, rel=0.15)

    def test_asked_twice_it_is_the_same_and_draws_nothing(self, smollm2):
        config, before = RunSettings.from_values(model_path=smollm2), torch.get_rng_state()
        model = empty_model(config)
        assert memory_estimate(config, model) == memory_estimate(config, model)
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("lora_r", [0, 4])
    def test_a_teacher_has_the_weights_of_its_files(self, tmp_path, lora_r):
        teacher = load_tiny_model().bfloat16()
        teacher.save_pretrained(tmp_path)
        load_tiny_tokenizer().save_pretrained(tmp_path)
        size = 2 * teacher.num_parameters()
        for given, expected in ((None, None), ("tiny", 2 * size), (str(tmp_path), size)):
            config = RunSettings.from_values(model_path="tiny", lora_r=lora_r, kl_coeff=0.1, teacher=given)
            assert memory_estimate(config, empty_model(config)).get("teacher") == expected

    @pytest.mark.parametrize("lora_r", [0, 4])
    def test_a_trust_region_keeps_the_weights_that_steps_began_with(self, lora_r):
        """One copy of the actor's, on each process of its shards: it computes nothing, and
        is not gathered."""
        config = RunSettings.from_values(model_path="tiny", algo="LLMPPO", lora_r=lora_r, kl_coeff=0.0)
        bounded, model = config.replace(target_kl=0.01), empty_model(config)
        actor = load_actor_critic(load_tiny_model(), lora=make_lora(config), critic=True).actor_parameters()
        copy = 4 * sum(parameter.numel() for parameter in actor)
        for shards in (1, 4):
            free, bound = (memory_estimate(each, model, shards=shards) for each in (config, bounded))
            assert bound == free | {"weights before the step": copy // shards}
