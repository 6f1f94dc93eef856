"""The documentation: its Python blocks run, assert and print what they show, and what it names
exists."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import sys
import tomllib
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import peft
import pytest

from torchrl_llm import functional, keys
from torchrl_llm.cli import command_parser
from torchrl_llm.runs import Run, RunSettings
from torchrl_llm.tuning import TuningConfig
from torchrl_llm.utils.options import options_of
from torchrl_llm.utils.sections import settings_of

ROOT = Path(__file__).resolve().parent.parent
FOUND = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "recipes").glob("*.md")]
PAGES = sorted(path for path in FOUND if "```python" in path.read_text() and path.name != "thinking_models.md")
"""Of that one the blocks need packages with chat templates: ``tests/real_templates`` runs them."""


def python_blocks(text: str) -> list[tuple[int, str, str | None]]:
    """The fenced blocks of exactly ```python: the line it starts at, the code, and the block of
    ```text right below it.

    Others are not meant to run.
    """
    found = re.finditer(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match.group(1), match.group(2)) for match in found]


def trains_the_small_model(names: dict) -> None:
    """Two batches of 64 conversations are played and used, and every tensor of the actor and its
    critic moves."""
    assert names["buffer"].write_count == 128
    assert names["batch"].batch_size == (64,)
    untrained = names["load_actor_critic"](
        names["path"], critic=True, sampling=names["sampling"], tokenizer=names["tokenizer"]
    )
    for part in ("actor_parameters", "critic_parameters"):
        pairs = zip(getattr(untrained, part)(), getattr(names["models"], part)(), strict=True)
        assert all((before != after.cpu()).any() for before, after in pairs), part


SHOWN = {"README.md": trains_the_small_model}
"""What a page shows that its own blocks do not assert. Every block of every other page asserts
something."""


class NoteAssertions(ast.NodeTransformer):
    """Puts ``_ran.add(line)`` before every assertion: an ``assert``, or a call such as
    ``assert_close(...)``."""

    def __init__(self) -> None:
        self.written: set[int] = set()

    def visit_Assert(self, node: ast.stmt) -> list[ast.stmt]:
        self.written.add(node.lineno)
        return [*ast.parse(f"_ran.add({node.lineno})").body, node]

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list[ast.stmt]:
        called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        return self.visit_Assert(node) if called.split(".")[-1].startswith("assert_") else node


def unasserted(page: str, text: str) -> list[str]:
    """Run the blocks of a page in order, in one namespace; then what :data:`SHOWN` has for it.

    Returns:
        ``page:line`` of every assertion that did not run, and of every block that has none (unless
        in ``SHOWN``).

    Raises:
        AssertionError: a block printed something else than the block of text right below it.
    """
    ran, missing = set(), set()
    names = {"__name__": "__docs__", "_ran": ran}
    for line, code, shown in python_blocks(text):
        # The empty lines make tracebacks name the line of the page.
        tree = ast.parse("\n" * line + code, page)
        assertions = NoteAssertions()
        tree = ast.fix_missing_locations(assertions.visit(tree))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, page, "exec", dont_inherit=True), names)
        # Without spaces at the ends of lines, which no page has.
        said = "".join(f"{each.rstrip()}\n" for each in printed.getvalue().splitlines())
        assert shown in (None, said), f"{page}:{line + 1} prints\n{said}"
        missing |= assertions.written or ({line + 1} if Path(page).name not in SHOWN else set())
    SHOWN.get(Path(page).name, lambda names: None)(names)
    return [f"{Path(page).name}:{line}" for line in sorted(missing - ran)]


def test_what_holds_a_mend_is_there():
    """Every test that the table of mended faults names."""
    named = re.findall(r"`([\w/]+\.py)((?:::\w+)*)`", (ROOT / "docs/results/trust.md").read_text())
    assert len(named) > 50
    for path, inside in named:
        text = (ROOT / "tests" / path).read_text()
        for name in inside.split("::")[1:]:
            assert re.search(rf"\b(class|def) {name}\b", text), f"{path}::{name}"


def commands(text: str) -> list[list[str]]:
    """The lines of the fenced blocks of bash, as words, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        words
        for words in (shlex.split(line.replace("<", "").replace(">", ""), comments=True) for line in lines)
        if words
    ]


