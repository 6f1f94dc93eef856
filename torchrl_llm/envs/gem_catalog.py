"""What the library knows of GEM's environments: their ids, missing packages and data, tasks, rows
and flaws.

Importing this module does not import GEM; the first of its ids that is resolved does.
"""

from __future__ import annotations

import difflib
import inspect
import math
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, NamedTuple, cast

from torch.utils.data import Subset

from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import EnvironmentUnavailableError, UnknownEnvironmentError
from torchrl_llm.envs.gem_words import READS_WORDS, SHIPPED, check_lengths, class_reading, read_words
from torchrl_llm.envs.registry import register_env_family
from torchrl_llm.envs.tasks import Stream, rows_of
from torchrl_llm.envs.text_env import TextEnv
from torchrl_llm.utils.options import ConfigError

# seconds that a grading process may take to start, which imports the main script
_GRADER_TIMEOUT = 60.0


class MissingGEMError(ImportError):
    """GEM cannot be imported."""


def _nothing(env: Any) -> None:
    """The first observation shows all."""


class GEMClass(NamedTuple):
    """What is known of one of GEM's classes of environments.

    Attributes:
        hidden: reads what a reset samples: everything that defines the task. The first observation
            may differ all the same, where it holds a random example, and it need not show the task.
            ``None``: it cannot be read.
        pays_progress: whether it pays each step towards the goal with its share of 1, so that an
            episode that is won has a return of 1, and no reward of 1.
        packages: what it imports, and neither GEM's distribution nor this one brings.
        single_turn: whether it grades one response, and ends; ``None``: not known.
    """

    hidden: Callable[[Any], Any] | None
    pays_progress: bool = False
    packages: tuple[str, ...] = ()
    single_turn: bool | None = False


GEM_CLASSES: dict[str, GEMClass] = {
    "CodeEnv": GEMClass(_nothing, packages=("datasets",), single_turn=True),
    "CrosswordsEnv": GEMClass(attrgetter("max_turns", "board", "solution"), True, ("pandas",)),
    "FifteenPuzzleEnv": GEMClass(attrgetter("max_turns", "board")),
    "Game2048Env": GEMClass(attrgetter("max_turns", "target_tile", "board"), True),
    "GuessTheNumberEnv": GEMClass(attrgetter("max_turns", "min_number", "max_number", "game_number")),
    "HangmanEnv": GEMClass(attrgetter("max_turns", "secret_word"), True),
    "MastermindEnv": GEMClass(attrgetter("max_turns", "num_numbers", "game_code"), True),
    "MathEnv": GEMClass(_nothing, packages=("datasets", "pylatexenc"), single_turn=True),
    # its questions are images
    "MathVisualEnv": GEMClass(None, packages=("datasets", "pylatexenc"), single_turn=True),
    # its task is sampled in the first turn
    "MinesweeperEnv": GEMClass(lambda env: random.getstate(), True),
    "QaEnv": GEMClass(_nothing, packages=("datasets",), single_turn=True),
    "ReasoningGymEnv": GEMClass(_nothing, single_turn=True),
    "SokobanEnv": GEMClass(lambda env: (env.max_turns, env.room_fixed.tolist(), env.room_state.tolist())),
    "SudokuEnv": GEMClass(attrgetter("max_turns", "board"), True),
    "TowerofHanoiEnv": GEMClass(attrgetter("max_turns", "board")),
    "WordSearchEnv": GEMClass(attrgetter("max_turns", "game_board", "placed_words"), True),
    "WordleEnv": GEMClass(attrgetter("max_turns", "secret_word"), True),
}
"""What is known of GEM's environments, by the name of their class."""


# ---------------------------------------- ids


def import_gem(env_id: str) -> Any:
    """The module ``gem``, which an installation on Python 3.12.1 or later does not bring.

    Args:
        env_id: what it is wanted for, named in the error.

    Raises:
        MissingGEMError: it cannot be imported; the message says how to install it.
    """
    try:
        # Only the first time: filters belong to the process, and environments are made in threads
        # too.
        is_imported = "gem" in sys.modules
        with nullcontext() if is_imported else warnings.catch_warnings():
            if not is_imported:
                # cellpylib, which GEM imports by way of reasoning_gym, compares with literals by
                # "is"; a user can do nothing about it. The module of a SyntaxWarning is the file's
                # path.
                warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*[\\/]cellpylib[\\/]")
            import gem
            import gem.envs.registration
    except ImportError as error:
        raise MissingGEMError(
            f"{env_id!r} is an environment of GEM, which cannot be imported here ({error}); gem-llm declares Python <=3.12, "
            "and on later ones pip installs it only if told to: pip install --ignore-requires-python gem-llm==0.1.0. "
            "Environments of your own (pass a factory, or register_env_family) and PromptDatasetEnv need no GEM."
        ) from error
    return gem