COMMANDS = [
    pytest.param(words, id=f"{page.name}-{' '.join(words)[:60]}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for words in commands(page.read_text())
]


def test_contributors_find_every_target_that_checks_something():
    named = set(
        re.findall(r"[a-z-]+", " ".join(re.findall(r"`make ([a-z -]+)`", (ROOT / "CONTRIBUTING.md").read_text())))
    )
    checks = {
        each for each in TestCommands.targets if each.startswith(("test", "check", "lint", "type", "bench", "docs"))
    }
    assert checks - named == set()
    assert named <= TestCommands.targets


def test_the_quick_start_names_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    section = (ROOT / "docs/quickstart.md").read_text().split("The extras:")[1].split("##")[0]
    assert {*extras} <= {*re.findall(r"`([a-z-]+)`", section)}


def with_its_neighbours(script: Path) -> str:
    """The source of a script and of what it imports from its own folder, where its flags may be
    defined."""
    source = script.read_text()
    imported = [script.parent / f"{name}.py" for name in re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)]
    return "\n".join([source, *(each.read_text() for each in imported if each.exists())])


class TestCommands:
    targets = frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    @pytest.mark.parametrize("words", COMMANDS)
    def test_what_a_command_names_is_there(self, words):
        if "make" in words:
            assert words[words.index("make") + 1] in self.targets
        for word in words:
            if re.fullmatch(r"(examples|benchmarks)/\S+", word):
                assert (ROOT / word).exists(), word

    @pytest.mark.parametrize("words", COMMANDS)
    def test_its_flags_are_known(self, words):
        scripts = [word for word in words if re.fullmatch(r"(examples|benchmarks)/\w+\.py", word)]
        if not scripts:
            return
        given = [word for word in words[words.index(scripts[0]) + 1 :] if word.startswith("--") and word != "--help"]
        source = with_its_neighbours(ROOT / scripts[0])
        fields_of_config = settings_of(RunSettings).keys() | {"config"}
        for flag in given:
            name = flag[2:].partition("=")[0]
            known = f'"--{name}"' in source
            assert known or ("RunSettings" in source and name.replace("-", "_") in fields_of_config), flag

    @pytest.mark.parametrize("words", [each for each in COMMANDS if each.values[0][0] == "torchrl-llm"])
    def test_commands_of_the_package_and_their_flags_are_known(self, words):
        known = {*command_parser(words[1])._option_string_actions}
        flags = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
        assert {"--" + flag[2:].replace("-", "_") for flag in flags} <= known


LONG = {"agilerl_programs.md", "custom_loss.md", "evaluate.md", "metrics.md", "paper_losses.md", "torchrl_envs.md"}
"""Their blocks take many seconds: ``make test`` leaves them to ``make test-all``."""


def runnable(page: Path) -> Any:
    """A page as a parameter; those that import Ray run where it is installed, in
    ``make test-scale``."""
    needs_ray = "import ray" in "".join(code for _, code, _ in python_blocks(page.read_text()))
    marks = [pytest.mark.ray] * needs_ray + [pytest.mark.extra] * (page.name in LONG)
    return pytest.param(page, id=page.name, marks=marks)


class TestPythonBlocks:
    @pytest.mark.parametrize("page", [runnable(page) for page in PAGES])
    def test_blocks_of_a_page_run_and_assert_what_they_show(self, page, tmp_path, monkeypatch, request):
        if request.node.get_closest_marker("ray"):
            pytest.importorskip("ray", reason="needs Ray: run make test-scale")
        monkeypatch.chdir(tmp_path)
        # GEM runs submitted programs with the python of the PATH.
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        # a page may declare keys of its own
        monkeypatch.setattr(keys, "ROW_VIEW", dict(keys.ROW_VIEW))
        assert unasserted(str(page), page.read_text()) == []

    @pytest.mark.parametrize(
        ("code", "lines"),
        [
            ("assert True", []),
            ("torch.testing.assert_close(1, 1)", []),
            ("def law():\n    assert True\n\n\nlaw()", []),
            ("print(1)", [6]),
            ("len('assert')", [6]),
            ("try:\n    int('1')\nexcept ValueError as error:\n    assert str(error)", [9]),
            ("for _ in []:\n    assert True", [7]),
            ("def law():\n    assert True", [7]),
        ],
    )
    def test_a_block_without_an_assertion_that_runs_is_found(self, code, lines):
        page = f"```python\nimport torch\nassert torch\n```\n```python\n{code}\n```\n"
        assert unasserted("page.md", page) == [f"page.md:{line}" for line in lines]

    @pytest.mark.parametrize(("shown", "right"), [("1\n2\n", True), ("1\n3\n", False)])
    def test_what_a_block_prints_is_compared_with_the_text_below_it(self, shown, right):
        page = f"```python\nfor i in (1, 2):\n    print(i)\nassert i\n```\n\n```text\n{shown}```\n"
        with contextlib.nullcontext() if right else pytest.raises(AssertionError, match=r"(?s)page\.md:2 prints.*1.*2"):
            unasserted("page.md", page)

    def test_a_page_of_shown_is_checked_here_and_needs_no_assertion(self, monkeypatch):
        monkeypatch.setitem(SHOWN, "page.md", lambda names: checked.append(names["a"]))
        checked: list[int] = []
        assert unasserted("page.md", "```python\na = 1\n```\n") == []
        assert checked == [1]

    def test_the_tutorial_is_among_them(self):
        assert {"multiturn.md", "quickstart.md", "extending.md"} <= {page.name for page in PAGES}

    def test_only_plain_python_fences_are_taken(self):
        text = "```python\na = 1\n```\n\n```{code-block} python\nb\n```\n\n```bash\nc\n```\n"
        assert python_blocks(text) == [(1, "a = 1\n", None)]