def _registered(env_id: str) -> Any:
    """GEM's own specification of an id: its ``entry_point`` and ``kwargs``.

    Raises:
        MissingGEMError: GEM cannot be imported.
        UnknownEnvironmentError: the id is not registered; close matches are named.
    """
    registry = import_gem(env_id).envs.registration.ENV_REGISTRY
    if env_id not in registry:
        family, named, _ = env_id.partition(":")
        if named and family not in (own := {each.partition(":")[0] for each in registry}):
            raise UnknownEnvironmentError(
                f"{env_id!r} is of the family {family!r}, which is neither registered here nor one of GEM's, {sorted(own)}. A family of your own "
                "is known once the module that calls register_env_family is imported: run your own script that does and then "
                "calls torchrl_llm.cli.main, or pass the environment as a factory."
            )
        close = difflib.get_close_matches(env_id, registry, n=5, cutoff=0.4)
        meant = f"Did you mean one of {close}? " if close else ""
        raise UnknownEnvironmentError(
            f"GEM has no environment {env_id!r}. {meant}gem.print_envs() lists them all; another environment can be passed as a "
            "factory, or its family registered with register_env_family."
        )
    return registry[env_id]


def _maker_name(env_id: str) -> str:
    return str(_registered(env_id).entry_point).rpartition(":")[2]


def gem_class(env_id: str) -> GEMClass:
    """What is known of the class that GEM makes for an id."""
    return GEM_CLASSES.get(_maker_name(env_id), GEMClass(None, single_turn=None))


def _resolve(env_id: str) -> EnvSpec:
    env_id = env_id.removeprefix("gem:")
    known = gem_class(env_id)
    return EnvSpec(
        env_id,
        partial(_make, env_id),
        success_by="return" if known.pays_progress else "last",
        divide=not env_id.startswith("eval:"),  # these are held out as they are
        single_turn=known.single_turn,
    )


register_env_family("gem", _resolve)


def _make(env_id: str, **options: Any) -> TextEnv:
    """Make a GEM environment, with options of ``gem.make``; games of words also take ``word_list``
    (:func:`read_words`).

    Raises:
        EnvironmentUnavailableError: it cannot be made; the message says what it lacks.
        ConfigError: it has no such option.
        MissingGEMError: GEM cannot be imported.
    """
    gem = import_gem(env_id)
    try:
        if "word_list" in options and _maker_name(env_id) in READS_WORDS:
            return _make_with_words(env_id, **options)
        _check_names(env_id, options)
        return cast(TextEnv, gem.make(env_id, **options))
    except ConfigError:
        raise
    except Exception as error:
        raise EnvironmentUnavailableError(env_id, _needs(env_id, error), error) from error


def _make_with_words(env_id: str, word_list: str, **options: Any) -> TextEnv:
    """As ``gem.make``, with another word list."""
    words = read_words(word_list)
    _check_names(env_id, options)
    spec = _registered(env_id)
    given = {**spec.kwargs, **options}
    check_lengths(words, _maker_name(env_id), given.get("word_length"), word_list)
    env = class_reading(words, spec.entry_point)(**given)
    env.env_id, env.entry_point = env_id, spec.entry_point
    return cast(TextEnv, env)


def _check_names(env_id: str, options: Mapping[str, Any]) -> None:
    """Refuse arguments that GEM would ignore: its games take any and call them ``_``."""
    if not options:
        return
    maker = _registered(env_id).entry_point
    if isinstance(maker, str):
        module, _, name = maker.partition(":")
        maker = getattr(import_module(module), name)
    parameters = inspect.signature(maker).parameters
    known = [name for name, each in parameters.items() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    unknown = sorted(set(options) - set(known))
    if unknown and "_" in parameters:
        raise ConfigError(
            f"The environment {env_id!r} has no argument {', '.join(unknown)}, which env_options names; it has "
            f"{', '.join(known)}."
        )


def _needs(env_id: str, error: Exception) -> str:
    """What is to be done about an error of ``gem.make``."""
    hosted = _registered(env_id).kwargs.get("dataset_name")
    local = f"or pass local data with a factory: lambda: gem.make({env_id!r}, dataset=...), a datasets.Dataset"
    if isinstance(error, LookupError) and "NLTK" in str(error):
        return (
            'It reads NLTK\'s word list: nltk.download("words") fetches it once; without a network put it below a folder '
            "of NLTK_DATA as corpora/words/en, one word a line, or give the environment the option word_list, a file of words or "
            f"{SHIPPED!r}, a list that is installed with GEM."
        )
    if isinstance(error, ImportError):
        named = getattr(error.__context__, "name", None) or error.name or "the package named below"
        package = " ".join(name for name in gem_class(env_id).packages if find_spec(name) is None) or named
        data = f" Its data is {hosted!r} of the Hugging Face hub, {local}." if hosted else ""
        return f"It needs a package: pip install {package}.{data}"
    if hosted:
        return f"It loads {hosted!r} from the Hugging Face hub: connect to it, {local}."
    return "It fails with its registered arguments; give others with a factory: lambda: gem.make(id, ...)."


# ---------------------------------------- environments that were made


def _unwrap(env: Any) -> tuple[Any, set[str]]:
    """The environment beneath wrappers, and the names of GEM's own classes in its ``__mro__``."""
    env = getattr(env, "unwrapped", env)
    return env, {cls.__name__ for cls in type(env).__mro__ if cls.__module__.startswith("gem.envs.")}


def hidden_reader(env: Any) -> Callable[[Any], Any] | None:
    """The function that reads the hidden state of an environment, if it is GEM's and known; else
    ``None``."""
    kinds = _unwrap(env)[1]
    return next((known.hidden for name, known in GEM_CLASSES.items() if name in kinds), None)


def prepare(env: TextEnv, name: str, stream: Stream | None) -> None:
    """Make an episode of one of GEM's environments depend on its task and responses alone; others
    stay as they are.

    Args:
        env: changed in place.
        name: of the environment, for messages.
        stream: keep its rows only, see :func:`divide_rows`; ``None``: all.

    Raises:
        EnvironmentUnavailableError: its process for grading does not start, or it has too few rows
            to divide.
    """
    gem_env, kinds = _unwrap(env)
    if "ReasoningGymEnv" in kinds:
        gem_env.size = math.inf  # it makes new questions after `size` resets of an instance
    elif "QaEnv" in kinds:
        gem_env.extractor = partial(_answer_or_none, gem_env.extractor)
    elif "MathEnv" in kinds:
        _wait_for_grader(gem_env, name)
    if stream is None:
        return
    try:
        divide_rows(env, stream)
    except ValueError as error:
        needs = f"The streams of training and evaluation use different rows of it: {error}."
        raise EnvironmentUnavailableError(name, needs, error) from error


def _answer_or_none(extract: Callable[[str], str | None], response: str) -> str:
    """The answer in a response; without one, where GEM would raise, an answer that is never
    right."""
    # QaEnv.step of gem-llm 0.1.0 reads `is_correct` unassigned where no answer is found.
    answer = extract(response)
    return "\0" if answer is None else answer


def _wait_for_grader(math_env: Any, name: str) -> None:
    """Let it grade once, which takes longer at first: GEM counts an answer as wrong that is not
    graded within a second."""
    from multiprocessing import TimeoutError as NotGraded

    answer = r"\boxed{1}", "2"
    if not math_env.use_mp:
        math_env.check_correct(*answer)
        return
    try:
        math_env.mp_pool.apply_async(math_env.check_correct, answer).get(timeout=_GRADER_TIMEOUT)
    except NotGraded as error:
        # A pool starts a new process for each that ends, so one that cannot start would be started
        # forever.
        math_env.mp_pool.terminate()
        needs = (
            f"The process that grades its answers has not started within {_GRADER_TIMEOUT:.0f} s. It imports the main script "
            'again: what that runs belongs under `if __name__ == "__main__":`. Or grade in this process, with use_mp=False.'
        )
        raise EnvironmentUnavailableError(name, needs, error) from error


def divide_rows(env: Any, stream: Stream) -> None:
    """Restrict one of GEM's data-backed environments, in place, to the rows of ``stream``: no two
    streams share one.

    Eight tenths are for training, one for evaluations during a run, one for those before and after
    it. Rows of a data set with the same question are one; rows of reasoning_gym are only counted,
    since to make all takes minutes. Other environments stay as they are.

    Args:
        env: a text environment; wrappers are seen through.
        stream: the stream.

    Raises:
        ValueError: there are fewer than ten different questions.
    """
    gem_env, kinds = _unwrap(env)
    if "ReasoningGymEnv" in kinds:
        gem_env.ds = Subset(gem_env.ds, rows_of(range(len(gem_env.ds)), stream))
    elif kinds & {"MathEnv", "QaEnv", "CodeEnv"}:
        gem_env.dataset = gem_env.dataset.select(rows_of(gem_env.dataset[gem_env.question_key], stream))