def messages() -> list[str]:
    """The text of every string of the package, values left out; strings of one f-string as one."""
    found = []
    for path in (ROOT / "torchrl_llm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def holds(message: str, shown: str) -> bool:
    """Whether the parts of ``shown`` between its ``...`` are in a message, one after the other."""
    place = 0
    for part in shown.split("..."):
        place = message.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_error_messages_that_are_explained_are_those_of_the_package():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    shown = re.findall(r"^```text\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    known = messages()
    assert len(shown) > 30
    assert [each for each in shown if not any(holds(message, each) for message in known)] == []


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def tables(text: str) -> list[list[dict[str, str]]]:
    """The Markdown tables of a page, each row by its column names."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = block.strip().split("\n")
        found.append([dict(zip(cells(head), cells(row), strict=True)) for row in rows])
    return found


def settings_named(ours: str) -> list[str]:
    """Bare identifiers in backticks: fields of ``RunSettings``, as the page says."""
    return re.findall(r"(?<![\w}])`([a-z_]+)`", ours)


class TestMigratingFromAgileRL:
    page = (ROOT / "docs" / "migrating_from_agilerl.md").read_text()

    def test_bare_names_in_the_column_ours_are_settings(self):
        known = settings_of(RunSettings).keys() | settings_of(TuningConfig).keys()
        named = [name for table in tables(self.page) for row in table for name in settings_named(row.get("ours", ""))]
        assert len(named) > 40
        assert set(named) <= known

    @pytest.mark.parametrize("section", ["constructors", "methods", "wrapper", "gym", "finetune", "vllm", "helpers"])
    def test_every_name_of_theirs_is_mapped(self, section):
        parts = re.split(r"^## (.*)$", self.page, flags=re.MULTILINE)
        under = dict(zip(parts[1::2], parts[2::2], strict=True))
        found = "".join(under[heading] for heading in SECTIONS[section])
        theirs = {name for table in tables(found) for row in table for name in re.findall(r"\w+", row["AgileRL"])}
        assert set(AGILERL[section].split()) - theirs == set()

    def test_nothing_is_put_off(self):
        assert not re.search(r"not yet|planned", self.page, re.IGNORECASE)

    def test_python_objects_are_there(self):
        named = re.findall(r"\{py:\w+\}`(?:[^`<]*<)?~?(torchrl_llm[\w.]*)>?`", self.page)
        assert len(named) > 40
        for name in named:
            resolve_name(name)

    def test_keyword_arguments_of_ours_are_there(self):
        ours = [cell for table in tables(self.page) for row in table for name, cell in row.items() if name != "AgileRL"]
        calls = [each for cell in ours for each in re.findall(r"([A-Za-z]\w+)\(([^`()]*=[^`()]*)\)", cell)]
        assert len(calls) > 20
        for name, arguments in calls:
            known = options_of(called(name)) if isinstance(called(name), type) else signature(called(name)).parameters
            assert {*re.findall(r"(\w+) ?=", arguments)} <= {*known}, name


def called(name: str) -> Any:
    """A class or function of the package or of PEFT, or a method of a run."""
    parts = ("collectors", "data", "envs", "modules", "objectives", "report", "runs", "trainers", "weight_update")
    owners = [import_module(f"torchrl_llm.{part}") for part in parts] + [functional, Run, peft]
    return next(getattr(owner, name) for owner in owners if hasattr(owner, name))


SECTIONS = {
    "constructors": ["Parameters of LLMPPO, LLMREINFORCE and GRPO"],
    "methods": ["Methods of the algorithms", "Checkpoints"],
    "wrapper": ["TokenObservationWrapper and SyncMultiTurnVecEnv"],
    "gym": ["ReasoningGym and its kin"],
    "finetune": ["finetune_llm_multiturn and its kin"],
    "vllm": ["VLLMConfig"],
    "helpers": ["Helpers"],
}
"""Where the page has the names of a section of :data:`AGILERL`."""


AGILERL = {
    "constructors": """
        accelerator action_granularity activation_offload actor_network adv_clip_range adv_filter_eps adv_norm
        adv_whitening advantage_granularity batch_size beta calc_position_embeddings cast_logprobs_to_fp32 chunk_rows
        clip_coef clone cosine_lr_schedule_config device filter_zero_adv gae_lambda gamma gradient_checkpointing
        group_size hf_generate_chunk_size hp_config importance_sampling_level index lora_config lora_target_scope
        loss_norm loss_type lr lr_actor lr_critic max_grad_norm max_model_len max_output_tokens
        micro_batch_size_per_gpu min_output_tokens min_p mini_batch_size model_config model_name pad_token
        pad_token_id quantization_config reduce_memory_peak repetition_penalty seed temperature top_k top_p
        torch_compiler turn_advantage_trajectory_fallback turn_level_clip turn_ratio_pooling turn_value_reduction
        update_epochs use_fused_linear_logprobs use_kl_advantage_shaping use_liger_loss use_memory_efficient_params
        use_separate_reference_adapter use_sequence_packing use_vllm vf_coef vllm_config
        vllm_importance_sampling_cap vllm_importance_sampling_correction whiten_advantages wrap
        name use_value_head
        CosineLRScheduleConfig config create_warmup_cosine_scheduler max_lr min_lr num_epochs optimizer warmup_proportion
        HyperparameterConfig RLParameter dtype grow_factor items max min mutate names sample shrink_factor value
        INIT_HP action_space agent_wrapper algo algo_kwargs create_population critic_network net_config num_envs
        observation_space population_size tokenizer wrapper_kwargs
        TournamentSelection elitism env_name eval_loop language_model population save_elite elite_path
        save_population_checkpoint select tournament tournament_selection_and_mutation tournament_size
        Mutations activation activation_mutation activation_selection architecture architecture_mutate individual
        mutate_elite mutation mutation_sd new_layer_prob no_mutation parameter_mutation parameters pre_training_mut
        rand_seed rl_hp rl_hyperparam_mutation
    """,
    "methods": """
        add_scores aux_metric_name clean_up clone copy_attributes evolvable_attributes finalize_training_step fitness
        get_action get_action_dim get_lr_names get_policy get_state_dim hp_config index init_training_step
        inspect_attributes learn load load_checkpoint mut mutation_hook population preprocess_observation recompile
        register_mutation_hook register_network_group reinit_optimizers save_checkpoint scores select_adapter
        set_reference_policy set_training_mode steps test to_device unwrap_models update_lr use_adapter wrap_models
        lora_only save_optimizer load_optimizer overwrite_reference_adapter overwrite_critic_adapter merge_lora_configs
        accelerator action_space adapter_name agent checkpoint_path clone device env experiences group hook input_args_only
        loop lr networks_only obs observation observation_space optimizer path reference_update_tracker repeat_prompts
        resume_from_checkpoint sampling_logps save_llm_checkpoint scheduler_config size training turn_ids wrap wrapper_cls
        wrapper_kwargs
    """,
    "wrapper": """
        apply_chat_template build_model_prompt_fields close enable_sliding_window env env_config env_factory
        get_debug_info get_episode_data get_trajectories max_model_len max_output_tokens max_turns pad_id reset step
        strict_chat_template_boundary tokenizer
        SyncMultiTurnVecEnv batch_size completion_ids full_completion_ids group_size max_prompt_tokens seed
        Trajectory TrajectoryBuffer add_trajectory batch_idx clear done env_idx get_active_trajectories get_prompts group_idx
        has_active is_initialized key prompt reset_trajectory sort sorted_by_index trajectory
        FormatRewardWrapper SearchTool action execute_action format_bonus instruction_string num_workers search_url timeout
        topk
    """,
    "gym": """
        accelerator conversation_template create_collate_fn data_batch_size_per_gpu eval_mode max_context_length
        min_completion_length reset return_raw_completions reward_fn seed step test_dataset tokenizer train_dataset
        HuggingFaceGym IterablePromptBatchGym PreferenceGym SFTGym answer apply_chat_template completions question
        reset_dataloaders response_column
    """,
    "finetune": """
        accelerator checkpoint_path checkpoint_steps elite_path env env_config env_factory env_fn evaluation_interval
        evo_steps init_hp log_csv max_reward max_steps max_turns max_wall_seconds mutation num_epochs pop save_elite
        selection_strategy tensorboard tensorboard_log_dir tournament verbose wandb_api_key wandb_entity wandb_kwargs
        wandb_project wandb_run_name wb
        DPO SFT finetune_llm_multiturn finetune_llm_preference finetune_llm_reasoning finetune_llm_sft nll_alpha
    """,
    "vllm": """
        dtype enforce_eager frequency_penalty gpu_memory_utilization kv_cache_dtype kv_cache_memory_bytes
        lora_staging_dir max_lora_rank max_loras max_num_batched_tokens max_num_seqs presence_penalty quantization
        sleep_mode sleep_mode_level stop_sequences strip_multimodal_towers swap_space tensor_parallel_size
        vllm_model_name_or_path
        VLLMConfig
    """,
    "helpers": """
        AutoModelForCausalLMWithValueHead ConditionalTargetEnv ConstantTargetEnv GridNavigationEnv
        MultiInputConditionalEnv PPOValueHead add_value_head agent aggregate_metrics_across_gpus axis base_accelerator
        calculate_k3_kl clone_llm compare_responses create_llm_accelerator create_model_from_name_or_path deepspeed_plugin
        do_sample env gather_if_zero3 gather_tensor get_llm_accelerator get_state_dict idx init_wandb is_peft_model log_p
        log_q mask masked_mean masked_var masked_whiten max_new_tokens model model_config model_name_or_path modifier_rank n
        num_turns original_model params pool_by_turns reduction sample_eval_prompts samples seed shift_mean show_base_model
        skip_special_tokens state_dict temperature token_values tokenizer turn_ids unbiased use_accelerator values zero_stage
    """,
}
"""Public parameters and methods of AgileRL 2.7.0 and 2.9.1, by section of the page."""
